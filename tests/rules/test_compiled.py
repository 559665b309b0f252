"""The compiled loops make torch's bytes, or are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path
import threading
from types import SimpleNamespace
from typing import Any

from fixtures.search_problems import search_problems
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from ninferbuild import execute
from ninferbuild.artifact.formats import QUANT_FORMATS, QuantFormat
from ninferbuild.execute import Executor
from ninferbuild.rules import compiled, grouped_absmax, grouped_search
from ninferbuild.rules.compiled import Work
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.groupwise import encode_matrix
from ninferbuild.rules.rule import Rule
from ninferbuild.rules.scale_search import search_tile

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
FORMATS = [format for format in QUANT_FORMATS.values() if format.bits > 2]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    assert compiled.load_now(Work.ENCODE)
    assert compiled.load_now(Work.SEARCH)
    yield
    compiled._ready.clear()


@contextmanager
def by_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_ready", set())
        yield


def encoded(weight: torch.Tensor, format: QuantFormat, *, fast: bool) -> list[bytes]:
    with nullcontext() if fast else by_torch():
        errors = ErrorFlags(torch.device("cpu"))
        planes = encode_matrix(weight, format, errors)
        errors.raise_if_any()
    return [plane.numpy().tobytes() for plane in planes]


def searched(
    rows: torch.Tensor, format: QuantFormat, importance: torch.Tensor | None, *, negative: bool, fast: bool
) -> tuple[bytes, bytes]:
    with nullcontext() if fast else by_torch():
        found = search_tile(rows, format, importance, ErrorFlags(rows.device), negative_scales=negative)
    return found.codes.numpy().tobytes(), found.scales.numpy().tobytes()


def test_all_formats_are_served() -> None:
    assert all(compiled.ready(work, format) for work in Work for format in FORMATS)


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
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_the_same_numbers_are_refused(format: QuantFormat, data: st.DataObject, seed: int) -> None:
    """Some words of any kind, NaN and infinity and what is too large among them, anywhere in an otherwise good block:
    the same bytes, or the same message."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(data.draw(st.integers(1, 70)), 256, generator=generator).bfloat16()
    words = st.one_of(
        st.integers(0, 0xFFFF),
        st.sampled_from([0x0001, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7F7F]),
        st.integers(0x4700, 0x4C00),  # about as large as scales allow
    )
    for place, word in data.draw(st.dictionaries(st.integers(0, weight.numel() - 1), words, max_size=4)).items():
        weight.view(torch.int16).view(-1)[place] = word - (word >> 15 << 16)
    assert outcome(weight, format, fast=True) == outcome(weight, format, fast=False)


