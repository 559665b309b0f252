"""``block_scale_k16_m128x4_v1``: packed E2M1 codes, E4M3FN scales of 16 columns, binary32 divisors.

Scales are *natural*, ``[N, K / 16]`` in row-major order, everywhere outside an object; inside they are swizzled into
tiles of 128 rows by 4 groups, the order in which block-scaled tensor cores read them.
"""

from __future__ import annotations

from collections.abc import Sequence
import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from ninferbuild.artifact.codecs.buffers import (
    as_bytes,
    assemble,
    decoded_type,
    raise_faults,
    require,
    split,
    to_bytes,
)
from ninferbuild.artifact.formats import NumericFormat, decode_e2m1_word, valid_positive_fp32_word
from ninferbuild.artifact.layouts import SCALE_TILE_ROWS, block_scale_geometry

if TYPE_CHECKING:
    from ninferbuild.artifact.codecs.buffers import Payload, WordFaults


class Nvfp4Words(NamedTuple):
    """The words of an object.

    Attributes:
        codes: uint8 ``[N, K / 2]``, even columns in the low nibble.
        scales: natural E4M3FN words, uint8 ``[N, K / 16]``.
        divisors: one little-endian binary32 word for each stacked matrix, in row order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    divisors: tuple[bytes, ...]


def swizzle_nvfp4_scales(scales: torch.Tensor) -> torch.Tensor:
    """Natural scale words, uint8 ``[N, K / 16]``, in stored order, 1-D on their device.

    Raises:
        TypeError: another element type or rank.
        ValueError: ``N`` is no multiple of 128 or ``K`` none of 64.
    """
    require(scales, "NVFP4 scales", torch.uint8, (None, None))
    rows, groups = scales.shape
    block_scale_geometry((rows, groups * 16))
    tiles = scales.reshape(rows // SCALE_TILE_ROWS, 4, 32, groups // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_nvfp4_scales(stored: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Stored scale words of a matrix ``shape`` = ``[N, K]`` in natural order, uint8 ``[N, K / 16]``.

    Raises:
        TypeError: another element type, or not ``N * K / 16`` words in one dimension.
        ValueError: illegal shape.
    """
    geometry = block_scale_geometry(shape)
    require(stored, "stored NVFP4 scales", torch.uint8, (geometry.planes[1].bytes,))
    tiles = stored.reshape(geometry.rows // SCALE_TILE_ROWS, geometry.columns // 64, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(geometry.rows, geometry.columns // 16)


def word_faults(scales: torch.Tensor) -> WordFaults:
    """What makes scale words (uint8) illegal: a sign bit, or NaN. Every code word is legal."""
    return (((scales >= 0x7F).any(), "NVFP4 scales must be nonnegative finite E4M3FN"),)


def check_divisor(word: bytes) -> bytes:
    """A little-endian binary32 divisor, unchanged.

    Raises:
        ValueError: not four bytes, or not finite and positive.
    """
    if len(word) != 4 or not valid_positive_fp32_word(int.from_bytes(word, "little")):
        raise ValueError(f"an NVFP4 weight divisor must be four bytes, finite and positive FP32, not {word.hex(' ')!r}")
    return word


def pack_rows(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that rows append to the planes: codes, swizzled scales. Words are not checked.

    Args:
        codes: uint8 ``[r, K / 2]``, ``r`` a multiple of 128.
        scales: natural words, uint8 ``[r, K / 16]``, on the same device.

    Returns:
        1-D uint8 tensors on that device; the codes may share memory with the argument.
    """
    return as_bytes(codes), swizzle_nvfp4_scales(scales)


def encode_rows(
    codes: torch.Tensor, scales: torch.Tensor, format: NumericFormat, columns: int
) -> tuple[torch.Tensor, ...]:
    """Check and pack rows of ``columns`` columns, see :func:`pack_rows`.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words, or not whole scale tiles.
    """
    del format
    require(codes, "NVFP4 codes", torch.uint8, (None, columns // 2))
    require(scales, "NVFP4 scales", torch.uint8, (codes.shape[0], columns // 16))
    raise_faults(word_faults(scales))
    return pack_rows(codes, scales)


def encode_nvfp4(
    packed_codes: torch.Tensor,
    natural_scales: torch.Tensor,
    weight_divisor: bytes | bytearray | memoryview | torch.Tensor,
    shape: Sequence[int],
    divisors: int = 1,
) -> bytes:
    """The object bytes of a matrix ``[N, K]``.

    Args:
        packed_codes: uint8 ``[N, K / 2]``.
        natural_scales: uint8 ``[N, K / 16]``.
        weight_divisor: ``divisors`` binary32 words, as little-endian bytes or as a float32 tensor.
        divisors: number of stacked matrices with a divisor of their own.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words or shape.
    """
    geometry = block_scale_geometry(shape, divisors)
    require(packed_codes, "NVFP4 codes", torch.uint8, (geometry.rows, geometry.columns // 2))
    require(natural_scales, "NVFP4 scales", torch.uint8, (geometry.rows, geometry.columns // 16))
    words = _divisor_bytes(weight_divisor, divisors)
    raise_faults(word_faults(natural_scales))
    pieces = (*pack_rows(packed_codes, natural_scales), torch.frombuffer(bytearray(words), dtype=torch.uint8))
    return assemble(geometry.planes, pieces)


def _divisor_bytes(value: bytes | bytearray | memoryview | torch.Tensor, count: int) -> bytes:
    if isinstance(value, torch.Tensor):
        require(value.reshape(-1), "NVFP4 weight divisor", torch.float32, (count,))
        words = to_bytes(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        words = bytes(value)
    else:
        raise TypeError(f"an NVFP4 weight divisor is four bytes or a float32 tensor, not {type(value).__name__}")
    if len(words) != 4 * count:
        raise ValueError(f"{count} NVFP4 divisors, finite and positive FP32, take {4 * count} bytes, not {len(words)}")
    for start in range(0, len(words), 4):
        check_divisor(words[start : start + 4])
    return words


def decode_nvfp4_words(
    payload: Payload, shape: Sequence[int], divisors: int = 1, device: torch.device | str = "cpu"
) -> Nvfp4Words:
    """The words of an object.

    Raises:
        ValueError: illegal shape or words, or a payload of another length.
    """
    geometry = block_scale_geometry(shape, divisors)
    codes, stored, tail = split(payload, geometry.planes, device)
    raise_faults(word_faults(stored))
    words = to_bytes(tail)
    return Nvfp4Words(
        codes.reshape(geometry.rows, geometry.columns // 2),
        unswizzle_nvfp4_scales(stored, shape),
        tuple(check_divisor(words[start : start + 4]) for start in range(0, len(words), 4)),
    )


def dequantize_nvfp4(
    payload: Payload,
    shape: Sequence[int],
    divisors: int = 1,
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The values ``[N, K]`` of an object: code times scale (exact), divided in binary32, converted to ``dtype``.

    Args:
        dtype: a floating type; None is bfloat16.

    Raises:
        TypeError: ``dtype`` is not floating.
        ValueError: as :func:`decode_nvfp4_words`.
    """
    chosen = decoded_type(dtype)
    words = decode_nvfp4_words(payload, shape, divisors, device)
    rows, columns = shape
    table = torch.tensor([decode_e2m1_word(word) for word in range(16)], device=words.codes.device)
    nibbles = torch.stack((words.codes & 15, words.codes >> 4), dim=-1).reshape(rows, columns)
    scales = words.scales.view(torch.float8_e4m3fn).to(torch.float32)
    values = table[nibbles.long()].reshape(rows, -1, 16) * scales.unsqueeze(-1)
    numbers = [struct.unpack("<f", word)[0] for word in words.divisors]
    share = torch.tensor(numbers, dtype=torch.float32, device=values.device).repeat_interleave(rows // divisors)
    return (values.reshape(rows, columns) / share.unsqueeze(-1)).to(chosen)
