"""Packing of encoded rows, one function for each format that ``import_encoded`` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.codecs import fp8_row, gguf_blocks, nvfp4, row_split
from ninferbuild.artifact.codecs.buffers import as_bytes, require
from ninferbuild.artifact.formats import FP8_E4M3FN_ROW_BF16, GGUF_FORMATS, NVFP4, T2_G128_FP16
from ninferbuild.artifact.layouts import SCALE_TILE_ROWS, row_split_geometry
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.sources.logical import EncodedRows

if TYPE_CHECKING:
    from ninferbuild.artifact.codecs.buffers import WordFaults

    Planes = tuple[torch.Tensor, ...]
    Packer = Callable[[EncodedRows, TensorSpec, tuple[bytes, ...], int, torch.device, ErrorFlags], Planes]
    """(block, target, weight divisors of the parent, first row, device, errors) → bytes of each plane."""


def pack_nvfp4(
    block: EncodedRows,
    target: TensorSpec,
    divisors: tuple[bytes, ...],
    first_row: int,
    device: torch.device,
    errors: ErrorFlags,
) -> tuple[torch.Tensor, ...]:
    """Codes, swizzled scales, and the divisor when the rows are the first of their matrix."""
    columns = target.shape[1]
    require(block.codes, "NVFP4 codes", torch.uint8, (None, columns // 2))
    rows = block.codes.shape[0]
    require(block.scales, "NVFP4 scales", torch.uint8, (rows, columns // 16))
    if rows == 0 or rows % SCALE_TILE_ROWS or first_row % SCALE_TILE_ROWS:
        where = f"not rows [{first_row}, {first_row + rows})"
        raise ValueError(f"NVFP4 output needs whole 128-row tiles and weight divisor, {where}")
    share = target.shape[0] // target.divisors
    index = first_row // share
    if (first_row + rows - 1) // share != index:
        raise ValueError("a row block may not span two separately quantised sources")
    word = divisors[index]
    if block.weight_divisor is not None and bytes(block.weight_divisor) != word:
        raise ValueError(
            f"weight divisor changed between row blocks: {bytes(block.weight_divisor).hex()} at row {first_row}, "
            f"{word.hex()} before"
        )
    scales = block.scales.to(device, non_blocking=True)
    _note(nvfp4.word_faults(scales), errors)
    opens = first_row == index * share
    divisor = torch.tensor(list(word) if opens else [], dtype=torch.uint8, device=device)
    return (*nvfp4.pack_rows(block.codes.to(device, non_blocking=True), scales), divisor)


def pack_fp8_rows(
    block: EncodedRows,
    target: TensorSpec,
    divisors: tuple[bytes, ...],
    first_row: int,
    device: torch.device,
    errors: ErrorFlags,
) -> tuple[torch.Tensor, ...]:
    """Codes and scales."""
    require(block.codes, "FP8 codes", torch.uint8, (None, target.shape[1]))
    require(block.scales, "FP8 row scales", torch.bfloat16, block.codes.shape[:1])
    codes, scales = block.codes.to(device, non_blocking=True), block.scales.to(device, non_blocking=True)
    _note(fp8_row.word_faults(codes, scales), errors)
    return fp8_row.pack_rows(codes, scales)


def pack_ternary(
    block: EncodedRows,
    target: TensorSpec,
    divisors: tuple[bytes, ...],
    first_row: int,
    device: torch.device,
    errors: ErrorFlags,
) -> tuple[torch.Tensor, ...]:
    """Base and scale plane of physical groups."""
    geometry = row_split_geometry(target.format, target.shape)
    group = geometry.padded_columns // geometry.groups
    dtype, words = (torch.uint8, group // 4) if block.packed else (torch.int8, group)
    require(block.codes, f"{target.format} codes", dtype, (None, geometry.groups, words))
    require(block.scales, f"{target.format} scales", torch.float16, block.codes.shape[:2])
    codes, scales = block.codes.to(device, non_blocking=True), block.scales.to(device, non_blocking=True)
    _note(row_split.word_faults(codes, scales, target.format), errors)
    _note(row_split.zero_scale_faults(codes, scales, target.format), errors)
    if block.packed:
        return as_bytes(codes), as_bytes(scales)
    return row_split.pack_rows(codes, scales, target.format)


def pack_blocks(
    block: EncodedRows,
    target: TensorSpec,
    divisors: tuple[bytes, ...],
    first_row: int,
    device: torch.device,
    errors: ErrorFlags,
) -> tuple[torch.Tensor, ...]:
    """Rows of ggml blocks as they are; there is nothing to check but their length."""
    gguf_blocks.require_rows(block.codes, GGUF_FORMATS[target.format], target.shape[1])
    return gguf_blocks.pack_rows(block.codes.to(device, non_blocking=True))


def _note(faults: WordFaults, errors: ErrorFlags) -> None:
    for flag, message in faults:
        errors.note(flag, message)


PACKERS: dict[str, Packer] = {
    NVFP4.name: pack_nvfp4,
    FP8_E4M3FN_ROW_BF16.name: pack_fp8_rows,
    T2_G128_FP16.name: pack_ternary,
    **dict.fromkeys(GGUF_FORMATS, pack_blocks),
}
"""Format name → packer, for the formats of ``import_encoded``."""
