"""The inner loops of the grouped quantisers, compiled for the CPU: what loads them, checks them and says what is ready.

Torch goes through a tile once for each operation; a loop that keeps a group in registers, or in the first cache, is
bounded by arithmetic instead. Loops need numba (``pip install 'ninferbuild[cpu]'``) and are used only once they have
made the bytes that torch makes of numbers chosen to tell the two apart: machine code comes from whatever compiler is
installed here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
import threading
from typing import TYPE_CHECKING, Any

import torch

from ninferbuild.artifact.codecs import row_split
from ninferbuild.artifact.formats import QUANT_FORMATS, QuantFormat
from ninferbuild.digest import block_digest
from ninferbuild.rules.error_flags import ErrorFlags

if TYPE_CHECKING:
    from collections.abc import Mapping


class Work(Enum):
    """What a loop does; the value is how many elements a build has to have for it to be worth loading.

    A build with fewer is done before a compiler is loaded.
    """

    PACK = 1 << 27
    SEARCH = 1 << 26


_ready: set[tuple[Work, int]] = set()
"""Work and bits of the codes whose loops are loaded and make torch's bytes."""

_start = threading.Lock()
_started: set[Work] = set()

_importing = threading.Lock()
_imported: dict[Work, Mapping[int, Any]] = {}


def load(work: Work) -> None:
    """Load loops in a thread of their own, compiling them if nobody did before; at most once in a process.

    Until it is done, and where numba is not installed, :func:`ready` is False.
    """
    with _start:
        if work in _started or find_spec("numba") is None:
            return
        _started.add(work)
    threading.Thread(target=_load, args=(work,), name=f"compile {work.name.lower()}", daemon=True).start()


def load_now(work: Work) -> bool:
    """Load loops before anything else is done; whether all of them are ready. For measuring them."""
    if find_spec("numba") is None:
        return False
    _load(work)
    return all(ready(work, format) for format in QUANT_FORMATS.values() if format.bits > 2)  # ternary codes have none


def ready(work: Work, format: QuantFormat) -> bool:
    """Whether the loop for codes of this format serves by now."""
    return (work, format.bits) in _ready


def pack(rows: torch.Tensor, reciprocals: torch.Tensor, format: QuantFormat, planes: tuple[torch.Tensor, ...]) -> None:
    """Fill planes with the codes ``clamp(round_half_even(float32(value) * reciprocal), qmin, qmax)``, packed.

    Args:
        rows: bfloat16 ``[r, K]`` on the CPU, C-contiguous, ``K`` a multiple of 128.
        reciprocals: float32 ``[r, K / group]``, contiguous.
        planes: contiguous uint8: base and, for 5 and 6 bits, high; see :mod:`ninferbuild.artifact.codecs.row_split`.
    """
    high = planes[1] if len(planes) > 1 else planes[0][:0]
    words = rows.view(torch.int16).reshape(-1).numpy().view("uint16")
    _loops(Work.PACK)[format.bits](words, reciprocals.reshape(-1).numpy(), planes[0].numpy(), high.numpy())


