"""``verify`` on single objects: every rule about words, padding and auxiliary tensors, broken once."""

from __future__ import annotations

from collections.abc import Sequence
import math
from pathlib import Path
import struct
import sys
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from ninferbuild.artifact.formats import (
    GGUF_FORMATS,
    NUMERIC_FORMATS,
    QUANT_FORMATS,
    QuantFormat,
    default_layout,
    get_format,
)
from ninferbuild.artifact.layouts import planes, row_split_geometry
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.artifact.validity import RULES
from ninferbuild.artifact.writer import ArtifactWriter
from ninferbuild.digest import BLOCK_BYTES
from ninferbuild.verify import Verification, verify

FP8, NVFP4 = "fp8_e4m3fn_row_bf16", "nvfp4"
Q4, Q5, Q6, Q8, T2 = QUANT_FORMATS
ONE = {**dict.fromkeys(QUANT_FORMATS, 0x3C00), FP8: 0x3F80}


def payload(format: str, shape: tuple[int, ...], divisors: int = 1) -> bytearray:
    """Codes of 0 and scales of 1, those of groups beyond ``K`` aside."""
    places = planes(default_layout(format), format, shape, divisors)
    data = bytearray(places[-1].offset + places[-1].extent)
    last = places[-1]
    if format in ONE:
        words = np.full(last.bytes // 2, ONE[format], "<u2")
        record = get_format(format)
        if isinstance(record, QuantFormat):
            groups = row_split_geometry(record, shape).groups
            words.reshape(-1, groups)[:, -(-shape[1] // record.group_size) :] = 0
        data[last.offset :] = words.tobytes()
    elif format == NVFP4:
        data[last.offset :] = struct.pack("<f", 2.5) * divisors
    return data


def write(
    path: Path,
    tensors: dict[str, tuple[str, tuple[int, ...], int, bytes | bytearray]],
    *,
    uses: Sequence[dict[str, Any]] = (),
) -> Path:
    """An artifact of tensors: id → (format, shape, divisors, bytes); each is a parameter of its name."""
    path.unlink(missing_ok=True)
    specs = [
        TensorSpec(name, shape, format, default_layout(format), divisors)
        for name, (format, shape, divisors, _) in tensors.items()
    ]
    bindings = {name: {"object": name} for name in tensors}
    with ArtifactWriter(path, specs, components={"text": {"config": {}}}, bindings=bindings, uses=uses) as writer:
        for name, (_, _, _, data) in tensors.items():
            writer.write_object(name, bytes(data))
    return path


def verified(folder: Path, format: str, shape: tuple[int, ...], data: bytearray, divisors: int = 1) -> Verification:
    return verify(write(folder / "a.ninfer", {"w": (format, shape, divisors, data)}))


def at(
    format: str, shape: tuple[int, ...], plane: int, place: int, words: bytes, divisors: int = 1
) -> tuple[int, bytes]:
    """A patch of bytes, by offset in the object, from one by plane."""
    return planes(default_layout(format), format, shape, divisors)[plane].offset + place, words


S = (3, 130)
"""Rows of three logical groups of 64 columns, the last with two columns, and one group beyond ``K``."""

Patch = tuple[int, int, bytes]
"""(plane, offset in the plane, bytes)"""

WORDS: list[tuple[str, tuple[int, int], int, list[Patch], tuple[str, int, int | None], str]] = [
    # format, shape, divisors, patches (the last one breaks the rule), (plane, row, column), part of the problem
    (Q4, S, 1, [(1, 2 * 5, b"\x00\x80")], ("scales", 1, 64), "0x8000 is negative zero"),
    (Q4, S, 1, [(1, 2 * 8, b"\x00\x7c")], ("scales", 2, 0), "0x7c00 is infinite"),
    (Q5, S, 1, [(2, 2 * 8, b"\x00\xfc")], ("scales", 2, 0), "0xfc00 is infinite"),
    (Q6, S, 1, [(2, 2 * 10, b"\x01\xfc")], ("scales", 2, 128), "0xfc01 is NaN"),
    (Q8, S, 1, [(1, 2 * 4, b"\x00\x7e")], ("scales", 0, 128), "0x7e00 is NaN"),
    (T2, S, 1, [(1, 2 * 3, b"\x00\x80")], ("scales", 1, 128), "negative zero"),
    (Q4, S, 1, [(1, 2 * 3, b"\x00\x3c")], ("scales", 0, 192), "0x3c00 of a group beyond K"),
    (Q8, S, 1, [(1, 2 * 15, b"\x01\x00")], ("scales", 1, 224), "0x0001 of a group beyond K"),
    (Q4, S, 1, [(0, 10 * 32 + 1, b"\x10")], ("codes", 2, 130), "beyond K"),
    (Q4, S, 1, [(0, 3 * 32 + 31, b"\x01")], ("codes", 0, 254), "beyond K"),
    (Q5, S, 1, [(1, 6 * 8, b"\x04")], ("high bits", 1, 128), "beyond K"),
    (Q6, S, 1, [(1, 10 * 16, b"\x10")], ("high bits", 2, 128), "beyond K"),
    (Q8, S, 1, [(0, 4 * 32 + 2, b"\xff")], ("codes", 0, 130), "beyond K"),
    (T2, S, 1, [(0, 3 * 32, b"\x10")], ("codes", 1, 128), "beyond K"),
    (Q8, S, 1, [(0, 9 * 32 + 7, b"\x80")], ("codes", 1, 39), "0x80 is illegal in q8_g32_fp16"),
    (T2, S, 1, [(0, 2 * 32 + 3, b"\x80")], ("codes", 1, 15), "0x2 is illegal in t2_g128_fp16"),
    (T2, S, 1, [(0, 4 * 32, b"\x02")], ("codes", 2, 0), "0x2 is illegal in t2_g128_fp16"),
    (Q4, S, 1, [(1, 2 * 4, b"\0\0"), (0, 4 * 32 + 5, b"\x01")], ("codes", 1, 10), "under a scale of zero"),
    (Q5, S, 1, [(2, 2 * 4, b"\0\0"), (1, 4 * 8 + 7, b"\x80")], ("high bits", 1, 56), "under a scale of zero"),
    (Q6, S, 1, [(2, 2 * 2, b"\0\0"), (0, 2 * 32, b"\x01")], ("codes", 0, 128), "under a scale of zero"),
    (Q8, S, 1, [(1, 0, b"\0\0"), (0, 31, b"\x01")], ("codes", 0, 31), "under a scale of zero"),
    (T2, S, 1, [(1, 2, b"\0\0"), (0, 32, b"\x01")], ("codes", 0, 128), "under a scale of zero"),
    (FP8, (3, 5), 1, [(0, 7, b"\x7f")], ("codes", 1, 2), "0x7f is not a finite E4M3FN"),
    (FP8, (3, 5), 1, [(0, 14, b"\xff")], ("codes", 2, 4), "0xff is not a finite E4M3FN"),
    (FP8, (3, 5), 1, [(1, 2, b"\x01\x80")], ("scales", 1, None), "0x8001 is not a nonnegative finite BF16"),
    (FP8, (3, 5), 1, [(1, 4, b"\x00\x80")], ("scales", 2, None), "0x8000 is not a nonnegative finite BF16"),
    (FP8, (3, 5), 1, [(1, 0, b"\x80\x7f")], ("scales", 0, None), "0x7f80 is not a nonnegative finite BF16"),
    (FP8, (3, 5), 1, [(1, 0, b"\xc0\x7f")], ("scales", 0, None), "0x7fc0 is not a nonnegative finite BF16"),
    (FP8, (3, 5), 1, [(1, 2, b"\0\0"), (0, 9, b"\x01")], ("codes", 1, 4), "0x01 in a row with a zero row scale"),
    (NVFP4, (128, 64), 1, [(1, 10, b"\x80")], ("scales", 64, 32), "0x80 is not a nonnegative finite E4M3FN"),
    (NVFP4, (128, 64), 1, [(1, 499, b"\x7f")], ("scales", 31, 48), "0x7f is not a nonnegative finite E4M3FN"),
    (NVFP4, (256, 128), 1, [(1, 1553, b"\xff")], ("scales", 129, 80), "0xff is not a nonnegative finite E4M3FN"),
    (NVFP4, (256, 64), 2, [(2, 4, struct.pack("<f", 0.0))], ("divisors", 128, None), "not finite and positive"),
    (NVFP4, (256, 64), 2, [(2, 0, struct.pack("<f", -1.0))], ("divisors", 0, None), "not finite and positive"),
    (NVFP4, (256, 64), 2, [(2, 4, struct.pack("<f", math.inf))], ("divisors", 128, None), "not finite and positive"),
    (NVFP4, (256, 64), 2, [(2, 4, struct.pack("<f", math.nan))], ("divisors", 128, None), "not finite and positive"),
]


@pytest.mark.parametrize(("format", "shape", "divisors", "patches", "place", "part"), WORDS)
def test_one_illegal_word(
    tmp_path: Path,
    format: str,
    shape: tuple[int, int],
    divisors: int,
    patches: list[Patch],
    place: tuple[str, int, int | None],
    part: str,
) -> None:
    data = payload(format, shape, divisors)
    for patch in patches[:-1]:
        offset, words = at(format, shape, *patch, divisors)
        data[offset : offset + len(words)] = words
    assert verified(tmp_path, format, shape, data, divisors).exit_code == 0
    offset, words = at(format, shape, *patches[-1], divisors)
    data[offset : offset + len(words)] = words
    result = verified(tmp_path, format, shape, data, divisors)
    (finding,) = result.findings
    assert (finding.object, finding.plane, finding.row, finding.column) == ("w", *place)
    assert finding.offset == offset
    assert part in finding.problem
    assert (result.exit_code, result.invalid, result.different) == (1, 1, 0)


@pytest.mark.parametrize(
    ("format", "shape", "offset", "plane"),
    [
        (Q4, (3, 130), 384, "codes"),
        (Q4, (3, 130), 511, "codes"),
        (Q5, (3, 130), 512 + 3 * 4 * 8, "high bits"),
        (FP8, (3, 5), 15, "codes"),
        (FP8, (3, 5), 255, "codes"),
    ],
)
def test_padding_between_planes(tmp_path: Path, format: str, shape: tuple[int, int], offset: int, plane: str) -> None:
    data = payload(format, shape)
    data[offset] = 1
    (finding,) = verified(tmp_path, format, shape, data).findings
    assert (finding.object, finding.offset) == ("w", offset)
    assert f"padding after plane {plane}" in finding.problem


@pytest.mark.parametrize(
    ("format", "shape", "patches"),
    [
        (Q4, S, [(1, 0, b"\x00\xb0"), (0, 0, b"\xf8")]),  # a negative scale is a plain multiplier
        (Q5, S, [(2, 0, b"\x01\x80\x01\x00\xff\x7b\xff\xfb")]),  # subnormal and largest scales of either sign
        (Q8, S, [(0, 0, b"\x81\x7f\x01")]),
        (T2, S, [(0, 0, b"\x53\x7c")]),
        (FP8, (3, 5), [(1, 0, b"\x00\x00"), (0, 0, b"\x80\x00"), (1, 2, b"\x01\x00"), (0, 5, b"\x7e\xfe")]),
        (NVFP4, (128, 64), [(0, 0, b"\x88\xff"), (1, 0, b"\x7e\x00"), (2, 0, b"\x01\x00\x00\x00")]),
        ("bf16", (4,), [(0, 0, b"\xff\xff\xc1\x7f\x80\x7f\x00\x80")]),
        ("fp32", (), [(0, 0, b"\x34\x12\xc0\x7f")]),
        ("int32", (2,), [(0, 0, b"\x00\x00\x00\x80\xff\xff\xff\xff")]),
    ],
)
def test_legal_words(tmp_path: Path, format: str, shape: tuple[int, ...], patches: list[Patch]) -> None:
    data = payload(format, shape)
    for patch in patches:
        offset, words = at(format, shape, *patch)
        data[offset : offset + len(words)] = words
    if format == Q5:  # the third scale stands for two columns, the fourth for none
        data[at(format, shape, 2, 6, b"")[0]] = data[at(format, shape, 2, 7, b"")[0]] = 0
    assert verified(tmp_path, format, shape, data).findings == ()


@pytest.mark.parametrize("format", GGUF_FORMATS)
def test_any_block_is_legal(tmp_path: Path, format: str) -> None:
    record = GGUF_FORMATS[format]
    noise = np.random.default_rng(record.ggml_type).integers(0, 256, 5 * 3 * record.block_bytes, np.uint8)
    noise[: record.block_bytes] = 0xFF  # scales that are NaN
    assert verified(tmp_path, format, (5, 3 * record.block_elements), bytearray(noise)).findings == ()


def test_every_registered_format_has_rules() -> None:
    assert {type(record) for record in NUMERIC_FORMATS.values()} == set(RULES)


def test_findings_are_bounded_and_counted(tmp_path: Path) -> None:
    data = payload(Q8, (4, 256))
    data[0:512] = b"\x80" * 512
    path = write(tmp_path / "a.ninfer", {"w": (Q8, (4, 256), 1, data), "v": (Q8, (4, 256), 1, data)})
    result = verify(path, limit=3)
    assert [(finding.object, finding.offset) for finding in result.findings] == [
        *(("w", offset) for offset in range(3)),
        *(("v", offset) for offset in range(3)),
    ]
    assert result.invalid == 1024
    assert result.more == {"w": 509, "v": 509}
    assert len(verify(path, limit=1000).findings) == 1024


@pytest.mark.parametrize("block", [0, 1, 2])
def test_places_in_later_blocks(tmp_path: Path, block: int) -> None:
    """An object of several digest blocks: rows, columns and the memory of zero scales go across them."""
    shape = (5000, 4096)
    data = payload(Q8, shape)
    scales = planes("row_split_k128_v1", Q8, shape)[1].offset
    place = min(block * BLOCK_BYTES + 4096 * 100 + 70, shape[0] * shape[1] - 1)
    group = place // 32
    data[scales + 2 * group : scales + 2 * group + 2] = b"\0\0"
    assert verified(tmp_path, Q8, shape, data).exit_code == 0
    data[place] = 1
    data[place + 32] = 0x80
    first, second = verified(tmp_path, Q8, shape, data).findings
    assert (first.offset, first.row, first.column) == (place, *divmod(place, 4096))
    assert "scale of zero" in first.problem
    assert (second.offset, second.row, second.column) == (place + 32, *divmod(place + 32, 4096))
    assert "illegal" in second.problem


def scalar_valid(format: str, shape: tuple[int, int], data: bytes) -> bool:
    """The rules word by word, without arrays."""
    rows, columns = shape
    places = planes(default_layout(format), format, shape)
    words = [data[place.offset : place.offset + place.bytes] for place in places]
    if any(any(data[place.offset + place.bytes : place.offset + place.extent]) for place in places):
        return False
    if format == FP8:
        for row in range(rows):
            (scale,) = struct.unpack_from("<H", words[1], 2 * row)
            codes = words[0][row * columns : (row + 1) * columns]
            if scale >> 15 or scale >> 7 == 255 or any(code & 127 == 127 for code in codes):
                return False
            if scale == 0 and any(code & 127 for code in codes):
                return False
        return True
    record = QUANT_FORMATS[format]
    geometry = row_split_geometry(record, shape)
    low = min(record.bits, 4) if record.bits < 8 else 8
    for index in range(rows * geometry.groups):
        first = index % geometry.groups * record.group_size
        (scale,) = struct.unpack_from("<H", words[-1], 2 * index)
        base = int.from_bytes(words[0][index * record.base_bytes : (index + 1) * record.base_bytes], "little")
        high = int.from_bytes(words[1][index * record.high_bytes : (index + 1) * record.high_bytes], "little")
        rest = record.bits - low
        for lane in range(record.group_size):
            code = base >> low * lane & (1 << low) - 1
            if rest:
                code |= (high >> rest * lane & (1 << rest) - 1) << low
            if code >> record.bits - 1:
                code -= 1 << record.bits
            if code and (first + lane >= columns or scale == 0):
                return False
            if not record.qmin <= code <= record.qmax:
                return False
        if scale == 0x8000 or scale >> 10 & 31 == 31 or (scale and first >= columns):
            return False
    return True


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_agrees_with_a_scalar_reading(tmp_path: Path, draw: st.DataObject) -> None:
    format = draw.draw(st.sampled_from([*QUANT_FORMATS, FP8]))
    shape = draw.draw(st.tuples(st.integers(1, 4), st.integers(1, 300)))
    data = payload(format, shape)
    for place in draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
        data[place] = draw.draw(st.sampled_from([0, 0, 1, 2, 0x10, 0x3C, 0x7C, 0x7F, 0x80, 0xFF]))
    assert (verified(tmp_path, format, shape, data).invalid == 0) == scalar_valid(format, shape, bytes(data))


# Auxiliary tensors

SIGNS = np.where(np.arange(1024) % 3 == 0, 0xBF80, 0x3F80).astype("<u2")
COLUMNS = np.random.default_rng(7).permutation(1024).astype("<i4")
MATRIX = ("q4_g64_fp16", (2, 1024), 1, payload(Q4, (2, 1024)))


def auxiliary(
    folder: Path, role: str, format: str, shape: tuple[int, ...], data: bytes, binding: dict[str, Any] | None = None
) -> Verification:
    """Verifies an artifact whose matrix has one use with one auxiliary tensor."""
    use = {"parameter": "w", "input": "x", "auxiliaries": {role: binding or {"object": "a"}}}
    return verify(write(folder / "a.ninfer", {"w": MATRIX, "a": (format, shape, 1, data)}, uses=[use]))


DIVISOR = "activation_input_divisor"


@pytest.mark.parametrize(
    ("role", "format", "shape", "data"),
    [
        (DIVISOR, "fp32", (), struct.pack("<f", 2.5)),
        (DIVISOR, "fp32", (1,), b"\1\0\0\0"),
        ("hadamard_signs", "bf16", (1024,), SIGNS.tobytes()),
        ("input_columns", "int32", (1024,), COLUMNS.tobytes()),
        ("something_else", "int32", (2,), bytes(8)),
    ],
)
def test_legal_auxiliaries(tmp_path: Path, role: str, format: str, shape: tuple[int, ...], data: bytes) -> None:
    assert auxiliary(tmp_path, role, format, shape, data).findings == ()


def test_divisor_as_an_element_of_a_vector(tmp_path: Path) -> None:
    data = struct.pack("<3f", 0.0, 2.5, -1.0)
    for index, code in enumerate((1, 0, 1)):
        binding = {"parts": [{"object": "a", "range": [index, index + 1]}]}
        assert auxiliary(tmp_path, DIVISOR, "fp32", (3,), data, binding).exit_code == code


def changed(words: np.ndarray[Any, Any], place: int, word: int) -> bytes:
    copy = words.copy()
    copy[place] = word
    return copy.tobytes()


@pytest.mark.parametrize(
    ("role", "format", "shape", "data", "part"),
    [
        (DIVISOR, "bf16", (), b"\x80\x3f", "must be fp32, not bf16"),
        (DIVISOR, "fp32", (2,), struct.pack("<2f", 1, 1), "must be one element, not shape [2]"),
        (DIVISOR, "fp32", (), struct.pack("<f", 0), "0x00000000 is not finite and positive"),
        (DIVISOR, "fp32", (), struct.pack("<f", -1), "not finite and positive"),
        (DIVISOR, "fp32", (), struct.pack("<f", math.inf), "not finite and positive"),
        (DIVISOR, "fp32", (), struct.pack("<f", math.nan), "not finite and positive"),
        ("hadamard_signs", "fp32", (1024,), bytes(4096), "must be bf16"),
        ("hadamard_signs", "bf16", (2048,), SIGNS.tobytes() * 2, "must have shape [1024]; its shape is [2048]"),
        ("hadamard_signs", "bf16", (1, 1024), SIGNS.tobytes(), "its shape is [1, 1024]"),
        ("hadamard_signs", "bf16", (1024,), changed(SIGNS, 5, 0), "element 5 (word 0x0000) is neither +1 nor -1"),
        ("input_columns", "fp32", (1024,), bytes(4096), "must be int32"),
        ("input_columns", "int32", (512,), COLUMNS[:512].tobytes(), "must have shape [1024]"),
        ("input_columns", "int32", (1024,), changed(COLUMNS, 3, 1024), "element 3 (1024) is not in 0..1023"),
        ("input_columns", "int32", (1024,), changed(COLUMNS, 3, -1), "element 3 (-1) is not in 0..1023"),
        ("input_columns", "int32", (1024,), changed(COLUMNS, 0, COLUMNS[1]), f"column {COLUMNS[0]} is missing"),
    ],
)
def test_one_bad_auxiliary(
    tmp_path: Path, role: str, format: str, shape: tuple[int, ...], data: bytes, part: str
) -> None:
    result = auxiliary(tmp_path, role, format, shape, data)
    (finding,) = result.findings
    assert finding.object == "a"
    assert f"{role} of w × x" in finding.problem
    assert part in finding.problem
    assert result.exit_code == 1


def test_signs_of_a_width_that_is_no_multiple_of_a_block(tmp_path: Path) -> None:
    tensors = {"w": (Q4, (2, 512), 1, payload(Q4, (2, 512))), "a": ("bf16", (512,), 1, SIGNS[:512].tobytes())}
    use = {"parameter": "w", "input": "x", "auxiliaries": {"hadamard_signs": {"object": "a"}}}
    (finding,) = verify(write(tmp_path / "a.ninfer", tensors, uses=[use])).findings
    assert "512 elements are not a multiple of 1024" in finding.problem


def test_an_auxiliary_of_a_vector(tmp_path: Path) -> None:
    tensors = {"w": ("bf16", (1024,), 1, bytes(2048)), "a": ("int32", (1024,), 1, COLUMNS.tobytes())}
    use = {"parameter": "w", "input": "x", "auxiliaries": {"input_columns": {"object": "a"}}}
    (finding,) = verify(write(tmp_path / "a.ninfer", tensors, uses=[use])).findings
    assert "belongs to a matrix" in finding.problem


def test_no_torch() -> None:
    import subprocess

    code = "import sys, ninferbuild.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
