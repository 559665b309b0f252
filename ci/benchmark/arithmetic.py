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


def grouped_search(rows: torch.Tensor, format: str, importance: torch.Tensor) -> Planes:
    """What the search makes of rows ``[r, K]`` with negative scales: every candidate on the whole matrix, exactly.

    Args:
        importance: float64 ``[K]``.
    """
    bits, group = GROUPED[format]
    qmax = 2 ** (bits - 1) - 1
    qmin = -qmax if bits == 8 else -qmax - 1
    padding = -rows.shape[1] % ALIGNMENT
    groups = torch.nn.functional.pad(rows.to(torch.float32), (0, padding)).view(len(rows), -1, group)
    weights = torch.nn.functional.pad(importance, (0, padding)).view(-1, group)
    values = groups.double()

    def total(terms: torch.Tensor) -> torch.Tensor:
        while terms.shape[-1] > 1:
            half = terms.shape[-1] // 2
            terms = terms[..., :half] + terms[..., half:]
        return terms[..., 0]

    def codes_of(scales: torch.Tensor) -> torch.Tensor:
        return (groups * (1 / scales.double()).float().unsqueeze(-1)).round().clamp(qmin, qmax)

    def error(scales: torch.Tensor) -> torch.Tensor:
        residuals = values - scales.double().unsqueeze(-1) * codes_of(scales).double()
        return total(weights * residuals * residuals)

    def fit(scales: torch.Tensor) -> torch.Tensor:
        codes = codes_of(scales).double()
        below = total(weights * codes * codes)
        return rounded(torch.where(below > 0, total(weights * values * codes) / below.clamp(min=1e-300), 0.0))

    def rounded(scales: torch.Tensor) -> torch.Tensor:
        words = scales.float().half()
        smallest = torch.copysign(torch.full_like(scales, 2.0**-24), scales).half()
        return torch.where((words == 0) & (scales != 0), smallest, words)

    def stepped(scales: torch.Tensor, step: int) -> torch.Tensor:
        words = scales.view(torch.int16)
        magnitude = (words & 0x7FFF) + step
        legal = ((words & 0x7FFF) != 0) & (magnitude >= 1) & (magnitude <= 0x7BFF)
        return torch.where(legal, (words & -0x8000) | magnitude, torch.zeros_like(words)).view(torch.float16)

    maxima = groups.abs().amax(dim=-1)
    if not bool(torch.isfinite(maxima).all()):
        raise ValueError("the source contains NaN or infinity")
    nothing = maxima == 0
    first = torch.argmax((groups.abs() == maxima.unsqueeze(-1)).to(torch.uint8), dim=-1, keepdim=True)
    extreme = groups.gather(-1, first)[..., 0].double()
    divisors = torch.tensor([qmax, qmin], dtype=torch.float64, device=rows.device)
    upper, full = maxima.double() / divisors[:1], extreme / divisors[1:]
    best = canonical = rounded(upper).masked_fill(nothing, 1.0)
    least = error(best)

    def consider(scales: torch.Tensor) -> None:
        nonlocal best, least
        usable = torch.isfinite(scales) & (scales != 0) & ~nothing
        found = error(torch.where(usable, scales, canonical))
        better = usable & (found < least)
        best, least = torch.where(better, scales, best), torch.where(better, found, least)

    ratios = [round(0.70 + 0.02 * step, 2) for step in range(25)]
    for start in (upper, full):
        for ratio in ratios:
            consider(rounded(start * ratio))
    for factor in (0.25, 0.5, 2.0, 4.0):
        consider(rounded(canonical.double() * factor))
    for step in (-2, -1, 1, 2):
        consider(stepped(canonical, step))
    fitted = fit(canonical)
    for scales in (fitted, rounded(fitted.double() * 0.5), rounded(fitted.double() * 2.0)):
        consider(scales)
    for step in (-2, -1, 1, 2):
        consider(stepped(fitted, step))
    refitted = fit(best)
    for scales in (refitted, stepped(refitted, -1), stepped(refitted, 1)):
        consider(scales)
    codes = codes_of(best).to(torch.int8).cpu()
    scales = best.masked_fill(nothing, 0.0).cpu().contiguous()
    return (*_packed(codes, bits), scales.view(torch.uint8).reshape(-1))
