"""The grouped quantisers as loops compiled for the CPU: what loads them, checks them and says what is ready.

Torch goes through a tile once for each operation; a loop that keeps a group in registers, or in the first cache, is
bounded by arithmetic instead. Loops need numba (``pip install 'ninferbuild[cpu]'``) and are used only once they have
made the bytes that torch makes of numbers chosen to tell the two apart: machine code comes from whatever compiler is
installed here.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
import threading
from typing import TYPE_CHECKING, Any

import torch

from ninferbuild.artifact.formats import QUANT_FORMATS, QuantFormat
from ninferbuild.digest import block_digest
from ninferbuild.rules import machine_code, sealed_folder
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.search_trial import differing_groups

if TYPE_CHECKING:
    from collections.abc import Mapping


class Work(Enum):
    """What a loop does; the value is how many elements a build has to have for it to be worth loading.

    A build with fewer is done before a compiler is loaded.
    """

    ENCODE = 1 << 27
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


def encode(rows: torch.Tensor, format: QuantFormat, planes: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Fill planes with what ``grouped_absmax`` makes of rows; see :mod:`ninferbuild.rules.groupwise`.

    Args:
        rows: bfloat16 ``[r, K]`` on the CPU, C-contiguous, ``K`` a multiple of 128.
        planes: contiguous uint8: base, high (for 5 and 6 bits) and scale of
            :mod:`ninferbuild.artifact.codecs.row_split`.

    Returns:
        the largest magnitude, float32, NaN where there is one. Unless it is finite the planes are not filled.
    """
    base, *high, scales = (plane.data_ptr() for plane in planes)
    loop = _loops(Work.ENCODE)[format.bits]
    word = loop(rows.data_ptr(), rows.numel() // format.group_size, base, high[0] if high else None, scales)
    return torch.tensor(word, dtype=torch.int16).view(torch.bfloat16).float()


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
    agrees: Callable[[QuantFormat], bool] = {Work.ENCODE: _encodes_alike, Work.SEARCH: _searches_alike}[work]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would spend their time waiting for cores that encode
    try:
        for format in QUANT_FORMATS.values():
            if format.bits in _loops(work) and agrees(format):
                _ready.add((work, format.bits))
        if work is Work.SEARCH:
            sealed_folder.seal(_search_folder())
    except Exception:
        # A compiler that does not suit this numpy, or has no place for its code: torch makes the same bytes.
        return
    finally:
        torch.set_num_threads(threads)


def _loops(work: Work) -> Mapping[int, Any]:
    """Bits of a code → loop."""
    with _importing:
        if work not in _imported:
            _imported[work] = _import(work)
    return _imported[work]


def _import(work: Work) -> Mapping[int, Any]:
    return _encoders() if work is Work.ENCODE else _searches()


def _encoders() -> Mapping[int, Any]:
    """Loops of :mod:`ninferbuild.rules.compiled_loops`, which is imported only to compile them."""

    def compile(bits: int) -> tuple[str, str]:
        from ninferbuild.rules.compiled_loops import compile_encoder

        return compile_encoder(bits)

    arguments = (ctypes.c_void_p, ctypes.c_int64, *(ctypes.c_void_p,) * 3)
    texts = [Path(__file__).with_name(f"{name}.py") for name in ("compiled_loops", "compiled_numbers")]
    return {
        bits: machine_code.load(_folder(), f"encode{bits}", texts, partial(compile, bits), arguments)
        for bits in (4, 5, 6, 8)
    }


def _searches() -> Mapping[int, Any]:
    """Loops of :mod:`ninferbuild.rules.compiled_search`.

    The compiler keeps machine code by the text that it was made from and not only, as it would by itself, by the time
    and size of that file.
    """
    import numba

    config: Any = numba.config
    if config.DISABLE_JIT:  # interpreted, the loops are a thousand times slower than torch
        return {}
    kept = config.CACHE_DIR
    folder = _search_folder()
    sealed_folder.discard_unless_sealed(folder)
    config.CACHE_DIR = str(folder)
    try:
        # The module takes its settings, and its place in the cache, when it is first imported.
        from ninferbuild.rules import compiled_search
    finally:
        config.CACHE_DIR = kept
    return compiled_search.SEARCH


def _folder() -> Path:
    """Where machine code is kept."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("ninferbuild", appauthor=False)) / "compiled"


def _search_folder() -> Path:
    """Where the search's machine code is kept: by all that it is made from and for."""
    from llvmlite import binding as llvm
    import numba

    text = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("compiled_search.py", "scale_bounds.py"))
    machine = f"{numba.__version__} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return _folder() / block_digest(text + machine.encode()).hex()


def _encodes_alike(format: QuantFormat) -> bool:
    """Whether a loop makes torch's bytes, and finds the largest magnitudes that torch finds, or NaN."""
    from ninferbuild.rules import groupwise  # which asks this module what is ready

    rows = _trial_rows(format, groupwise.OVERFLOW * format.qmax)
    wanted = groupwise.encode_by_torch(rows, format, ErrorFlags(rows.device))
    made = tuple(torch.empty_like(plane) for plane in wanted)
    if encode(rows, format, made) != rows.abs().max() or not all(map(torch.equal, made, wanted)):
        return False
    for word in (0x4F7F, 0x7F7F, 0x7F80, -0x0080, 0x7F81, 0x7FFF, -1):  # too large, ± infinity, NaN
        rows.view(torch.int16)[-1, 77] = word
        if not torch.equal(encode(rows, format, made).nan_to_num(-1), rows.abs().max().float().nan_to_num(-1)):
            return False
    return True


def _trial_rows(format: QuantFormat, limit: float) -> torch.Tensor:
    """Bfloat16 ``[r, 128]``: groups for every largest magnitude below ``limit`` whose scale is not the least, for some
    others, and of zeros; the lanes have either sign and go down to where codes are 0."""
    first, last = torch.tensor([2.0**-26, limit]).bfloat16().view(torch.int16).tolist()
    maxima = torch.cat([torch.arange(1, first, 7), torch.arange(first, last)])
    # The last groups are not as many as a loop takes at a time.
    maxima = maxima[len(maxima) % 128 + 4 :].to(torch.int16)[:, None]
    lanes = torch.arange(format.group_size, dtype=torch.int16)
    below = lanes * (1280 // format.group_size) + (lanes * 5 + maxima) % 3  # 1024 words are eight powers of two
    words = (maxima - below * (lanes > 0)).clamp_min_(0)
    words[:8] = 0
    return (words | (lanes + maxima) % 2 << 15).view(-1, 128).view(torch.bfloat16)


def _searches_alike(format: QuantFormat) -> bool:
    """Whether a loop finds torch's scales and codes for weights of all magnitudes and all kinds of importance."""
    cpu = torch.device("cpu")
    return not any(differing_groups(search, format, cpu, weighted=weighted) for weighted in (False, True))
