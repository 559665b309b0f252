"""``grouped_search`` beside a plain search and a floor: weights a second of the arithmetic alone, without files.

The floor is what every search needs that looks at each candidate. On the CPU that is one multiplication and one
rounding of each weight for each of them, in memory that is used again and again. On a GPU, where all errors are
computed exactly, it is the time of the binary64 instructions alone, at the rate of a kernel that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
import time
from typing import Any
from unittest.mock import patch

import torch

from benchmark import arithmetic
from benchmark.checkpoint import SMALL_BLOCK_WORDS, random_block

COLUMNS = 5120
ROWS = {"cpu": 256, "cuda": 16384}
"""Rows of the matrix that is searched."""

CANDIDATES = 69
SYMMETRIC_CANDIDATES = 44
"""Where codes have as many negative as positive values, full-range scales need no errors of their own."""

INSTRUCTIONS = 5
"""Of binary64 for a weight and a candidate: a code from its bits, a fused residual, two products, a part of a sum."""

TILE = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that the floor works on, where it goes through memory."""


@dataclass(frozen=True, slots=True)
class Search:
    """What one format reached, in weights a second; on the CPU of its CPU seconds.

    Attributes:
        way: ``torch``, ``compiled`` for the loops of numba, or ``triton`` for the kernel on CUDA.
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
    """Search one matrix in every format, with importance and negative scales: by torch and then, where it is installed,
    on the CPU with one core by the compiled loops of numba, on CUDA by the Triton kernel.

    Raises:
        ValueError: the package and the plain search made different bytes, or Triton is installed and does not serve.
    """
    from ninferbuild import platform_io
    from ninferbuild.job import LARGEST_BUFFER
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
    floors, plains = _floors(where), {}
    for format in arithmetic.GROUPED:

        def plain(format: str = format) -> arithmetic.Planes:
            return arithmetic.grouped_search(weight, format, importance)

        plains[format] = plain(), weight.numel() / _best(plain, where, repeat)
    found = []
    for way in _ways(where):
        for format in arithmetic.GROUPED:
            record, errors = grouped_format(format), ErrorFlags(where)
            planes, plain_rate = plains[format]

            def ours(record: Any = record, errors: Any = errors) -> arithmetic.Planes:
                return encode_matrix(weight, record, importance, errors, negative_scales=True)

            with _searching(way, where, record):
                differing = [int((plane != made.cpu()).sum()) for plane, made in zip(planes, ours(), strict=True)]
                if any(differing):
                    raise ValueError(
                        f"{way} and the plain search made different bytes of {format}: {differing} of "
                        f"{[len(plane) for plane in planes]} of its planes"
                    )
                errors.raise_if_any()
                seconds = _best(ours, where, repeat)
            found.append(Search(format, way, weight.numel() / seconds, plain_rate, floors[format]))
    return found


def _ways(device: torch.device) -> Iterator[str]:
    """Ways to search; what is loaded for one is not there for those before it."""
    from ninferbuild.rules import compiled

    yield "torch"
    if device.type == "cuda":
        if find_spec("triton"):
            yield "triton"
    elif compiled.load_now(compiled.Work.SEARCH):
        yield "compiled"


@contextmanager
def _searching(way: str, device: torch.device, format: Any) -> Iterator[None]:
    from ninferbuild.rules import fused

    if way == "triton" and (reason := fused.refusal(device, format, weighted=True)):
        raise ValueError(f"the Triton kernel does not serve for {format.name}: {reason}")
    if way != "torch":
        yield
        return
    with patch.object(fused, "ready", return_value=False):
        yield


def _floors(device: torch.device) -> dict[str, float]:
    """Format → weights a second of the floor."""
    if device.type == "cpu" or not find_spec("triton"):
        return dict.fromkeys(arithmetic.GROUPED, _memory_floor(device))
    from benchmark.throughput import binary64_rate

    rate = binary64_rate(device, lambda function: _best(function, device, 5)) / INSTRUCTIONS
    return {
        format: rate / (SYMMETRIC_CANDIDATES if bits == 8 else CANDIDATES)
        for format, (bits, _) in arithmetic.GROUPED.items()
    }


def _memory_floor(device: torch.device) -> float:
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
