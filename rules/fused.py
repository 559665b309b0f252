"""The search of scales as one kernel on CUDA: what loads it, checks it and says whether it serves.

Torch goes through memory a dozen times for each candidate; :mod:`ninferbuild.rules.triton_search` reads weights once.
It needs Triton, which torch brings along where it is built for CUDA, and a C compiler. A kernel is machine code made on
the user's machine, so it is used only once it has made the bytes that torch makes of numbers chosen to tell the two
apart; where it does not, or cannot be compiled, torch makes the same bytes more slowly.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
import threading

import torch

from ninferbuild.artifact.formats import QuantFormat
from ninferbuild.rules.search_trial import Search, differing_groups

_checking = threading.Lock()
_refusals: dict[tuple[torch.device, int, bool], str | None] = {}
"""Device, bits of the codes and whether columns weigh differently → why the kernel does not serve, None if it does."""


def ready(device: torch.device, format: QuantFormat, *, weighted: bool) -> bool:
    """Whether the kernel serves on a CUDA device, which the first to ask finds out while others wait."""
    return refusal(device, format, weighted=weighted) is None


def refusal(device: torch.device, format: QuantFormat, *, weighted: bool) -> str | None:
    """Why the kernel does not serve, None if it does. Compiles it, or loads what was compiled before, at first.

    Raises:
        torch.cuda.OutOfMemoryError: there was no room to try it, which says nothing about the kernel.
    """
    key = device, format.bits, weighted
    if key not in _refusals:
        with _checking:
            if key not in _refusals:
                _refusals[key] = _tried(device, format, weighted)
    return _refusals[key]


def search(
    values: torch.Tensor,
    maxima: torch.Tensor,
    canonical: torch.Tensor,
    importance: torch.Tensor | None,
    format: QuantFormat,
    *,
    negative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``compiled.search`` finds, of its arguments on one CUDA device, in torch's current stream."""
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        return _kernel()(values, maxima, canonical, importance, format, negative=negative)


def _kernel() -> Search:
    from ninferbuild.rules import triton_search

    return triton_search.search


def _tried(device: torch.device, format: QuantFormat, weighted: bool) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        count = differing_groups(search, format, device, weighted=weighted)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        # No C compiler, a GPU or a version of Triton that does not know some operation, no place for machine code.
        return f"{type(error).__name__}: {error}"
    return f"its results differ from torch's in {count} groups" if count else None
