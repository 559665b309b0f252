"""The inner loop of the grouped quantisers, compiled for the CPU: numbers become packed codes in one pass.

Torch goes through a tile once for each operation; a loop that keeps a group in registers is bounded by memory instead.
It needs numba (``pip install 'ninferbuild[cpu]'``) and is used only once it has made the bytes that torch makes of
numbers chosen to tell the two apart: machine code comes from whatever compiler is installed here.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
import threading
from typing import TYPE_CHECKING, Any

import torch

from ninferbuild.artifact.codecs import row_split
from ninferbuild.artifact.formats import QUANT_FORMATS, QuantFormat
from ninferbuild.digest import block_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGE_ELEMENTS = 1 << 27
"""A build that quantises fewer elements is done before a compiler is loaded."""

_ready: set[int] = set()
"""Bits of the codes whose loops are loaded and make torch's bytes."""

_start = threading.Lock()
_started = False


def load() -> None:
    """Load the loops in a thread of their own, compiling them if nobody did before; at most once in a process.

    Until it is done, and where numba is not installed, :func:`ready` is False.
    """
    global _started
    with _start:
        if _started or find_spec("numba") is None:
            return
        _started = True
    threading.Thread(target=_load, name="compile", daemon=True).start()


def ready(format: QuantFormat) -> bool:
    """Whether :func:`pack` serves codes of this format by now."""
    return format.bits in _ready


def pack(rows: torch.Tensor, reciprocals: torch.Tensor, format: QuantFormat, planes: tuple[torch.Tensor, ...]) -> None:
    """Fill planes with the codes ``clamp(round_half_even(float32(value) * reciprocal), qmin, qmax)``, packed.

    Args:
        rows: bfloat16 ``[r, K]`` on the CPU, C-contiguous, ``K`` a multiple of 128.
        reciprocals: float32 ``[r, K / group]``, contiguous.
        planes: contiguous uint8: base and, for 5 and 6 bits, high; see :mod:`ninferbuild.artifact.codecs.row_split`.
    """
    high = planes[1] if len(planes) > 1 else planes[0][:0]
    words = rows.view(torch.int16).reshape(-1).numpy().view("uint16")
    _loops()[format.bits](words, reciprocals.reshape(-1).numpy(), planes[0].numpy(), high.numpy())


def _load() -> None:
    try:
        for format in QUANT_FORMATS.values():
            if format.bits in _loops() and _agrees(format):
                _ready.add(format.bits)
    except Exception:
        # A compiler that does not suit this numpy, or has no place for its code: torch makes the same bytes.
        return


@cache
def _loops() -> Mapping[int, Any]:
    """Bits of a code → loop.

    The compiler keeps machine code in the user's cache directory, by the text that it was made from and not only, as it
    would by itself, by the time and size of that file.
    """
    import numba
    import platformdirs

    config: Any = numba.config
    if config.DISABLE_JIT:  # interpreted, the loops are a thousand times slower than torch
        return {}

    text = Path(__file__).with_name("compiled_loops.py").read_bytes()
    version = block_digest(text + numba.__version__.encode()).hex()
    kept = config.CACHE_DIR
    base = Path(platformdirs.user_cache_dir("ninferbuild", appauthor=False))
    config.CACHE_DIR = str(base / "compiled" / version)
    try:
        from ninferbuild.rules.compiled_loops import PACK
    finally:
        config.CACHE_DIR = kept
    return PACK


def _agrees(format: QuantFormat) -> bool:
    """Whether a loop makes torch's bytes of every finite bfloat16 word, each with reciprocals that end in the middle of
    the codes, at their bounds and beyond."""
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    words = words[(words & 0x7FFF) < 0x7F80].reshape(-1, 128)
    rows = words.view(torch.bfloat16).repeat(4, 1)
    groups = rows.reshape(-1, format.group_size)
    largest = groups.abs().amax(dim=-1).float().clamp_min(2.0**-126)
    factors = torch.tensor([1.0, 0.9995, 1.5, 0.5]).repeat_interleave(len(largest) // 4)
    reciprocals = (factors * format.qmax / largest).clamp_max(3.0e38)
    codes = (groups.float() * reciprocals[:, None]).round_().clamp_(format.qmin, format.qmax).to(torch.int8)
    wanted = row_split.pack_rows(
        codes.reshape(len(rows), -1, format.group_size), torch.zeros(len(rows), 128 // format.group_size).half(), format
    )[:-1]
    made = tuple(torch.empty_like(plane) for plane in wanted)
    pack(rows, reciprocals, format, made)
    return all(torch.equal(ours, theirs) for ours, theirs in zip(made, wanted, strict=True))
