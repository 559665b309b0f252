"""The arithmetic of ``nvfp4_maxabs``: E2M1 codes, an E4M3FN scale for 16 columns, one binary32 divisor for the parent.

The profile is ``NVFP4_MAXABS_DIVISOR_RNE_V1``. With ``RN32`` rounding to binary32, to nearest, ties to even, and
``amax`` the largest magnitude of the whole parent::

    d     = RN32(2688 / amax), 1 where amax is 0                  2688 = 6 * 448, the largest E2M1 and E4M3FN numbers
    y     = RN32(RN32(x) * d)
    s     = E4M3FN(min(RN32(max |y| / 6), 448))                   over 16 consecutive columns
    code  = E2M1(RN32(y / s)), +0 for the block where s is 0

E4M3FN and E2M1 round to nearest, ties to the even word; magnitudes above 6 become 6, and the sign of zero is kept.
Quotients by a constant are formed in binary64 because a binary32 division by a scalar is a multiplication by its
rounded reciprocal on CUDA, which gives other bits.
"""

from __future__ import annotations

import math

import torch

from ninferbuild.artifact.codecs import nvfp4
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.fp8_words import E4M3FN_MAX, e4m3fn_words
from ninferbuild.rules.tiles import bfloat16_maxima, row_tiles

GROUP = 16
"""Columns of one scale."""

E2M1_MAX = 6.0


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of floating ``values`` in binary32, 0-D on their device; NaN if there is one."""
    if values.dtype == torch.bfloat16:
        return bfloat16_maxima(values.reshape(-1))
    tiles = [values[begin:end].to(torch.float32).abs().amax() for begin, end in row_tiles(values, values[0].numel())]
    return tiles[0] if len(tiles) == 1 else torch.stack(tiles).amax()


def weight_divisor(amax: torch.Tensor, errors: ErrorFlags) -> torch.Tensor:
    """The divisor of a parent, float32 0-D, from its largest magnitude, float32 0-D."""
    errors.note(
        ~(amax < math.inf),
        "NVFP4 source contains NaN or infinity; keep it in bf16 with cast_direct, or mend the weights",
    )
    exact = amax.double()
    divisor = torch.full_like(exact, E2M1_MAX * E4M3FN_MAX).div_(exact).float().masked_fill_(amax == 0, 1.0)
    errors.note(
        divisor == math.inf,
        "NVFP4 quantization gives a divisor that is not finite: the weights are too small; keep them in bf16",
    )
    return divisor


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """E2M1 words, uint8, of binary32 ``values``; magnitudes above 6 saturate.

    The step of E2M1 is 1/2 below 2, 1 below 4 and 2 from there on. In each of these ranges the code is a magnitude
    counted in steps, to the nearest, ties to even, plus an even number; in the others that gives more.
    """
    magnitudes = values.abs()
    codes = torch.minimum((magnitudes * 2).round_(), magnitudes.round().add_(2))
    codes = torch.minimum(codes, magnitudes.mul_(0.5).round_().add_(4), out=codes).clamp_max_(7)
    return codes.to(torch.uint8) | (values.view(torch.int32) >> 28 & 8).to(torch.uint8)


def quantize_rows(rows: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise floating rows ``[r, K]`` where they are, ``K`` a multiple of 16.

    Args:
        divisor: float32 0-D, on the device of ``rows``.

    Returns:
        codes uint8 ``[r, K / 2]``, even columns in the low nibble, and natural scale words uint8 ``[r, K / 16]``.
    """
    height, columns = rows.shape
    scaled = rows.to(torch.float32).reshape(height, columns // GROUP, GROUP) * divisor
    # Without their sign, words of finite numbers are ordered as the numbers are.
    maxima = torch.bitwise_and(scaled.view(torch.int32), 0x7FFFFFFF).amax(dim=-1).view(torch.float32)
    scales = e4m3fn_words((maxima.double() / E2M1_MAX).float().clamp_max_(E4M3FN_MAX))
    numbers = scales.view(torch.float8_e4m3fn).to(torch.float32)
    zero = numbers == 0
    scaled.div_(numbers.masked_fill_(zero, 1.0).unsqueeze(-1))
    if zero.device.type != "cpu" or bool(zero.any()):
        scaled.masked_fill_(zero.unsqueeze(-1), 0.0)  # what is too small for a scale must not keep its sign either
    codes = e2m1_codes(scaled).reshape(height, columns)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def encode_rows(rows: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and pack rows ``[r, K]``, whole scale tiles, where they are: the bytes of the code and scale planes."""
    tiles = [quantize_rows(rows[begin:end], divisor) for begin, end in row_tiles(rows, rows.shape[1])]
    codes, scales = tiles[0] if len(tiles) == 1 else (torch.cat(words) for words in zip(*tiles, strict=True))
    return nvfp4.pack_rows(codes, scales)
