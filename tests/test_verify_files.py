"""``verify`` on whole file sets: framing, parts, padding, what lies between objects, unusable encodings."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
import struct
from typing import Any

import pytest

from ninferbuild.artifact.framing import HEADER, PART_MAGIC
from ninferbuild.artifact.schema import ResourceSpec, TensorSpec
from ninferbuild.artifact.writer import ArtifactWriter
from ninferbuild.verify import Verification, verify

IDENTITY = bytes(range(16))
FIRST_PART = "s.ninfer.part-0001"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A resource of 20000 bytes and two vectors, in an entry and two parts of 4096 + 8192 bytes each."""
    path = tmp_path / "s.ninfer"
    specs = [
        ResourceSpec("data", 20000),
        TensorSpec("a", (3,), "bf16", "contiguous_le_v1"),
        TensorSpec("b", (4,), "fp32", "contiguous_le_v1"),
    ]
    with ArtifactWriter(
        path, specs, components={"text": {"config": {}}}, bindings={}, max_file_bytes=12288, artifact_id=IDENTITY
    ) as writer:
        writer.write_object("data", bytes(index % 251 for index in range(20000)))
        writer.write_object("a", b"abcdef")
        writer.write_object("b", bytes(16))
    assert [item.offset for item in writer.objects] == [0, 20224, 20480]
    return path


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def only(result: Verification) -> Any:
    """The one finding of an invalid artifact."""
    (finding,) = result.findings
    assert (result.exit_code, result.invalid) == (1, 1)
    return finding


def test_a_sound_set(split: Path) -> None:
    result = verify(split)
    assert result.findings == ()
    assert (result.exit_code, result.objects, result.unchecked, result.payload_bytes) == (0, 3, 0, 20496)
    assert result.files == ("s.ninfer", FIRST_PART, "s.ninfer.part-0002")
    assert result.artifact_id == IDENTITY


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda data: b"", "ends inside"),
        (lambda data: b"GGUF" + data[4:], "magic is missing"),
        (lambda data: data[:7] + b"\x02" + data[8:], "version 2"),
        (lambda data: PART_MAGIC + data[8:], "continuation"),
        (lambda data: data[:8] + struct.pack("<Q", 0) + data[16:], "empty directory"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "the file has 12288"),
        (lambda data: data[:-1], "the file has 12287 bytes"),
        (lambda data: data + b"\0", "the file has 12289 bytes"),
        (lambda data: data.replace(b'"bf16"', b'"bf16","x":1', 1), "unknown member 'x'"),
        (lambda data: data.replace(b'"objects"', b'"0bjects"', 1), "'objects' is missing"),
        (lambda data: data.replace(b'"shape":[3]', b'"shape":[0]', 1), "shape"),
    ],
)
def test_an_entry_that_does_not_open(split: Path, change: Callable[[bytes], bytes], part: str) -> None:
    split.write_bytes(change(split.read_bytes()))
    result = verify(split)
    finding = only(result)
    assert finding.file == "s.ninfer"
    assert part in finding.problem
    assert (result.artifact_id, result.objects) == (None, 0)


def test_a_missing_entry(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "none.ninfer")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (None, "missing"),
        (lambda data: HEADER.pack(PART_MAGIC, 1, bytes(16)) + data[32:], "does not belong"),
        (lambda data: HEADER.pack(PART_MAGIC, 2, IDENTITY) + data[32:], "does not belong"),
        (lambda data: b"NINFER\0\3" + data[8:], "does not belong"),
        (lambda data: data + b"\0", "12289 bytes"),
        (lambda data: data[:-1], "12287 bytes"),
        (lambda data: data[:20], "does not belong"),
    ],
)
def test_a_part_that_is_not_whole(split: Path, change: Callable[[bytes], bytes] | None, part: str) -> None:
    file = split.with_name(FIRST_PART)
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    result = verify(split)
    finding = only(result)
    assert finding.file == FIRST_PART
    assert part in finding.problem
    assert result.unchecked == 1  # the resource; the vectors lie in the second part


@pytest.mark.parametrize("offset", [32, 2000, 4095])
def test_padding_of_a_part(split: Path, offset: int) -> None:
    patch(split.with_name(FIRST_PART), offset, b"\x01")
    finding = only(verify(split))
    assert (finding.file, finding.offset) == (FIRST_PART, offset)


def test_padding_of_the_entry(split: Path) -> None:
    """A directory that is declared shorter leaves padding that has to be zero, not white space."""
    data = split.read_bytes()
    length = len(data[32:4096].rstrip(b" "))
    split.write_bytes(
        data[:8] + struct.pack("<Q", length) + data[16 : 32 + length] + bytes(4064 - length) + data[4096:]
    )
    assert verify(split).exit_code == 0
    patch(split, 32 + length, b" ")
    finding = only(verify(split))
    assert (finding.file, finding.offset) == ("s.ninfer", 32 + length)


@pytest.mark.parametrize("offset", [20000, 20223, 20230, 20479])
def test_between_objects(split: Path, offset: int) -> None:
    """Logical bytes from 16384 on lie in the second part."""
    patch(split.with_name("s.ninfer.part-0002"), 4096 + offset - 16384, b"\x80")
    finding = only(verify(split))
    assert (finding.file, finding.object, finding.offset) == (None, None, offset)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the directory of an entry, keeping its length."""
    data = path.read_bytes()
    directory = json.loads(data[32:4096])
    change(directory)
    text = json.dumps(directory, separators=(",", ":")).encode().ljust(4064)
    assert len(text) == 4064
    path.write_bytes(data[:32] + text + data[4096:])


def test_what_nothing_refers_to_may_be_anything(split: Path) -> None:
    """A gap that is no alignment, and payload after the last object, mean nothing and are not checked."""

    def drop(directory: dict[str, Any]) -> None:
        del directory["objects"][1]

    rewrite(split, drop)
    assert verify(split).findings == ()
    rewrite(split, lambda directory: directory["objects"].pop())
    assert verify(split).findings == ()


@pytest.mark.parametrize(
    ("member", "value", "part"),
    [
        ("format", "q3_g64_fp16", "unknown numeric format 'q3_g64_fp16'"),
        ("layout", "row_split_panel4_v1", "unknown tensor layout 'row_split_panel4_v1'"),
        ("format", "q4_g64_fp16", "'q4_g64_fp16'"),
        ("shape", [2], "takes 4"),
        ("offset", 20225, "not a multiple of 256"),
        ("divisors", 2, "divisor"),
    ],
)
def test_an_encoding_that_is_unusable(split: Path, member: str, value: Any, part: str) -> None:
    rewrite(split, lambda directory: directory["objects"][1].update({member: value}))
    result = verify(split)
    finding = only(result)
    assert finding.object == "a"
    assert part in finding.problem
    assert result.unchecked == 1


def test_an_unknown_resource_encoding(split: Path) -> None:
    rewrite(split, lambda directory: directory["objects"][0].update(encoding="zip_v1"))
    finding = only(verify(split))
    assert finding.object == "data"
    assert "zip_v1" in finding.problem


def test_progress(split: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(split, observe=lambda done, total: seen.append((done, total)))
    assert seen == [(20000, 20496), (20230, 20496), (20496, 20496)]
