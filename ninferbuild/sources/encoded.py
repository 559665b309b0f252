"""Rows of an encoded matrix as they travel from a source to a writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class EncodedRows:
    """A row-major block of ``r`` complete rows of ``K`` columns.

    ======================= ============================== ================================ ================
    format                  codes                          scales                           weight_divisor
    ======================= ============================== ================================ ================
    ``nvfp4``               uint8 ``[r, K/2]``, the even   uint8 ``[r, K/16]`` E4M3FN       4 bytes, FP32
                            column in the low nibble       words in natural order           little-endian
    ``fp8_e4m3fn_row_bf16`` uint8 ``[r, K]`` E4M3FN words  bfloat16 ``[r]``                 None
    ``t2_g128_fp16``        int8 ``[r, Kpad/128, 128]``    float16 ``[r, Kpad/128]``        None
    ``gguf_*``              uint8 ``[r, row bytes]``       ignored                          None
    ======================= ============================== ================================ ================

    ``packed`` marks codes that are already in the bit order of the target layout: those of ``t2_g128_fp16`` are then
    uint8 ``[r, Kpad/128, 32]``, the bytes of its base plane.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor
    weight_divisor: bytes | None = None
    packed: bool = False


def concatenate_encoded(pieces: Sequence[EncodedRows], message: str) -> EncodedRows:
    """The rows of ``pieces`` stacked in order.

    Raises:
        ValueError: ``message``, when there is no piece or they disagree about format, divisor or packing.
    """
    if not pieces:
        raise ValueError(message)
    first = pieces[0]
    if len(pieces) == 1:
        return first
    kind = (first.format, first.weight_divisor, first.packed)
    if any((piece.format, piece.weight_divisor, piece.packed) != kind for piece in pieces):
        raise ValueError(message)
    import torch

    codes = torch.cat([piece.codes for piece in pieces])
    scales = torch.cat([piece.scales for piece in pieces])
    return EncodedRows(first.format, codes, scales, first.weight_divisor, first.packed)