def outcome(weight: torch.Tensor, format: QuantFormat, *, fast: bool) -> list[bytes] | str:
    try:
        return encoded(weight, format, fast=fast)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@given(groups=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_nothing_is_written_beyond_the_planes(format: QuantFormat, groups: int, seed: int) -> None:
    """Of any number of groups, with memory on both sides of every plane and NaN on both sides of the weights."""
    size = format.group_size
    rows = torch.full((groups + 2, size), float("nan"), dtype=torch.bfloat16)
    rows[1:-1] = torch.randn(groups, size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    lengths = [length for length in (size // 8 * min(format.bits, 4), format.high_bytes, 2) if length]
    lengths[0] = size if format.bits == 8 else size // 2
    planes = [torch.full(((groups + 2) * length,), 0xA5, dtype=torch.uint8) for length in lengths]
    inner = tuple(plane[length:-length] for plane, length in zip(planes, lengths, strict=True))
    largest = compiled.encode(rows[1:-1], format, inner)
    assert largest == rows[1:-1].abs().max()
    for plane, length in zip(planes, lengths, strict=True):
        assert torch.equal(plane[:length], torch.full_like(plane[:length], 0xA5))
        assert torch.equal(plane[-length:], torch.full_like(plane[-length:], 0xA5))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@given(data=st.data(), negative=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_same_scales_as_torch(format: QuantFormat, data: st.DataObject, negative: bool) -> None:
    weight, importance = data.draw(search_problems(format))
    fast, slow = (searched(weight, format, importance, negative=negative, fast=fast) for fast in (True, False))
    assert fast == slow


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_words_are_rounded_as_torch_does(format: QuantFormat) -> None:
    """Alone in its group, a value makes every multiple a scale of its own: each magnitude, on ties and beside them."""
    words = torch.arange(1, 0x7BFF, 149, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    ties = torch.stack([words * format.qmax * (1 + 2.0**-12 * (1 + nudge)) for nudge in (0, 2.0**-10, -(2.0**-10))])
    weight = torch.zeros(ties.numel(), 128)
    weight[:, 5], weight[:, 6] = ties.flatten(), ties.flatten() / 3
    for signed in (weight, -weight):
        fast, slow = (searched(signed, format, None, negative=True, fast=fast) for fast in (True, False))
        assert fast == slow


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_the_search_refuses_the_same_numbers(value: float) -> None:
    weight = torch.ones(3, 200)
    weight[2, 150] = value
    for fast in (True, False):
        with pytest.raises(ValueError, match=r"NaN or infinity|too large"):
            searched(weight, FORMATS[0], None, negative=False, fast=fast)


@pytest.mark.parametrize(
    ("work", "changed", "bits"),
    [(Work.ENCODE, 2, 4), (Work.ENCODE, 3, 5), (Work.ENCODE, 4, 8), (Work.SEARCH, 7, 4), (Work.SEARCH, 8, 8)],
)
def test_other_loops_are_not_used(monkeypatch: pytest.MonkeyPatch, work: Work, changed: int, bits: int) -> None:
    """One bit of one result is another one: of the base, high and scale planes; of the codes; of the scales."""

    def wrong(*arguments: Any) -> Any:
        result = right(*arguments)
        memory = arguments[changed]
        if work is Work.ENCODE:
            memory = (ctypes.c_uint8 * 1000).from_address(memory)
        memory[-1] ^= 1
        return result

    loops = dict(compiled._loops(work))
    right, loops[bits] = loops[bits], wrong
    monkeypatch.setitem(compiled._imported, work, loops)
    monkeypatch.setattr(compiled, "_ready", set())
    assert not compiled.load_now(work)
    assert compiled._ready == {(work, other) for other in (4, 5, 6, 8) if other != bits}


@pytest.mark.parametrize("change", [lambda word: word ^ 1, lambda word: min(word, 0x7F80), lambda word: 0])
def test_loops_that_miss_a_magnitude_are_not_used(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[int], int]
) -> None:
    """What is too large, infinite or NaN is told by the largest word alone."""
    loops = dict(compiled._loops(Work.ENCODE))
    right, loops[6] = loops[6], lambda *arguments: change(right(*arguments))
    monkeypatch.setitem(compiled._imported, Work.ENCODE, loops)
    monkeypatch.setattr(compiled, "_ready", set())
    assert not compiled.load_now(Work.ENCODE)
    assert (Work.ENCODE, 6) not in compiled._ready


@pytest.mark.parametrize("work", Work)
def test_a_compiler_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    def loops(work: Work) -> None:
        raise ImportError("Numba needs NumPy 1.0 or less")

    monkeypatch.setattr(compiled, "_loops", loops)
    monkeypatch.setattr(compiled, "_ready", set())
    assert not compiled.load_now(work)
    assert not compiled._ready


@pytest.mark.parametrize("work", Work)
def test_loaded_once_and_in_the_background(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    running = threading.Event()
    calls = []

    def load(loaded: Work) -> None:
        calls.append((loaded, threading.current_thread()))
        running.set()

    monkeypatch.setattr(compiled, "_load", load)
    monkeypatch.setattr(compiled, "_started", set())
    compiled.load(work)
    compiled.load(work)
    assert running.wait(30)
    ((loaded, thread),) = calls
    assert loaded is work
    assert thread is not threading.current_thread()


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        (grouped_search, (8192, 8192), [Work.SEARCH]),
        (grouped_search, (8191, 8192), []),
        (grouped_absmax, (8192, 8192), []),
        (grouped_absmax, (1 << 17, 1 << 10), [Work.ENCODE]),
    ],
)
def test_large_builds_load_what_they_use(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, shape: tuple[int, int], expected: list[Work]
) -> None:
    calls: list[Work] = []
    monkeypatch.setattr(compiled, "load", calls.append)
    target = SimpleNamespace(format="q4_g64_fp16", shape=shape)
    action = SimpleNamespace(parent=SimpleNamespace(rule=rule, target=target))
    monkeypatch.setattr(execute, "warm_up", lambda devices, parents: [])  # there may be no GPU
    for kind, found in (("cpu", expected), ("cuda", [])):
        calls.clear()
        device = SimpleNamespace(type=kind)
        executor: Any = SimpleNamespace(device=lambda device=device: device, _warming=[])
        executor.device.all = [device]
        actions: Any = [action]
        Executor.expect(executor, actions)
        assert calls == found


def test_without_numba_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_started", set())
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    for work in Work:
        compiled.load(work)
        assert not compiled.load_now(work)
    assert not compiled._started


def test_the_search_is_kept_by_what_it_was_made_from_and_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    folder = compiled._search_folder()
    for loop in compiled._loops(Work.SEARCH).values():
        assert f"/ninferbuild/compiled/{folder.name}/" in str(loop._cache.cache_path)
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "another")
    assert compiled._search_folder() != folder
    monkeypatch.undo()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "compiled_search.py"))
    assert compiled._search_folder() != folder
