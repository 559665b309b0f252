"""Methods that survey a whole parent before they encode it read it twice, in blocks, and say so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import threading

from fixtures.memory_writer import MemoryWriter
from fixtures.rm4 import array_parameter, model_of
import pytest
import torch

from ninferbuild.artifact.layouts import planes
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.digest import digest_of
from ninferbuild.encode import PayloadSink, encode
from ninferbuild.errors import Cancelled, SourceChangedError
from ninferbuild.lanes import HostLane
from ninferbuild.plan import Parent, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.sources.logical import LogicalSource


def parent_of(*parts: torch.Tensor | LogicalSource, divisor: float | None = 2.0) -> Parent:
    """The one parent that packs ``parts``, quantised to NVFP4."""
    parameters = [
        array_parameter(f"p{index}", part if isinstance(part, torch.Tensor) else torch.zeros(part.shape), ("input",))
        for index, part in enumerate(parts)
    ]
    recipe = Recipe(model_of(parameters, [tuple(parameter.name for parameter in parameters)]))
    for parameter, part in zip(parameters, parts, strict=True):
        if isinstance(part, LogicalSource):
            recipe.assign(parameter.name, source=part)
        if divisor is not None:
            recipe.use(parameter.name, "input", auxiliaries={"activation_input_divisor": divisor})
    recipe.assign("*", format="nvfp4", method="nvfp4_maxabs", activation_policy="AllowA4")
    (parent,) = plan_parents(recipe).parents
    return parent


def encoded(parent: Parent, chunk_bytes: int = 4 << 20) -> tuple[bytes, list[bytes], int, int]:
    """Payload, digests of the inputs, bytes read, and bytes told to the progress display."""
    target = parent.target
    geometry = planes(target.layout, target.format, target.shape, target.divisors)
    payload = bytearray(sum(plane.extent for plane in geometry))
    told = 0

    def put(offset: int, data: memoryview) -> bytes:
        payload[offset : offset + len(data)] = data
        return digest_of(data)

    def advance(count: int) -> None:
        nonlocal told
        told += count

    with ThreadPoolExecutor(1) as pool:
        sink = PayloadSink(geometry, put, pool)
        digests, count = encode(
            parent, sink, HostLane(), chunk_bytes=chunk_bytes, cancel=threading.Event(), advance=advance
        )
        sink.finish()
    return bytes(payload), digests, count, told


@pytest.fixture
def parts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    pieces = [torch.randn((rows, 192), generator=generator) for rows in (40, 300, 44)]
    pieces[2][43, 191] = 9.0  # the largest comes last
    return [piece.bfloat16() for piece in pieces]


@pytest.mark.parametrize("chunk_bytes", [1, 128 * 192 * 2, 4 << 20])
def test_the_payload_is_that_of_the_method_whatever_the_chunks(parts: list[torch.Tensor], chunk_bytes: int) -> None:
    parent = parent_of(*parts)
    writer = MemoryWriter(parent.target)
    parent.method(parent.request).produce(TensorOutput(writer, parent.target.id))
    payload, digests, count, told = encoded(parent, chunk_bytes)
    assert payload == writer.payload()
    assert digests == [digest_of(bytes(part.view(torch.uint8).numpy().data)) for part in parts]
    assert count == told == 2 * sum(part.numel() * 2 for part in parts)


def unsteady(values: torch.Tensor, steady_reads: int) -> LogicalSource:
    """A reader whose values change after so many reads."""
    flat, reads = values.reshape(-1), 0

    def read(begin: int, end: int) -> torch.Tensor:
        nonlocal reads
        reads += 1
        return flat[begin:end] * (1 if reads <= steady_reads else 0.5)

    return LogicalSource(tuple(values.shape), "unsteady", read)


def test_a_function_is_asked_twice_for_the_same_values() -> None:
    values = torch.ones(128, 64)
    checks, passes = 1, 2  # planning reads one element
    payload, *_ = encoded(parent_of(unsteady(values, checks + passes)))
    assert payload == encoded(parent_of(values))[0]
    with pytest.raises(SourceChangedError, match="p0: its source changed while it was read"):
        encoded(parent_of(unsteady(values, checks + 1)))


def test_invalid_values_are_found_before_anything_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("something was encoded")

    monkeypatch.setattr("ninferbuild.rules.nvfp4_words.encode_rows", refuse)
    values = torch.ones(256, 64)
    values[255, 63] = torch.nan
    with pytest.raises(ValueError, match="NVFP4 source contains NaN or infinity"):
        encoded(parent_of(values))


@pytest.mark.parametrize("blocks", [0, 1])
def test_both_passes_can_be_cancelled(blocks: int) -> None:
    parent, cancel, told = parent_of(torch.ones(128, 64)), threading.Event(), 0

    def advance(count: int) -> None:
        nonlocal told
        told += 1
        cancel.set()  # the survey is done: what comes next is the second pass

    if not blocks:
        cancel.set()
    with ThreadPoolExecutor(1) as pool:
        sink = PayloadSink(planes(parent.target.layout, "nvfp4", (128, 64)), lambda offset, data: b"", pool)
        with pytest.raises(Cancelled):
            encode(parent, sink, HostLane(), cancel=cancel, advance=advance)
    assert told == blocks


def test_a_parent_packs_different_encodings_under_one_divisor(nvfp4_source: Callable[[float], LogicalSource]) -> None:
    """Values that were quantised against other divisors before are one parent like any others."""
    parent = parent_of(nvfp4_source(2.0), nvfp4_source(4.0))
    assert parent.target.divisors == 1
    halved = torch.cat([part.values() for part in (nvfp4_source(2.0), nvfp4_source(4.0))]).reshape(256, 64)
    assert encoded(parent)[0] == encoded(parent_of(halved))[0]


@pytest.fixture
def nvfp4_source() -> Callable[[float], LogicalSource]:
    def make(divisor: float) -> LogicalSource:
        values = torch.full((128, 64), 6.0) / divisor
        word = bytes(torch.tensor([divisor]).view(torch.uint8).tolist())
        return LogicalSource(
            (128, 64), f"divided by {divisor}", lambda begin, end: values.reshape(-1)[begin:end], None, lambda: word
        )

    return make
