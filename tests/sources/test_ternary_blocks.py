"""Ternary GGUF blocks against the definition of their layouts, element by element."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.artifact.codecs import row_split
from ninferbuild.sources.decoding import open_encoded, open_values, read_encoded, read_values
from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.files import MemoryFile
from ninferbuild.sources.regions import Region, Span

T2 = "t2_g128_fp16"

PATTERN = [(5 * j) % 3 - 1 for j in range(128)]
SCALE = 0x2280  # 0.0126953125
PQ2 = "80221886611886611886611886611886611886611886611886611886611886611886"
PTQ1 = "45cf6c45cf6c45cf6c45cf6c45cf6c459431bb9431bb943130bb8022"
BLOCK_BYTES = {"pq2_0": 34, "ptq1_0": 28}


def described(raw: bytes, decoder: str, rows: int, columns: int) -> Description:
    width = columns // 128 * BLOCK_BYTES[decoder]
    assert len(raw) == rows * width
    part = Part("blocks", Region.of([Span(MemoryFile(raw, "blocks"), 0, len(raw))]), width, name="blk.0.x")
    return Description((rows, columns), "F32", decoder, (part,), encoding=T2)


def pq2_codes(block: bytes) -> list[int]:
    return [(block[2 + j // 4] >> 2 * (j % 4) & 3) - 1 for j in range(128)]


def ptq1_codes(block: bytes) -> list[int]:
    emitted = []
    for offset, width in ((0, 16), (16, 8)):
        for t in range(5):
            for i in range(width):
                emitted.append((block[offset + i] * 3**t % 256) * 3 >> 8)
    for t in range(4):
        for i in range(2):
            emitted.append((block[24 + i] * 3**t % 256) * 3 >> 8)
    return [code - 1 for code in emitted]


CODES: dict[str, Callable[[bytes], list[int]]] = {"pq2_0": pq2_codes, "ptq1_0": ptq1_codes}
SCALE_AT = {"pq2_0": 0, "ptq1_0": 26}


def random_blocks(decoder: str, count: int, seed: int) -> bytes:
    """Legal blocks with finite scales."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, BLOCK_BYTES[decoder]), dtype=np.uint8)
    if decoder == "pq2_0":
        threes = blocks & blocks >> 1 & 0x55
        blocks &= ~(threes * 3)
    words = generator.integers(0x0001, 0x7C00, count, dtype=np.uint16) | generator.integers(0, 2, count) << 15
    at = SCALE_AT[decoder]
    blocks[:, at : at + 2] = words.astype("<u2").view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


