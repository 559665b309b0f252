"""Weights and importance that tell whether another way to search for scales makes the bytes that torch makes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ninferbuild.artifact.formats import QuantFormat
from ninferbuild.rules.error_flags import ErrorFlags

Search = Callable[..., "tuple[torch.Tensor, torch.Tensor]"]  # as text: a recipe that imports this must not load torch
"""``compiled.search``, or another function of its arguments and results."""

COLUMNS = 256


def differing_groups(search: Search, format: QuantFormat, device: torch.device, *, weighted: bool) -> int:
    """In how many groups a way to search disagrees with torch on ``device``, with and without negative scales."""
    from ninferbuild.rules.groupwise import group_scales
    from ninferbuild.rules.scale_search import search_by_torch  # which asks what is ready

    values = trial_values(format).to(device)
    importance = trial_importance().to(device) if weighted else None
    maxima = values.view(len(values), -1, format.group_size).abs().amax(dim=-1)
    canonical, _ = group_scales(maxima, format.qmax, ErrorFlags(device))
    count = 0
    for negative in (False, True):
        codes, scales = search(values, maxima, canonical, importance, format, negative=negative)
        wanted = search_by_torch(values, maxima, canonical, importance, format, negative=negative)
        differ = scales.view(torch.int16) != wanted.scales.view(torch.int16)
        count += int((differ | (codes != wanted.codes).any(dim=-1)).sum())
    return count


def trial_values(format: QuantFormat) -> torch.Tensor:
    """Float32 ``[r, COLUMNS]``: every magnitude from where scales underflow to where they are about to overflow, as
    normal and as heavy-tailed numbers, as multiples of half a step, as one value in each group, and as zeros."""
    generator = torch.Generator().manual_seed(5)
    exponents = torch.arange(-34, 14, 2)
    normal = torch.randn(len(exponents), COLUMNS, generator=generator)
    steps = torch.randint(2 * format.qmin, 2 * format.qmax + 1, normal.shape, generator=generator).float() / 2
    lone = torch.where(torch.arange(COLUMNS) % 31 == 0, normal, 0.0)
    kinds = (normal, normal.pow(3).bfloat16().float(), steps, lone.sign(), lone)
    rows = torch.cat([torch.ldexp(kind, exponents[:, None]) for kind in kinds])
    rows[::7, : COLUMNS // 4] = 0.0
    return rows.clamp_(-65000.0 * format.qmax, 65000.0 * format.qmax)


def trial_importance() -> torch.Tensor:
    """Float64 ``[COLUMNS]``: an eighth each of like, unlike, mostly zero, zero, tiny and huge weights, and of weights
    whose errors underflow and overflow."""
    generator = torch.Generator().manual_seed(6)
    parts = torch.rand(8, COLUMNS // 8, generator=generator, dtype=torch.float64)
    parts[1].pow_(12)
    parts[2] *= parts[2] > 0.9
    parts[3] = 0.0
    parts[4:] *= torch.tensor([1e-30, 1e30, 1e-300, 1e300], dtype=torch.float64)[:, None]
    return parts.view(-1)
