"""The compiled loops make torch's bytes, or are not used."""

from __future__ import annotations

from collections.abc import Iterator
import importlib.metadata
import importlib.util
from pathlib import Path
import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from ninferbuild.artifact.formats import QUANT_FORMATS, QuantFormat
from ninferbuild.digest import block_digest
from ninferbuild.rules import compiled
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.groupwise import encode_matrix

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
FORMATS = [format for format in QUANT_FORMATS.values() if format.bits > 2]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    compiled._load()
    yield
    compiled._ready.clear()


def encoded(weight: torch.Tensor, format: QuantFormat, *, fast: bool) -> list[bytes]:
    ready = set(compiled._ready)
    if not fast:
        compiled._ready.clear()
    try:
        errors = ErrorFlags(torch.device("cpu"))
        planes = encode_matrix(weight, format, errors)
        errors.raise_if_any()
    finally:
        compiled._ready.update(ready)
    return [plane.numpy().tobytes() for plane in planes]


def test_all_formats_are_served() -> None:
    assert all(compiled.ready(format) for format in FORMATS)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 5),
    low=st.integers(0, 0x7F00),
    span=st.integers(1, 0x7F80),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_same_bytes_as_torch(
    format: QuantFormat, seed: int, rows: int, blocks: int, low: int, span: int, zeros: float
) -> None:
    """Random words between any two magnitudes: denormals, scales that underflow, values far beyond a scale."""
    generator = torch.Generator().manual_seed(seed)
    # The largest finite quotients that binary16 holds end below 65520 · qmax.
    top = min(low + span, int(torch.tensor(65000.0 * format.qmax).bfloat16().view(torch.int16)))
    words = torch.randint(min(low, top - 1), top, (rows, 128 * blocks), generator=generator)
    signs = torch.randint(0, 2, words.shape, generator=generator) << 15
    kept = torch.rand(words.shape, generator=generator) >= zeros
    weight = ((words * kept) | signs).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    assert encoded(weight, format, fast=True) == encoded(weight, format, fast=False)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.0e38])
def test_the_same_numbers_are_refused(format: QuantFormat, value: float) -> None:
    weight = torch.ones(3, 256, dtype=torch.bfloat16)
    weight[1, 77] = value
    with pytest.raises(ValueError, match=r"NaN or infinity|too large"):
        encoded(weight, format, fast=True)


def test_other_loops_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(words: Any, reciprocals: Any, base: Any, high: Any) -> None:
        right(words, reciprocals, base, high)
        base[-1] ^= 1

    loops = dict(compiled._loops())
    right, loops[4] = loops[4], wrong
    monkeypatch.setattr(compiled, "_loops", lambda: loops)
    monkeypatch.setattr(compiled, "_ready", set())
    compiled._load()
    assert compiled._ready == {5, 6, 8}


def test_a_compiler_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def loops() -> None:
        raise ImportError("Numba needs NumPy 1.0 or less")

    monkeypatch.setattr(compiled, "_loops", loops)
    monkeypatch.setattr(compiled, "_ready", set())
    compiled._load()
    assert not compiled._ready


def test_loaded_once_and_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    running = threading.Event()
    calls = []

    def load() -> None:
        calls.append(threading.current_thread())
        running.set()

    monkeypatch.setattr(compiled, "_load", load)
    monkeypatch.setattr(compiled, "_started", False)
    compiled.load()
    compiled.load()
    assert running.wait(30)
    assert calls != [threading.current_thread()]
    assert len(calls) == 1


def test_without_numba_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_started", False)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    compiled.load()
    assert not compiled._started


def test_machine_code_is_kept_by_the_text_it_was_made_from() -> None:
    from ninferbuild.rules import compiled_loops

    text = Path(compiled.__file__).with_name("compiled_loops.py").read_bytes()
    version = block_digest(text + importlib.metadata.version("numba").encode()).hex()
    for loop in compiled_loops.PACK.values():
        assert f"/ninferbuild/compiled/{version}/" in str(loop._cache.cache_path)
