"""The built-in methods in plain torch: one step of their definition after the other, packed on the host.

Nothing here comes from the package that is measured, so that equal payloads say something about both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

GROUPED = {"q4_g64_fp16": (4, 64), "q5_g64_fp16": (5, 64), "q6_g64_fp16": (6, 64), "q8_g32_fp16": (8, 32)}
"""Grouped format → (bits, columns of a group)."""

DIRECT = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}
FP8 = "fp8_e4m3fn_row_bf16"
ALIGNMENT = 128

Planes = tuple[torch.Tensor, ...]
"""The bytes that rows append to each plane of their object: uint8 on the CPU."""


def grouped_absmax(rows: torch.Tensor, format: str) -> Planes:
    """Codes and binary16 scales of rows ``[r, K]``: the base, high (5 and 6 bits) and scale planes."""
    bits, group = GROUPED[format]
    qmax = 2 ** (bits - 1) - 1
    qmin = -qmax if bits == 8 else -qmax - 1
    count, columns = rows.shape
    values = rows.to(torch.float32)
    padding = -columns % ALIGNMENT
    if padding:
        values = torch.nn.functional.pad(values, (0, padding))
    groups = values.view(count, -1, group)
    maxima = groups.abs().amax(dim=-1)
    if not bool(torch.isfinite(maxima).all()):
        raise ValueError("the source contains NaN or infinity")
    scales = (maxima.double() / qmax).to(torch.float32).to(torch.float16)
    scales = torch.where((scales == 0) & (maxima > 0), torch.full_like(scales, 2.0**-24), scales)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a scale is not finite")
    reciprocals = torch.where(scales > 0, (1 / scales.double()).to(torch.float32), 0.0)
    codes = (groups * reciprocals.unsqueeze(-1)).round().clamp(qmin, qmax).to(torch.int8).cpu()
    return (*_packed(codes, bits), scales.cpu().contiguous().view(torch.uint8).reshape(-1))


def _packed(codes: torch.Tensor, bits: int) -> Planes:
    words = codes.reshape(-1).view(torch.uint8)
    if bits == 8:
        return (words,)
    base = (words[0::2] & 15) | ((words[1::2] & 15) << 4)
    if bits == 4:
        return (base,)
    high = (words >> 4) & (2 ** (bits - 4) - 1)
    width = bits - 4
    fields = high.view(-1, 8 // width)
    packed = torch.zeros(fields.shape[0], dtype=torch.uint8)
    for index in range(fields.shape[1]):
        packed |= fields[:, index] << (width * index)
    return base, packed


def fp8_row_maxabs(rows: torch.Tensor, format: str) -> Planes:
    """E4M3FN codes and bfloat16 scales of rows ``[r, K]``: the code and scale planes. Works on the host only."""
    if format != FP8:
        raise ValueError(f"fp8_row_maxabs does not make {format}")
    values = rows.cpu().to(torch.float32).to(torch.bfloat16).to(torch.float32)
    maxima = values.abs().amax(dim=-1)
    if not bool(torch.isfinite(maxima).all()):
        raise ValueError("the source contains NaN or infinity")
    scales = (maxima.double() / 448).to(torch.float32).to(torch.bfloat16)
    scales = torch.where((scales == 0) & (maxima > 0), torch.full_like(scales, 2.0**-133), scales)
    reciprocals = torch.where(scales > 0, (1 / scales.double()).to(torch.float32), 0.0)
    products = values * reciprocals.unsqueeze(-1)
    if not bool(torch.isfinite(products).all()):
        raise ValueError("a row is too small to scale")
    codes = products.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(maxima.unsqueeze(-1) == 0, torch.zeros_like(codes), codes)
    return codes.reshape(-1), scales.contiguous().view(torch.uint8).reshape(-1)


def cast_direct(values: torch.Tensor, format: str) -> Planes:
    """The words of ``values`` in a direct format: one plane."""
    return (values.to(DIRECT[format]).cpu().contiguous().view(torch.uint8).reshape(-1),)


METHODS: dict[str, Callable[[torch.Tensor, str], Planes]] = {
    "grouped_absmax": grouped_absmax,
    "fp8_row_maxabs": fp8_row_maxabs,
    "cast_direct": cast_direct,
}
