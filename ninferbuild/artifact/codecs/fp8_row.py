"""``row_scale_v1``: E4M3FN codes with one bfloat16 scale for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.codecs.buffers import (
    as_bytes,
    assemble,
    decoded_type,
    raise_faults,
    require,
    split,
)
from ninferbuild.artifact.formats import NumericFormat
from ninferbuild.artifact.layouts import row_scale_geometry

if TYPE_CHECKING:
    from ninferbuild.artifact.codecs.buffers import Payload, WordFaults


def word_faults(codes: torch.Tensor, scales: torch.Tensor) -> WordFaults:
    """What makes words illegal, for codes uint8 ``[r, K]`` and scales bfloat16 ``[r]``.

    A NaN code; a scale that is negative (-0 included), infinite or NaN; a zero scale over a code that is not zero.
    """
    magnitudes = codes & 0x7F
    words = scales.view(torch.int16)
    # Negative words have the sign bit set, so as int16 they fail the lower bound.
    bad_scales = ((words < 0) | (words >= 0x7F80)).any()
    largest = magnitudes.amax(dim=1)
    return (
        ((magnitudes == 0x7F).any(), "FP8 codes must be finite E4M3FN"),
        (bad_scales, "FP8 row scales must be nonnegative finite BF16"),
        (((words == 0) & (largest != 0)).any(), "a zero row scale admits only codes 0x00 and 0x80"),
    )


def validate_fp8_row_words(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Check codes, uint8 ``[N, K]``, and scales, bfloat16 ``[N]``.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words.
    """
    require(codes, "FP8 codes", torch.uint8, (None, None))
    require(scales, "FP8 row scales", torch.bfloat16, codes.shape[:1])
    raise_faults(word_faults(codes, scales))


def pack_rows(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that rows append to the planes: codes, scales. Nothing is checked.

    Args:
        codes: uint8 ``[r, K]``.
        scales: bfloat16 ``[r]`` on the same device.

    Returns:
        1-D uint8 tensors on that device; they may share memory with the arguments.
    """
    return as_bytes(codes), as_bytes(scales)


def encode_rows(
    codes: torch.Tensor, scales: torch.Tensor, format: NumericFormat, columns: int
) -> tuple[torch.Tensor, ...]:
    """Check and pack rows of ``columns`` columns, see :func:`pack_rows`.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words.
    """
    del format
    require(codes, "FP8 codes", torch.uint8, (None, columns))
    validate_fp8_row_words(codes, scales)
    return pack_rows(codes, scales)


def encode_fp8_row_scaled(code_words: torch.Tensor, row_scales: torch.Tensor, shape: Sequence[int]) -> bytes:
    """The object bytes of a matrix ``[N, K]`` from uint8 codes ``[N, K]`` and bfloat16 scales ``[N]``.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words or shape.
    """
    geometry = row_scale_geometry(shape)
    require(code_words, "FP8 codes", torch.uint8, (geometry.rows, geometry.columns))
    validate_fp8_row_words(code_words, row_scales)
    return assemble(geometry.planes, pack_rows(code_words, row_scales))


def decode_fp8_row_scaled_words(
    payload: Payload, shape: Sequence[int], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, uint8 ``[N, K]``, and the scales, bfloat16 ``[N]``, of an object.

    Raises:
        ValueError: illegal shape or words, or a payload of another length.
    """
    geometry = row_scale_geometry(shape)
    codes, scales = split(payload, geometry.planes, device)
    words = codes.reshape(geometry.rows, geometry.columns), scales.clone().view(torch.bfloat16)
    raise_faults(word_faults(*words))
    return words


def dequantize_fp8_row_scaled(
    payload: Payload,
    shape: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The values ``[N, K]`` of an object: the binary32 product of code and scale, converted to ``dtype``.

    Args:
        dtype: a floating type; None is bfloat16.

    Raises:
        TypeError: ``dtype`` is not floating.
        ValueError: as :func:`decode_fp8_row_scaled_words`.
    """
    chosen = decoded_type(dtype)
    codes, scales = decode_fp8_row_scaled_words(payload, shape, device)
    values = codes.view(torch.float8_e4m3fn).to(torch.float32)
    return (values * scales.to(torch.float32).unsqueeze(-1)).to(chosen)
