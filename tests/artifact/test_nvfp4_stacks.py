"""Stacked divisors in an artifact: geometry, payloads, the directory's member, reading and verifying."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
import struct
from typing import Any

import pytest
import torch

from ninferbuild.artifact.codecs.nvfp4 import (
    decode_nvfp4_words,
    dequantize_nvfp4,
    encode_nvfp4,
    swizzle_nvfp4_scales,
)
from ninferbuild.artifact.formats import NUMERIC_FORMATS, default_layout
from ninferbuild.artifact.inspect import artifact_report, text_lines
from ninferbuild.artifact.layouts import block_scale_geometry, encoded_size
from ninferbuild.artifact.primitives import ArtifactError
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import TensorSpec, parse_directory, plan_objects, validate_encoding
from ninferbuild.artifact.writer import ArtifactWriter
from ninferbuild.verify import verify

LAYOUT = "block_scale_k16_m128x4_v1"


@pytest.mark.parametrize(
    ("rows", "columns", "divisors", "scales", "words", "size"),
    [
        (128, 64, 1, 4096, 4608, 4612),
        (256, 64, 2, 8192, 9216, 9224),
        (384, 64, 3, 12288, 13824, 13836),
        (34816, 5120, 1, 89128960, 100270080, 100270084),
        (5120, 17408, 1, 44564480, 50135040, 50135044),
        (262144, 2048, 512, 268435456, 301989888, 301991936),
        (524288, 512, 256, 134217728, 150994944, 150995968),
        (1024, 2048, 2, 1048576, 1179648, 1179656),
    ],
)
def test_geometry(rows: int, columns: int, divisors: int, scales: int, words: int, size: int) -> None:
    geometry = block_scale_geometry((rows, columns), divisors)
    assert (geometry.scale_offset, geometry.divisor_offset) == (scales, words)
    assert encoded_size(LAYOUT, "nvfp4", (rows, columns), divisors) == size


def test_counts_that_a_plane_cannot_have() -> None:
    with pytest.raises(ValueError, match="each NVFP4 divisor must cover a whole number of 128-row scale tiles"):
        encoded_size(LAYOUT, "nvfp4", (256, 64), 4)
    with pytest.raises(ValueError, match="NVFP4 divisor count must divide the plane's rows"):
        encoded_size(LAYOUT, "nvfp4", (256, 64), 3)
    for format in NUMERIC_FORMATS:
        layout = default_layout(format)
        if layout != LAYOUT:
            with pytest.raises(ValueError, match=f"layout '{layout}' stores one divisor, not 2"):
                encoded_size(layout, format, (256, 128), 2)


@pytest.mark.parametrize(
    ("row", "group", "columns", "offset"),
    [
        (0, 0, 64, 0),
        (1, 0, 64, 16),
        (32, 0, 64, 4),
        (127, 3, 64, 511),
        (128, 0, 64, 512),
        (0, 4, 128, 512),
        (130, 5, 128, 1569),
    ],
)
def test_where_a_scale_lies(row: int, group: int, columns: int, offset: int) -> None:
    scales = torch.zeros(256, columns // 16, dtype=torch.uint8)
    scales[row, group] = 1
    assert swizzle_nvfp4_scales(scales).nonzero().flatten().tolist() == [offset]


def words_of(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[N, K/2]`` and natural scales ``[N, K/16]``."""
    r = torch.arange(rows).unsqueeze(1)
    codes = (7 * r + 3 * torch.arange(columns // 2)) % 256
    scales = (r + 5 * torch.arange(columns // 16)) % 127
    return codes.to(torch.uint8), scales.to(torch.uint8)


def payload_of(rows: int, columns: int, *divisors: float) -> bytes:
    words = struct.pack(f"<{len(divisors)}f", *divisors)
    return encode_nvfp4(*words_of(rows, columns), words, (rows, columns), len(divisors))


@pytest.mark.parametrize(
    ("shape", "divisors", "digest"),
    [
        ((256, 64), (2.0,), "4cb5acd7d46dfff34841a51fed335e09d6b1ff9eaadc2e7812d9978a45f59332"),
        ((256, 64), (2.0, 4.0), "4bad11bf4dee7f2f5a65011aa21699631fe020d7cb1a7fbd9381cc8dcf7fd905"),
        ((256, 128), (2.0, 4.0), "6863fb1ccde3097d76a0c34853037f0b74fa82daf9f6d712df33e25400cfc065"),
        ((384, 64), (3.0, 1.0, 3.0), "c6929e13210db7602fffa9069da6cd04fa6c5f28b226dd1901540f6c0d6fc6ff"),
    ],
)
def test_payloads(shape: tuple[int, int], divisors: tuple[float, ...], digest: str) -> None:
    payload = payload_of(*shape, *divisors)
    assert hashlib.sha256(payload).hexdigest() == digest
    again = decode_nvfp4_words(payload, shape, len(divisors))
    codes, scales = words_of(*shape)
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.scales, scales)
    assert again.divisors == tuple(struct.pack("<f", value) for value in divisors)


def test_an_element_is_divided_by_the_word_of_its_matrix() -> None:
    payload = payload_of(256, 64, 2.0, 4.0)
    assert payload[8192:8200].hex(" ") == "00 05 0a 0f 20 25 2a 2f"
    assert payload[-8:].hex(" ") == "00 00 00 40 00 00 80 40"
    stack = dequantize_nvfp4(payload, (256, 64), 2, dtype=torch.float32)
    assert stack[200, 5] == 6.75
    plain = dequantize_nvfp4(payload_of(256, 64, 2.0), (256, 64), dtype=torch.float32)
    assert torch.equal(stack[:128], plain[:128])
    assert torch.equal(stack[128:], plain[128:] / 2)


def record(**changes: Any) -> dict[str, Any]:
    """The directory of one stack of two matrices, with its object changed."""
    (item,) = plan_objects([TensorSpec("w", (256, 64), "nvfp4", LAYOUT, 2)])
    return {
        "components": {"text": {"config": {}}},
        "objects": [item.to_json() | changes],
        "bindings": {"text/w": {"object": "w"}},
        "uses": [],
        "metadata": {},
        "provenance": {},
        "files": [{"path": None, "payload_bytes": 9224}],
    }


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None, 2**64])
def test_counts_that_are_none(count: object) -> None:
    with pytest.raises(ArtifactError, match="divisors"):
        parse_directory(record(divisors=count))


def test_an_object_of_another_length() -> None:
    validate_encoding(parse_directory(record()).objects[0])
    for changes in ({"bytes": 9220}, {"divisors": 1}, {"divisors": 4}):
        with pytest.raises(ArtifactError, match="object 'w': "):
            validate_encoding(parse_directory(record(**changes)).objects[0])


def write(path: Path, *divisors: float) -> Path:
    spec = TensorSpec("w", (256, 64), "nvfp4", LAYOUT, len(divisors))
    members = {"components": {"text": {"config": {}}}, "bindings": {"text/w": {"object": "w"}}}
    with ArtifactWriter(path, [spec], **members, artifact_id=bytes(16)) as writer:
        writer.write_object("w", payload_of(256, 64, *divisors))
    return path


def test_the_member_is_left_out_when_there_is_one_divisor(tmp_path: Path) -> None:
    written = write(tmp_path / "one.ninfer", 2.0)
    assert b"divisors" not in written.read_bytes()
    with Artifact(written) as artifact:
        (item,) = artifact.objects
        assert item.divisors == 1
        assert "divisors" not in item.to_json()
    # A member that says 1 says nothing new.
    again = parse_directory(record(divisors=1, bytes=9220) | {"files": [{"path": None, "payload_bytes": 9220}]})
    assert "divisors" not in again.objects[0].to_json()


def test_reading_inspecting_and_verifying_a_stack(tmp_path: Path) -> None:
    path = write(tmp_path / "stack.ninfer", 2.0, 4.0)
    with Artifact(path) as artifact:
        (item,) = artifact.objects
        assert (item.divisors, item.bytes) == (2, 9224)
        words = decode_nvfp4_words(artifact.read_object("w"), item.shape, item.divisors)
        assert words.divisors == (struct.pack("<f", 2.0), struct.pack("<f", 4.0))
        assert artifact_report(artifact, objects=True)["object_records"][0]["divisors"] == 2
        assert any(line.endswith("[256, 64] 2 divisors w") for line in text_lines(artifact, objects=True))
    assert verify(path).exit_code == 0


@pytest.mark.parametrize("word", [0.0, -2.0, float("inf"), float("nan")])
def test_a_bad_word_of_a_stack_is_found(word: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        payload_of(256, 64, 2.0, word)
    path = write(tmp_path / "stack.ninfer", 2.0, 4.0)
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<2f", 2.0, 4.0), struct.pack("<2f", 2.0, word)))
    result = verify(path)
    assert result.exit_code == 1
    assert "finite and positive" in json.dumps(result.to_json())
