"""Row-scaled FP8: E4M3FN codes with one bfloat16 scale for each row.

For each row, with elements ``x`` rounded to bfloat16, ``RN32``/``RNb`` rounding to nearest, ties to even::

    scale = RNb(RN32(max |x| / 448)), or 2^-133 where that is zero and the row is not
    code  = E4M3FN(clamp(RN32(x * RN32(1 / scale)), -448, 448))

A row of zeros has scale +0 and codes 0x00. Quotient and reciprocal are formed in binary64 because a binary32 division
by a scalar is a multiplication by its rounded reciprocal on CUDA, which gives other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
import math

import torch

from ninferbuild.artifact.codecs import fp8_row
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.tiles import bfloat16_maxima, row_tiles

E4M3FN_MAX = 448.0

SMALLEST_SCALE = 2.0**-133
"""The smallest positive bfloat16 number, word 0x0001."""


@dataclass(frozen=True, slots=True)
class RowScaledFp8Words:
    """Codes uint8 ``[N, K]`` and scales bfloat16 ``[N]``."""

    codes: torch.Tensor
    scales: torch.Tensor


def row_scales(maxima: torch.Tensor, errors: ErrorFlags) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and reciprocals of rows from their largest magnitudes.

    Args:
        maxima: float32 ``[r]``, NaN where the row holds one.

    Returns:
        bfloat16 scales and float32 reciprocals, both 0 for a row of zeros.
    """
    zero = maxima == 0
    errors.note(
        ~(maxima.amax() < math.inf),
        "FP8 row quantization source contains NaN or infinity; keep it in bf16 with cast_direct, or mend the weights",
    )
    # Every quotient below the smallest scale either rounds to it or underflows, and is then set to it.
    scales = (maxima.double() / E4M3FN_MAX).clamp_min_(SMALLEST_SCALE).float().bfloat16()
    reciprocals = scales.double().reciprocal_().float().masked_fill_(zero, 0.0)
    # The products are at most max |x| / scale, which is near 448 wherever the reciprocal itself is finite.
    errors.note(
        reciprocals.amax() == math.inf,
        "FP8 row quantization gives a non-finite value: the row is too small to scale; keep it in bf16",
    )
    return scales.masked_fill_(zero, 0.0), reciprocals


def e4m3fn_words(values: torch.Tensor) -> torch.Tensor:
    """E4M3FN words, uint8, of binary32 ``values`` within ±448, to nearest, ties to even; the sign of zero is kept."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def quantize_rows(rows: torch.Tensor, errors: ErrorFlags) -> RowScaledFp8Words:
    """Quantise floating rows ``[r, K]`` where they are."""
    exact = rows if rows.dtype == torch.bfloat16 else rows.to(torch.float32).to(torch.bfloat16)
    maxima = bfloat16_maxima(exact)
    scales, reciprocals = row_scales(maxima, errors)
    products = exact.to(torch.float32).mul_(reciprocals[:, None])
    codes = e4m3fn_words(products.clamp_(-E4M3FN_MAX, E4M3FN_MAX))
    zero = maxima == 0
    if zero.device.type != "cpu" or bool(zero.any()):
        codes.masked_fill_(zero[:, None], 0)  # -0 would keep its sign
    return RowScaledFp8Words(codes, scales)


def encode_matrix(weight: torch.Tensor, errors: ErrorFlags) -> tuple[torch.Tensor, ...]:
    """Quantise and pack rows ``[r, K]`` where they are: the bytes of the code and scale planes."""
    words = quantize_tiles(weight, errors)
    return fp8_row.pack_rows(words.codes, words.scales)


def quantize_tiles(weight: torch.Tensor, errors: ErrorFlags) -> RowScaledFp8Words:
    """:func:`quantize_rows` of a matrix of any height, in tiles that stay in the cache of a CPU."""
    tiles = [quantize_rows(weight[begin:end], errors) for begin, end in row_tiles(weight, weight.shape[1])]
    if len(tiles) == 1:
        return tiles[0]
    return RowScaledFp8Words(torch.cat([tile.codes for tile in tiles]), torch.cat([tile.scales for tile in tiles]))


def quantize_bf16_rows(weight: torch.Tensor) -> RowScaledFp8Words:
    """Quantise a bfloat16 matrix ``[N, K]`` as ``fp8_row_maxabs`` does, on the CPU.

    Raises:
        TypeError: another element type.
        ValueError: rank other than 2, an empty matrix, NaN or infinity, or rows too small for a finite reciprocal.
    """
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"row-scaled FP8 quantization requires a bfloat16 weight, got {weight.dtype}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"row-scaled FP8 quantization requires rank 2 and positive dimensions, got {tuple(weight.shape)}"
        )
    with torch.no_grad():
        weight = weight.cpu()
        return quantize_tiles(weight, ErrorFlags(weight.device))
