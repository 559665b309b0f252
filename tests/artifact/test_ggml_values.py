"""Values of ggml blocks: fixed vectors, formulas written out element by element, and the package ``gguf``."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
from pathlib import Path
import struct
import sys

from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.artifact.codecs import ggml_values
from ninferbuild.artifact.codecs.ggml_values import MissingPackageError, decode_rows
from ninferbuild.artifact.codecs.gguf_blocks import dequantize_gguf_blocks
from ninferbuild.artifact.formats import GGUF_FORMATS
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.artifact.writer import ArtifactWriter

ONE, HALF = b"\x00\x3c", b"\x00\x38"

SCALES = {  # offset of d, offset of dmin
    "gguf_q2_k": (80, 82),
    "gguf_q3_k": (108, None),
    "gguf_q4_k": (0, 2),
    "gguf_q5_k": (0, 2),
    "gguf_q6_k": (208, None),
}

VECTORS = {
    "gguf_q4_0": ((-3, 2, 7, -4, 1, 6), (-5, -3, 0), -21, "719ac4caff117908"),
    "gguf_q5_0": ((9, -2, 3, -8, 13, -14), (-4, 14, 1), 15, "1b2c6393c9c607af"),
    "gguf_q8_0": ((85, 122, -97, -60, -23, 14), (-122, -85, -48), -176, "1ca5b7e7309e0514"),
    "gguf_q2_0": ((0, 0, 0, 0, 1, 1), (-1, -1, 1), 30, "5a8bd18ced6200c1"),
    "gguf_iq4_nl": ((-35, 25, 113, -49, 13, 89), (-65, -35, 1), -257, "410b8f17e2a73bd1"),
    "gguf_q2_k": ((33, 0, 11, 22, 33, 0), (-1.5, 4.5, 4.5), 2059, "b72b3fc54a072b34"),
    "gguf_q3_k": ((81, -108, 27, -54, 81, -108), (-42, -28, 42), 958, "61ce1b467bea0e2e"),
    "gguf_q4_k": ((315.5, -25.5, 129.5, 284.5, 439.5, 98.5), (18.5, 36.5, 48.5), 54440, "667eb74a3ab99d3d"),
    "gguf_q5_k": ((811.5, -25.5, 625.5, 284.5, 935.5, 98.5), (78.5, 96.5, 108.5), 116216, "8c5b6c3d07a6b97a"),
    "gguf_q6_k": ((-1431, 1696, 583, -530, -1643, 1484), (150, -40, -60), 4612, "b0d4aeb36070c1e8"),
    "gguf_iq4_xs": ((65, -1, -69, 83, 10, -53), (784, 352, -16), -11005, "95dfe54ba6e43447"),
    "gguf_iq2_xxs": (
        (-59.125, 59.125, 34.375, -34.375, 34.375, -11),
        (46.875, 15, -80.625),
        763.75,
        "154220fd47068027",
    ),
    "gguf_iq2_xs": ((-11, 34.375, -11, -59.125, -11, -34.375), (-59.375, 19, -19), 1490.5, "8f598e062eb080aa"),
    "gguf_iq2_s": (
        (-145.125, 84.375, -27, 27, -27, -145.125),
        (-78.125, -78.125, 78.125),
        -800.625,
        "2d01f1334a2455d5",
    ),
    "gguf_iq3_xxs": ((-13, 9, -7, 3, -15.5, 7), (21, 9, -15), -684, "35aa99c61a8a85f2"),
    "gguf_iq3_s": ((-81, 243, -351, -189, -351, -189), (-25, 125, 225), 1456, "e6b8f41fe5dd4b83"),
    "gguf_iq1_s": ((-2.625, 0.375, 3.375, 3.375, 3.375, 0.375), (-4.375, 0.625, -4.375), 20, "ee7ef48aff8d8d16"),
    "gguf_iq1_m": ((-0.875, 6.125, -0.875, -0.875, 6.125, -0.875), (13.125, 13.125, -1.875), 41, "d0b2bfe130d7b46d"),
}
"""First six values, last three, sum, and the first 16 hexadecimal digits of the SHA-256 of all."""


def decoded(blocks: bytes | np.ndarray, format: str, rows: int = 1) -> np.ndarray:
    record = GGUF_FORMATS[format]
    data = np.frombuffer(bytes(blocks), np.uint8).reshape(rows, -1)
    values = np.empty((rows, data.shape[1] // record.block_bytes * record.block_elements), np.float32)
    decode_rows(data, format, values)
    return values


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_fixed_vectors(format: str) -> None:
    block = bytearray((37 * i + 11) & 255 for i in range(GGUF_FORMATS[format].block_bytes))
    if format == "gguf_iq1_m":
        for place, nibble in zip((49, 51, 53, 55), (0, 0, 0xC, 0x3), strict=True):
            block[place] = block[place] & 15 | nibble << 4
    else:
        scale, minimum = SCALES.get(format, (0, None))
        block[scale : scale + 2] = ONE
        if minimum is not None:
            block[minimum : minimum + 2] = HALF
    (values,) = decoded(block, format)
    first, last, total, digest = VECTORS[format]
    assert (tuple(values[:6]), tuple(values[-3:]), values.sum(dtype=np.float64)) == (first, last, total)
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize(("codes", "value"), [(0xAA, 2.0), (0xFF, 4.0), (0x00, -2.0), (0x55, 0.0)])
def test_codes_of_q2_0(codes: int, value: float) -> None:
    (values,) = decoded(b"\x00\x40" + bytes([codes]) * 16, "gguf_q2_0")
    assert values.tolist() == [value] * 64


def half(block: bytes, offset: int) -> np.float32:
    return np.frombuffer(block, "<f2", 1, offset)[0].astype(np.float32)


def word(block: bytes, offset: int, form: str) -> int:
    return int(struct.unpack_from(f"<{form}", block, offset)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


KV = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def q4_0(b: bytes, j: int) -> np.float32:
    return half(b, 0) * np.float32((b[2 + j % 16] >> 4 * (j // 16) & 15) - 8)


def q5_0(b: bytes, j: int) -> np.float32:
    low, high = b[6 + j % 16] >> 4 * (j // 16) & 15, word(b, 2, "I") >> j & 1
    return half(b, 0) * np.float32((low | high << 4) - 16)


def q8_0(b: bytes, j: int) -> np.float32:
    return half(b, 0) * np.float32(signed(b[2 + j]))


def q2_0(b: bytes, j: int) -> np.float32:
    return half(b, 0) * np.float32((b[2 + j // 4] >> 2 * (j % 4) & 3) - 1)


def iq4_nl(b: bytes, j: int) -> np.float32:
    return half(b, 0) * np.float32(KV[b[2 + j % 16] >> 4 * (j // 16) & 15])


def q2_k(b: bytes, j: int) -> np.float32:
    scales, q = b[j // 16], b[16 + 32 * (j // 128) + j % 32] >> 2 * (j // 32 % 4) & 3
    return (half(b, 80) * np.float32(scales & 15)) * np.float32(q) - half(b, 82) * np.float32(scales >> 4)


def q3_k(b: bytes, j: int) -> np.float32:
    i = j // 16
    scale = (b[96 + i % 8] >> 4 * (i // 8) & 15 | (b[104 + i % 4] >> 2 * (i // 4) & 3) << 4) - 32
    q = (b[32 + 32 * (j // 128) + j % 32] >> 2 * (j // 32 % 4) & 3) - (0 if b[j % 32] >> j // 32 & 1 else 4)
    return (half(b, 108) * np.float32(scale)) * np.float32(q)


def six_bits(b: bytes, i: int) -> tuple[int, int]:
    """Scale and minimum of a group of q4_k and q5_k."""
    t = b[4:16]
    if i < 4:
        return t[i] & 63, t[4 + i] & 63
    return t[4 + i] & 15 | t[i - 4] >> 6 << 4, t[4 + i] >> 4 | t[i] >> 6 << 4


def q4_k(b: bytes, j: int) -> np.float32:
    scale, minimum = six_bits(b, j // 32)
    q = b[16 + 32 * (j // 64) + j % 32] >> 4 * (j // 32 % 2) & 15
    return (half(b, 0) * np.float32(scale)) * np.float32(q) - half(b, 2) * np.float32(minimum)


def q5_k(b: bytes, j: int) -> np.float32:
    scale, minimum = six_bits(b, j // 32)
    q = b[48 + 32 * (j // 64) + j % 32] >> 4 * (j // 32 % 2) & 15 | (b[16 + j % 32] >> j // 32 & 1) << 4
    return (half(b, 0) * np.float32(scale)) * np.float32(q) - half(b, 2) * np.float32(minimum)


def q6_k(b: bytes, j: int) -> np.float32:
    n, r = divmod(j, 128)
    q = (b[64 * n + r % 64] >> 4 * (r // 64) & 15 | (b[128 + 32 * n + r % 32] >> 2 * (r // 32) & 3) << 4) - 32
    return (half(b, 208) * np.float32(signed(b[192 + j // 16]))) * np.float32(q)


def iq4_xs(b: bytes, j: int) -> np.float32:
    i = j // 32
    scale = (b[4 + i // 2] >> 4 * (i % 2) & 15 | (word(b, 2, "H") >> 2 * i & 3) << 4) - 32
    return (half(b, 0) * np.float32(scale)) * np.float32(KV[b[8 + 16 * i + j % 16] >> 4 * (j % 32 // 16) & 15])


FORMULAS: dict[str, Callable[[bytes, int], np.float32]] = {
    f"gguf_{f.__name__}": f for f in (q4_0, q5_0, q8_0, q2_0, iq4_nl, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs)
}


@pytest.mark.parametrize("format", FORMULAS)
def test_formulas(format: str) -> None:
    record = GGUF_FORMATS[format]
    rng = np.random.default_rng(record.ggml_type)
    for _ in range(3):
        block = rng.integers(0, 256, record.block_bytes, np.uint8).tobytes()
        with np.errstate(all="ignore"):
            expected = np.array([FORMULAS[format](block, j) for j in range(record.block_elements)], np.float32)
        assert decoded(block, format).tobytes() == expected.tobytes()


def by_the_package(rows: np.ndarray, format: str) -> np.ndarray:
    if format == "gguf_q2_0":  # which the package lacks
        codes = np.stack([rows.reshape(-1, 18)[:, 2:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
        scales = rows.reshape(-1, 18)[:, :2].copy().view("<f2").astype(np.float32)
        return (scales * (codes.reshape(len(scales), 64).astype(np.float32) - 1)).reshape(len(rows), -1)
    return dequantize(rows, GGMLQuantizationType(GGUF_FORMATS[format].ggml_type))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 3))
@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_values_of_an_artifact(tmp_path_factory, format: str, seed: int, rows: int, blocks: int) -> None:
    record = GGUF_FORMATS[format]
    data = np.random.default_rng(seed).integers(0, 256, (rows, blocks * record.block_bytes), np.uint8)
    shape = (rows, blocks * record.block_elements)
    path: Path = tmp_path_factory.getbasetemp() / "blocks.ninfer"
    path.unlink(missing_ok=True)
    spec = TensorSpec("w", shape, format, record.layout)
    with ArtifactWriter(path, [spec], components={"text": {"config": {}}}, bindings={"w": {"object": "w"}}) as writer:
        writer.write_object("w", data.tobytes())
    with Artifact(path) as artifact:
        item = artifact.by_id["w"]
        payload = artifact.read_range(item.offset, item.bytes)
    values = dequantize_gguf_blocks(payload, format, shape, dtype=torch.float32)
    with np.errstate(all="ignore"):
        expected = by_the_package(data, format)
    np.testing.assert_array_equal(values.numpy(), expected)
    assert torch.equal(
        dequantize_gguf_blocks(payload, format, shape).nan_to_num(), torch.tensor(expected).bfloat16().nan_to_num()
    )


def test_tiles_give_the_same_values(monkeypatch) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (7, 5 * 18), np.uint8)
    whole = decoded(rows, "gguf_q4_0", 7)
    monkeypatch.setattr(ggml_values, "TILE", 64)
    assert decoded(rows, "gguf_q4_0", 7).tobytes() == whole.tobytes()


@pytest.fixture
def fresh_decoders():
    ggml_values._decoder.cache_clear()
    yield
    ggml_values._decoder.cache_clear()


@pytest.mark.usefixtures("fresh_decoders")
def test_without_the_package(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        MissingPackageError, match="reading values of gguf_q4_k blocks needs the package gguf"
    ) as caught:
        decoded(bytes(144), "gguf_q4_k")
    assert "storing the blocks as they are does not need it" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ValueError)
    for format in ("gguf_q8_0", "gguf_q2_0"):
        assert not decoded(bytes(GGUF_FORMATS[format].block_bytes), format).any()


@pytest.mark.usefixtures("fresh_decoders")
def test_another_arithmetic_of_the_package_is_noticed(monkeypatch) -> None:
    def other(data, kind):
        return np.nextafter(dequantize(data, kind), np.float32(np.inf))

    monkeypatch.setattr("gguf.quants.dequantize", other)
    with pytest.raises(ValueError, match=r"gguf_iq3_s blocks to values that are not ggml's; install version 0\.19\.0"):
        decoded(bytes(110), "gguf_iq3_s")


def test_every_other_format_is_probed() -> None:
    assert set(ggml_values.PROBES) == set(GGUF_FORMATS) - {"gguf_q8_0", "gguf_q2_0"}