def search(
    values: torch.Tensor,
    maxima: torch.Tensor,
    canonical: torch.Tensor,
    importance: torch.Tensor | None,
    format: QuantFormat,
    *,
    negative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that :mod:`ninferbuild.rules.scale_search` finds, int8 ``[r, R, G]`` and float16 ``[r, R]``.

    Args:
        values: finite float32 ``[r, K]`` on the CPU, C-contiguous, ``K`` a multiple of 128.
        maxima: float32 ``[r, R]``, contiguous, largest magnitudes of the groups.
        canonical: float16 ``[r, R]``, contiguous, their absmax scales, positive where the maximum is.
        importance: float64 ``[K]``, contiguous, finite and not negative; None weighs all columns alike.
    """
    weights = torch.ones(values.shape[1], dtype=torch.float64) if importance is None else importance
    codes = torch.empty(*maxima.shape, format.group_size, dtype=torch.int8)
    scales = torch.empty(maxima.shape, dtype=torch.float16)
    _loops(Work.SEARCH)[format.bits](
        values.view(-1).numpy(),
        maxima.view(-1).numpy(),
        canonical.float().view(-1).numpy(),
        weights.numpy(),
        negative,
        float(format.qmin),
        float(format.qmax),
        codes.view(-1).numpy(),
        scales.view(-1).view(torch.int16).numpy().view("uint16"),
    )
    return codes, scales


def _load(work: Work) -> None:
    agrees: Callable[[QuantFormat], bool] = {Work.PACK: _packs_alike, Work.SEARCH: _searches_alike}[work]
    try:
        for format in QUANT_FORMATS.values():
            if format.bits in _loops(work) and agrees(format):
                _ready.add((work, format.bits))
    except Exception:
        # A compiler that does not suit this numpy, or has no place for its code: torch makes the same bytes.
        return


def _loops(work: Work) -> Mapping[int, Any]:
    """Bits of a code → loop."""
    with _importing:
        if work not in _imported:
            _imported[work] = _import(work)
    return _imported[work]


def _import(work: Work) -> Mapping[int, Any]:
    """The loops of a module.

    The compiler keeps machine code in the user's cache directory, by the text that it was made from and not only, as it
    would by itself, by the time and size of that file.
    """
    import numba
    import platformdirs

    config: Any = numba.config
    if config.DISABLE_JIT:  # interpreted, the loops are a thousand times slower than torch
        return {}

    kept = config.CACHE_DIR
    base = Path(platformdirs.user_cache_dir("ninferbuild", appauthor=False))
    config.CACHE_DIR = str(base / "compiled" / _version(numba.__version__))
    try:
        # Either module takes its settings, and its place in the cache, when it is first imported.
        from ninferbuild.rules import compiled_loops, compiled_search
    finally:
        config.CACHE_DIR = kept
    return compiled_loops.PACK if work is Work.PACK else compiled_search.SEARCH


def _version(numba: str) -> str:
    """What machine code is kept by: all that it is made from."""
    names = ("compiled_loops.py", "compiled_search.py", "scale_bounds.py")
    text = b"".join(Path(__file__).with_name(name).read_bytes() for name in names)
    return block_digest(text + numba.encode()).hex()


def _packs_alike(format: QuantFormat) -> bool:
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


def _searches_alike(format: QuantFormat) -> bool:
    """Whether a loop finds torch's scales and codes for weights of all magnitudes and all kinds of importance."""
    from ninferbuild.rules import scale_search  # which asks this module what is ready
    from ninferbuild.rules.groupwise import group_scales

    columns = 256
    values, weights = _trial_values(columns, format), _trial_importance(columns)
    groups = values.view(len(values), -1, format.group_size)
    maxima = groups.abs().amax(dim=-1)
    canonical, _ = group_scales(maxima, format.qmax, ErrorFlags(values.device))
    for importance in (None, weights):
        for negative in (False, True):
            codes, scales = search(values, maxima, canonical, importance, format, negative=negative)
            wanted = scale_search.search_by_torch(values, maxima, canonical, importance, format, negative=negative)
            same = torch.equal(codes, wanted.codes)
            if not (same and torch.equal(scales.view(torch.int16), wanted.scales.view(torch.int16))):
                return False
    return True


def _trial_values(columns: int, format: QuantFormat) -> torch.Tensor:
    """Float32 ``[r, columns]``: every magnitude from where scales underflow to where they are about to overflow, as
    normal and as heavy-tailed numbers, as multiples of half a step, as one value in each group, and as zeros."""
    generator = torch.Generator().manual_seed(5)
    exponents = torch.arange(-34, 14, 2)
    normal = torch.randn(len(exponents), columns, generator=generator)
    steps = torch.randint(2 * format.qmin, 2 * format.qmax + 1, normal.shape, generator=generator).float() / 2
    lone = torch.where(torch.arange(columns) % 31 == 0, normal, 0.0)
    kinds = (normal, normal.pow(3).bfloat16().float(), steps, lone.sign(), lone)
    rows = torch.cat([torch.ldexp(kind, exponents[:, None]) for kind in kinds])
    rows[::7, : columns // 4] = 0.0
    return rows.clamp_(-65000.0 * format.qmax, 65000.0 * format.qmax)


def _trial_importance(columns: int) -> torch.Tensor:
    """Float64 ``[columns]``: an eighth each of like, unlike, mostly zero, zero, tiny and huge weights, and of weights
    whose errors underflow and overflow."""
    generator = torch.Generator().manual_seed(6)
    parts = torch.rand(8, columns // 8, generator=generator, dtype=torch.float64)
    parts[1].pow_(12)
    parts[2] *= parts[2] > 0.9
    parts[3] = 0.0
    parts[4:] *= torch.tensor([1e-30, 1e30, 1e-300, 1e300], dtype=torch.float64)[:, None]
    return parts.view(-1)
