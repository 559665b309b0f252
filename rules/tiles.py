"""What quantisers of rows share: tiles that fit a CPU's cache, and maxima of bfloat16 magnitudes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_TILE_ELEMENTS = 1 << 19
"""Elements that the CPU takes through all steps at a time: many, to hide what a step costs, yet cacheable."""


def row_tiles(rows: torch.Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of ``width`` elements to work on at a time: cache-sized on the CPU, all of them elsewhere."""
    count = rows.shape[0]
    step = max(1, CPU_TILE_ELEMENTS // width) if rows.device.type == "cpu" else count
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def bfloat16_maxima(values: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
    """Largest magnitudes along the last axis of a bfloat16 tensor, float32; NaN where there is one.

    Without their sign, words are ordered as the numbers are, with NaN above infinity.

    Args:
        words: int16 memory of the same shape to work in.
    """
    magnitudes = torch.bitwise_and(values.view(torch.int16), 0x7FFF, out=words)
    return magnitudes.amax(dim=-1).view(torch.bfloat16).float()
