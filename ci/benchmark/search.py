"""``grouped_search`` beside a plain search and a floor: weights a second of the arithmetic alone, without files.

The floor is what every search needs that looks at each candidate: one multiplication and one rounding of each weight
for each of them, in memory that is used again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
import time
from typing import Any

import torch

from benchmark import arithmetic
from benchmark.checkpoint import SMALL_BLOCK_WORDS, random_block

COLUMNS = 5120
ROWS = {"cpu": 256, "cuda": 16384}
"""Rows of the matrix that is searched."""

CANDIDATES = 69
TILE = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that the floor works on."""


@dataclass(frozen=True, slots=True)
class Search:
    """What one format reached, in weights a second; on the CPU of its CPU seconds.

    Attributes:
        way: ``torch``, or ``compiled`` for the loops of numba.
        rate: of the package.
        plain: of the plain search; it made the same bytes.
        floor: of the floor.
    """

    format: str
    way: str
    rate: float
    plain: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.rate / self.plain

    @property
    def floor_fraction(self) -> float:
        return self.rate / self.floor

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "floor_fraction": self.floor_fraction}


def measure(device: str, repeat: int, scale: int) -> list[Search]:
    """Search one matrix in every format, with importance and negative scales; on the CPU with one core, by torch and
    then, where numba is installed, by the compiled loops.

    Raises:
        ValueError: the package and the plain search made different bytes.
    """
    from ninferbuild import platform_io
    from ninferbuild.job import LARGEST_BUFFER
    from ninferbuild.rules import compiled
    from ninferbuild.rules.error_flags import ErrorFlags
    from ninferbuild.rules.groupwise import grouped_format
    from ninferbuild.rules.scale_search import encode_matrix

    platform_io.keep_freed_memory(LARGEST_BUFFER)
    torch.set_num_threads(1)  # as an action has in a build, where others run beside it
    where = torch.device(device)
    rows, columns = max(1, ROWS[where.type] // scale), max(128, COLUMNS // scale)
    words = torch.from_numpy(random_block(SMALL_BLOCK_WORDS).view("int16"))
    words = words.repeat(-(-rows * columns // len(words)))[: rows * columns]
    weight = words.view(torch.bfloat16).view(rows, columns).to(where)
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(3)).double().pow(8).to(where)
    floor = _floor(where)
    found = []
    for way in ("torch", "compiled"):
        if way == "compiled" and (where.type != "cpu" or not compiled.load_now(compiled.Work.SEARCH)):
            break
        for format in arithmetic.GROUPED:
            record, errors = grouped_format(format), ErrorFlags(where)

            def ours(record: Any = record, errors: Any = errors) -> arithmetic.Planes:
                return encode_matrix(weight, record, importance, errors, negative_scales=True)

            def plain(format: str = format) -> arithmetic.Planes:
                return arithmetic.grouped_search(weight, format, importance)

            if not all(map(torch.equal, plain(), (plane.cpu() for plane in ours()))):
                raise ValueError(f"the search and the plain search made different bytes of {format}")
            errors.raise_if_any()
            seconds, plain_seconds = (_best(function, where, repeat) for function in (ours, plain))
            found.append(Search(format, way, weight.numel() / seconds, weight.numel() / plain_seconds, floor))
    return found


def _floor(device: torch.device) -> float:
    tile = torch.rand(TILE[device.type], device=device) + 1

    def once() -> None:
        for _ in range(CANDIDATES):
            tile.mul_(1.0)
            tile.round_()

    return tile.numel() / _best(once, device, 5)


def _best(function: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Seconds of the fastest of ``repeat`` calls: on the CPU of CPU time, which other work there takes no part of."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    found = []
    for _ in range(repeat):
        _wait(device)
        began = clock()
        function()
        _wait(device)
        found.append(clock() - began)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