def expected_words(raw: bytes, decoder: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    size, groups = BLOCK_BYTES[decoder], columns // 128
    blocks = [raw[begin : begin + size] for begin in range(0, len(raw), size)]
    codes = np.array([CODES[decoder](block) for block in blocks], np.int8).reshape(rows, groups, 128)
    at = SCALE_AT[decoder]
    scales = np.frombuffer(b"".join(block[at : at + 2] for block in blocks), "<u2").reshape(rows, groups)
    return codes, scales


@pytest.mark.parametrize(("decoder", "block"), [("pq2_0", PQ2), ("ptq1_0", PTQ1)])
def test_one_known_block(decoder: str, block: str) -> None:
    description = described(bytes.fromhex(block), decoder, 1, 128)
    rows = read_encoded(description, 0, 1)
    assert (rows.format, rows.packed, rows.weight_divisor) == (T2, False, None)
    assert rows.codes.dtype == torch.int8
    assert rows.codes.shape == (1, 1, 128)
    assert rows.codes.reshape(-1).tolist() == PATTERN
    assert rows.scales.dtype == torch.float16
    assert rows.scales.view(torch.int16).tolist() == [[SCALE]]
    assert read_values(description, 0, 128).tolist() == [code * 0.0126953125 for code in PATTERN]


@pytest.mark.parametrize(("byte", "code"), [(0x55, 0), (0x00, -1), (0xAA, 1)])
def test_bytes_of_four_equal_codes(byte: int, code: int) -> None:
    block = bytes.fromhex("003c") + bytes([byte]) * 32
    rows = read_encoded(described(block, "pq2_0", 1, 128), 0, 1)
    assert rows.codes.unique().tolist() == [code]


@pytest.mark.parametrize("place", [0, 1, 17, 31])
@pytest.mark.parametrize("byte", [0xFF, 0x03, 0x0C, 0x30, 0xC0])
def test_the_fourth_code_is_refused(place: int, byte: int) -> None:
    block = bytearray(bytes.fromhex(PQ2) * 4)
    block[2 * 34 + 2 + place] = byte
    description = described(bytes(block), "pq2_0", 2, 256)
    for read in (
        lambda: read_values(description, 256, 512),
        lambda: read_encoded(description, 1, 2),
        lambda: open_encoded(description, packed=True).read(2),
    ):
        with pytest.raises(ValueError, match=r"blk\.0\.x: PQ2_0 block holds code 3 \(\+2\), which is not ternary"):
            read()
    assert read_encoded(description, 0, 1).codes.shape == (1, 2, 128)  # another row is not looked at


@pytest.mark.parametrize("decoder", ["pq2_0", "ptq1_0"])
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), groups=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_words_and_values_follow_the_definition(decoder: str, rows: int, groups: int, seed: int) -> None:
    raw = random_blocks(decoder, rows * groups, seed)
    description = described(raw, decoder, rows, groups * 128)
    codes, scales = expected_words(raw, decoder, rows, groups * 128)
    found = read_encoded(description, 0, rows)
    assert (found.codes.numpy() == codes).all()
    assert (found.scales.view(torch.int16).numpy().view(np.uint16) == scales).all()
    values = codes.astype(np.float32) * scales.view("<f2").astype(np.float32)[:, :, None]
    stream = open_values(description)
    assert (stream.read(description.elements).numpy().view(np.uint32) == values.reshape(-1).view(np.uint32)).all()


@pytest.mark.parametrize("decoder", ["pq2_0", "ptq1_0"])
def test_more_blocks_than_a_tile(decoder: str) -> None:
    rows, columns = 700, 512
    raw = random_blocks(decoder, rows * 4, 5)
    description = described(raw, decoder, rows, columns)
    codes, scales = expected_words(raw, decoder, rows, columns)
    assert (read_encoded(description, 0, rows).codes.numpy() == codes).all()
    values = codes * scales.view("<f2").astype(np.float32)[:, :, None]
    assert (read_values(description, 0, rows * columns).numpy() == values.reshape(-1)).all()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40), groups=st.integers(1, 3), steps=st.lists(st.integers(1, 9), min_size=1), seed=st.integers()
)
def test_packed_codes_are_the_base_plane(rows: int, groups: int, steps: list[int], seed: int) -> None:
    raw = random_blocks("pq2_0", rows * groups, seed % 2**32)
    description = described(raw, "pq2_0", rows, groups * 128)
    whole = read_encoded(description, 0, rows)
    base, scale = row_split.pack_rows(whole.codes, whole.scales, T2)
    seen = bytearray()
    stream = open_encoded(description, lambda part, data: seen.extend(data), packed=True)
    pieces, done = [], 0
    while done < rows:
        count = min(steps[len(pieces) % len(steps)], rows - done)
        pieces.append(stream.read(count))
        done += count
    assert all(piece.packed and piece.codes.dtype == torch.uint8 for piece in pieces)
    assert torch.equal(torch.cat([piece.codes for piece in pieces]).reshape(-1), base)
    assert torch.equal(torch.cat([piece.scales for piece in pieces]).reshape(-1).view(torch.uint8), scale)
    assert bytes(seen) == raw


def test_decoders_without_packed_codes_give_what_they_have() -> None:
    description = described(bytes.fromhex(PTQ1), "ptq1_0", 1, 128)
    rows = open_encoded(description, packed=True).read(1)
    assert not rows.packed
    assert rows.codes.reshape(-1).tolist() == PATTERN
