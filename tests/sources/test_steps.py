"""Steps of descriptions: against plain numpy, streamed and at random places, and the bits that they give by version.

A failure of the pinned bits means that transformed values changed: raise the step's entry in ``STEP_VERSIONS`` and pin
the new digest under the new version, or old cache entries would be taken for the new values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.digest import digest_of
from ninferbuild.sources.decoding import open_values, read_values
from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.files import MemoryFile
from ninferbuild.sources.logical import array_source
from ninferbuild.sources.regions import Region, Span
from ninferbuild.sources.steps import STEP_VERSIONS
from ninferbuild.sources.transforms import STEPS

F32 = np.float32


def described(values: np.ndarray | torch.Tensor, name: str = "t") -> Description:
    description = array_source(values, name).description
    assert description is not None
    return description


def bf16(values: np.ndarray) -> Description:
    return described(torch.from_numpy(values.astype(F32)).to(torch.bfloat16))


def read(description: Description, blocks: Sequence[int] = ()) -> np.ndarray:
    """All values, read as a stream in pieces of ``blocks`` elements and the rest at once."""
    stream = open_values(description)
    pieces = [stream.read(count) for count in blocks]
    pieces.append(stream.read(description.elements - sum(blocks)))
    assert all(piece.dtype == stream.dtype for piece in pieces)
    return torch.cat(pieces).numpy().reshape(description.shape)


def nvfp4(rows: int = 6, columns: int = 32) -> Description:
    """A description that is decoded row by row."""
    codes = (np.arange(rows * columns // 2) * 37 % 256).astype(np.uint8)
    scales = (40 + np.arange(rows * columns // 16) % 40).astype(np.uint8)

    def part(role: str, data: np.ndarray) -> Part:
        raw = data.tobytes()
        return Part(role, Region.of([Span(MemoryFile(raw, role), 0, len(raw))]), len(raw) // rows, name=role)

    words = (("weight_divisor", F32(3).tobytes()),)
    parts = (part("codes", codes), part("scales", scales))
    return Description((rows, columns), "F32", "nvfp4", parts, words, encoding="nvfp4")


RANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda r: r[0] < r[1]), min_size=1, max_size=3)


@st.composite
def chains(draw: Any) -> tuple[str, tuple[int, ...], list[tuple[Any, ...]]]:
    """A stored type, a shape and what is done to it."""
    dtype = draw(st.sampled_from(["BF16", "F32", "nvfp4"]))
    shape: tuple[int, ...] = (6, 32) if dtype == "nvfp4" else tuple(draw(st.lists(st.integers(3, 4), max_size=3)))
    names = ["rows", "gather", "reshape", "transpose", "add", "widen"] if shape else ["add", "widen"]
    chain: list[tuple[Any, ...]] = []
    rank = len(shape)
    for name in draw(st.lists(st.sampled_from(names), max_size=6)):
        if name == "rows":
            chain.append((name, draw(RANGES)))
        elif name == "gather":
            chain.append((name, draw(st.integers(0, rank - 1)), draw(RANGES)))
        elif name == "transpose":
            chain.append((name, tuple(draw(st.permutations(range(rank))))))
        elif name == "reshape":
            chain.append((name, draw(st.sampled_from(["flat", "wrapped", "row"]))))
            rank = {"flat": 1, "wrapped": rank + 1, "row": rank + 1}[chain[-1][1]]
        else:
            chain.append((name,))
    return dtype, shape, chain


RESHAPED = {
    "flat": lambda shape: (prod(shape),),
    "wrapped": lambda shape: (*shape, 1),
    "row": lambda shape: (1, *shape),
}


def clipped(ranges: Sequence[tuple[int, int]], extent: int) -> list[tuple[int, int]]:
    """Ranges that fit an axis, at least one of them not empty."""
    found = [(min(begin, extent), min(end, extent)) for begin, end in ranges]
    return found if any(begin < end for begin, end in found) else [(0, extent)]


@settings(max_examples=300, deadline=None)
@given(chains(), st.data())
def test_chains_equal_numpy(case: tuple[str, tuple[int, ...], list[tuple[Any, ...]]], data: Any) -> None:
    dtype, shape, chain = case
    if dtype == "nvfp4":
        description = nvfp4(*shape)
        values = read(description)
    else:
        values = np.arange(prod(shape), dtype=F32).reshape(shape)
        description = bf16(values) if dtype == "BF16" else described(values)
    for name, *arguments in chain:
        if name == "rows":
            ranges = clipped(arguments[0], values.shape[0])
            values = np.concatenate([values[begin:end] for begin, end in ranges])
            description = description.select_rows(ranges)
        elif name == "gather":
            axis, ranges = arguments[0], clipped(arguments[1], values.shape[arguments[0]])
            values = np.concatenate([np.take(values, range(*item), axis=axis) for item in ranges], axis=axis)
            description = description.gather(axis, ranges)
        elif name == "transpose":
            values = values.transpose(arguments[0])
            description = description.transpose(arguments[0], values.shape)
        elif name == "reshape":
            values = values.reshape(RESHAPED[arguments[0]](values.shape))
            description = description.reshape(values.shape)
        else:
            description = description.to_float32()
            if name == "add":
                values = values + F32(1.5)
                description = description.add(1.5)
    flat = values.reshape(-1)
    assert description.shape == values.shape
    bounds = sorted(data.draw(st.lists(st.integers(0, flat.size), min_size=2, max_size=2)))
    blocks = (bounds[0], bounds[1] - bounds[0])
    if description.dtype == "F32":
        assert np.array_equal(read(description, blocks), values)
    assert read_values(description, *bounds).float().tolist() == flat[bounds[0] : bounds[1]].tolist()
    if values.ndim and flat.size:
        rest = prod(values.shape[1:])
        view = description.flat_view(bounds[0] // rest * rest, (values.shape[0] - bounds[0] // rest, *values.shape[1:]))
        assert read_values(view, 0, view.elements).float().tolist() == flat[bounds[0] // rest * rest :].tolist()


class TestWhatIsRead:
    """Only what is needed is read, and streams hold no more than they were asked for."""

    def test_rows_are_selected_before_steps_that_are_local_to_them(self) -> None:
        whole = bf16(np.arange(24).reshape(6, 4)).to_float32().add(-1.0).gather(1, [(2, 4), (0, 2)])
        few = whole.select_rows([(4, 6), (0, 1)])
        assert few.parts[0].region.length == 3 * 4 * 2
        assert few.steps == (
            ("float32", (3, 4), "BF16"),
            ("add", (3, 4), -1.0),
            ("gather", (3, 4), 1, ((2, 4), (0, 2))),
        )
        assert read(few).tolist() == [[17, 18, 15, 16], [21, 22, 19, 20], [1, 2, -1, 0]]

    def test_reordered_rows_are_regions(self) -> None:
        values = np.arange(32, dtype=F32).reshape(8, 4)
        reordered = described(values).gather(0, [(0, 2), (6, 8), (2, 4), (4, 6)])
        assert not reordered.steps
        assert [(span.begin // 16, span.end // 16) for span in reordered.parts[0].region.spans] == [
            (0, 2),
            (6, 8),
            (2, 6),
        ]
        assert np.array_equal(read(reordered), values[[0, 1, 6, 7, 2, 3, 4, 5]])

    def test_a_reshaped_plain_source_is_a_plain_source(self) -> None:
        values = np.arange(12, dtype=F32).reshape(4, 3)
        reshaped = described(values).reshape((4, 1, 3))
        assert not reshaped.steps
        assert reshaped.parts[0].row_bytes == 12
        assert np.array_equal(read(reshaped), values.reshape(4, 1, 3))

    @pytest.mark.parametrize("base", [bf16(np.ones((64, 32))).to_float32(), nvfp4(64, 32)], ids=["plain", "decoded"])
    def test_streams_read_no_further_than_the_block(self, base: Description) -> None:
        read_bytes = 0

        def count(part: int, data: memoryview) -> None:
            nonlocal read_bytes
            read_bytes += data.nbytes

        stepped = base.add(1.0).gather(1, [(16, 32), (0, 16)])
        stream = open_values(stepped, count)
        stream.read(8 * 32)
        assert read_bytes == sum(part.region.length for part in base.parts) // 8
        stream.read(56 * 32)
        assert read_bytes == sum(part.region.length for part in base.parts)

    def test_every_byte_is_observed_once_whatever_the_steps(self) -> None:
        seen: list[bytes] = []
        turned = bf16(np.arange(12).reshape(3, 4)).to_float32().transpose((1, 0), (4, 3)).add(1.0)
        open_values(turned, lambda part, data: seen.append(bytes(data))).read(turned.elements)
        assert b"".join(seen) == torch.arange(12).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


class TestStack:
    @pytest.mark.parametrize("axis", [0, 1, 2])
    @pytest.mark.parametrize("widened", [False, True])
    def test_equals_numpy(self, axis: int, widened: bool) -> None:
        arrays = [np.arange(6).reshape(2, 3) + 10 * number for number in range(3)]
        parts = [bf16(values).to_float32() if widened else described(values.astype(F32)) for values in arrays]
        stacked = Description.stack(parts, axis)
        assert np.array_equal(read(stacked), np.stack(arrays, axis))
        assert len(stacked.parts) == 1
        assert stacked.shape == np.stack(arrays, axis).shape

    def test_decoded_rows(self) -> None:
        parts = [nvfp4().select_rows([(0, 3)]), nvfp4().select_rows([(3, 6)])]
        assert not parts[0].stacks_with(parts[1])  # codes and scales would have to alternate

    @pytest.mark.parametrize(
        "other",
        [
            described(np.zeros((2, 4), F32)),
            bf16(np.zeros((2, 3))),
            bf16(np.zeros((2, 3))).to_float32(),
            described(np.zeros((2, 3), F32)).add(1.0),
        ],
    )
    def test_what_cannot_be_read_as_one_is_refused(self, other: Description) -> None:
        with pytest.raises(ValueError, match="one shape, one stored type"):
            Description.stack([described(np.zeros((2, 3), F32)), other], 0)

    def test_an_axis_too_far(self) -> None:
        with pytest.raises(ValueError, match="no axis 3"):
            Description.stack([described(np.zeros((2, 3), F32))] * 2, 3)


class TestLogNegative:
    def test_values(self) -> None:
        values = np.array([-1, -2, -0.5, -0.01], F32)
        assert read(described(values).log_negative()).view(np.uint32).tolist() == [
            0x00000000,
            0x3F317218,
            0xBF317218,
            0xC0935D8E,
        ]

    @pytest.mark.parametrize("value", [0.0, -0.0, 1.0, np.nan, -np.inf])
    def test_others_are_refused_with_the_name_of_the_tensor(self, value: float) -> None:
        description = described(np.array([-1, value], F32), "blk.0.ssm_a").log_negative()
        with pytest.raises(ValueError, match=r"blk\.0\.ssm_a: .*negative"):
            read(description)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: bf16(np.ones(3)).add(1.0), "requires FP32 values, not BF16"),
        (lambda: bf16(np.ones(3)).log_negative(), "requires FP32 values, not BF16"),
        (lambda: described(np.ones(3, np.int32)).to_float32(), "I32 cannot be widened"),
        (lambda: described(np.ones(3, F32)).add(0.1), "0.1 is no FP32 number"),
        (lambda: described(np.ones(3, F32)).add(1e300), "no FP32 number"),
        (lambda: described(np.ones(3, F32)).add(float("nan")), "no FP32 number"),
        (lambda: described(np.ones((2, 3), F32)).gather(1, [(0, 4)]), r"\[0, 4\) lies outside 3 positions"),
        (lambda: described(np.ones((2, 3), F32)).gather(2, [(0, 1)]), "axis 2 is none of the 2 axes"),
        (lambda: described(np.ones((2, 3), F32)).reshape((5,)), "cannot have the shape"),
        (lambda: nvfp4().flat_view(1, (2, 32)), "requires whole rows"),
        (lambda: nvfp4().flat_view(0, (7, 32)), "lie outside"),
    ],
)
def test_what_is_refused(attempt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt()


PINNED = {
    ("rows", 1): "abe14237826f76c3511ab824dde468a5",
    ("transpose", 1): "948a15459aa88f4a53577573284f221c",
    ("reshape", 1): "fb5efaf4cdee81f2f029f636c6a46f2e",
    ("gather", 1): "a2da84252cbec9c7684186d8debed736",
    ("float32", 1): "f1d528279173f53943dd75904fa9345f",
    ("add", 1): "025e9d498759c9d0109ed7b333ec1e7d",
    ("log_negative", 1): "45e1b893e9a510a57f884894f76dbd55",
}


def fixed_inputs() -> dict[str, Description]:
    words = (np.arange(120, dtype=np.uint16) * 547).view(np.float16).astype(F32)
    values = np.where(np.isfinite(words), words, F32(7)).reshape(4, 5, 6)
    whole = described(values)
    return {
        "rows": whole.transpose((2, 0, 1), (6, 20)).select_rows([(4, 6), (1, 2)]),
        "transpose": whole.transpose((2, 0, 1), (6, 20)),
        "reshape": whole.transpose((0, 2, 1), (4, 6, 5)).reshape((8, 15)),
        "gather": whole.gather(1, [(3, 5), (0, 2)]).gather(2, [(1, 2), (0, 6)]),
        "float32": bf16(values).to_float32(),
        "add": described(values / F32(77)).add(-1.0),
        "log_negative": described(-np.abs(values) - F32(0.001)).log_negative(),
    }


@pytest.mark.parametrize(("step", "version"), PINNED)
def test_bits(step: str, version: int) -> None:
    description = fixed_inputs()[step]
    assert any(found[0] == step for found in description.steps)
    assert digest_of(read(description).tobytes()).hex() == PINNED[step, version]


def test_every_step_is_pinned_under_its_version_and_implemented() -> None:
    assert set(STEP_VERSIONS.items()) == set(PINNED)
    assert STEPS.keys() == STEP_VERSIONS.keys() == fixed_inputs().keys()
