"""Cutting a block of rows into tiles that fit a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_TILE_ELEMENTS = 1 << 18
"""Elements that the CPU takes through all steps at a time: two binary32 tiles stay in the cache."""


def row_tiles(rows: torch.Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of ``width`` elements to work on at a time: cache-sized on the CPU, all of them elsewhere."""
    count = rows.shape[0]
    step = max(1, CPU_TILE_ELEMENTS // width) if rows.device.type == "cpu" else count
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)
