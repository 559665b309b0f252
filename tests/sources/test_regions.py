"""Regions, ranges and descriptions: which bytes a selection consumes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
import pytest

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.files import MemoryFile
from ninferbuild.sources.ranges import Concatenation, coalesce
from ninferbuild.sources.regions import Region, RegionReader, Span

ONE = MemoryFile(bytes(range(100)), "one")
TWO = MemoryFile(bytes(range(100, 200)), "two")


def content(region: Region) -> bytes:
    buffer = bytearray(region.length)
    RegionReader(region).read_into(memoryview(buffer))
    return bytes(buffer)


def spans():
    bounds = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)
    return st.lists(st.tuples(st.sampled_from((ONE, TWO)), bounds).map(lambda s: Span(s[0], *s[1])), max_size=6)


def test_neighbours_join_and_empty_spans_vanish():
    region = Region.of([Span(ONE, 0, 4), Span(ONE, 4, 4), Span(ONE, 4, 9), Span(TWO, 9, 10), Span(ONE, 9, 10)])
    assert region.spans == (Span(ONE, 0, 9), Span(TWO, 9, 10), Span(ONE, 9, 10))
    assert region.length == 11


@given(spans(), st.data())
def test_select_equals_slicing_of_bytes(pieces, data):
    region = Region.of(pieces)
    whole = content(region)
    assert len(whole) == region.length == sum(span.end - span.begin for span in pieces)
    bounds = st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))).map(sorted).map(tuple)
    ranges = data.draw(st.lists(bounds, max_size=5))
    selected = region.select(ranges)
    assert content(selected) == b"".join(whole[begin:end] for begin, end in ranges)
    assert selected == Region.of(selected.spans)


@pytest.mark.parametrize("region", [Region.of([Span(ONE, 5, 9)]), Region.of([Span(ONE, 5, 7), Span(TWO, 0, 2)])])
def test_select_outside_is_refused(region):
    for bounds in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="outside"):
            region.select([bounds])


def test_reader_shows_every_byte_once_and_stops_at_the_end():
    region = Region.of([Span(ONE, 0, 10), Span(TWO, 0, 5)])
    seen = bytearray()
    reader = RegionReader(region, lambda data: seen.extend(data))
    for size in (3, 9, 3):
        buffer = bytearray(size)
        reader.read_into(memoryview(buffer))
        assert seen.endswith(buffer)
    assert bytes(seen) == content(region)
    with pytest.raises(ValueError, match="past the end"):
        reader.read_into(memoryview(bytearray(1)))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)).map(lambda r: (r[0], r[0] + r[1])), max_size=8))
def test_coalesce_keeps_the_sequence(ranges):
    def positions(of):
        return [position for begin, end in of for position in range(begin, end)]

    joined = coalesce(ranges)
    assert positions(joined) == positions(ranges)
    assert all(begin < end for begin, end in joined)
    assert all(left[1] != right[0] for left, right in itertools.pairwise(joined))

    sequence = Concatenation(ranges)
    whole = positions(ranges)
    assert sequence.length == len(whole)
    for begin in range(0, len(whole) + 1, 3):
        for end in range(begin, len(whole) + 1, 4):
            pieces = list(sequence.pieces(begin, end))
            assert positions((first, last) for _, first, last in pieces) == whole[begin:end]
            assert all(ranges[number][0] <= first < last <= ranges[number][1] for number, first, last in pieces)


def described(rows: int, row_bytes: int = 4) -> Description:
    region = Region.of([Span(ONE, 8, 8 + rows * row_bytes)])
    return Description(shape=(rows, row_bytes), dtype="U8", decoder="plain", parts=(Part("values", region, row_bytes),))


def test_select_rows_selects_bytes():
    chosen = described(10).select_rows([(2, 3), (3, 5), (0, 1)])
    assert chosen.shape == chosen.stored_shape == (4, 4)
    assert chosen.parts[0].region.spans == (Span(ONE, 16, 28), Span(ONE, 8, 12))
    assert described(10).select_rows([(0, 4), (4, 10)]) == described(10)
    for bounds in ((0, 11), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="outside"):
            described(10).select_rows([bounds])


def test_steps_accumulate_after_a_transposition():
    turned = described(3).transpose((1, 0), (4, 3)).select_rows([(1, 2), (2, 4)])
    assert turned.steps == (("transpose", (3, 4), (1, 0)), ("rows", (4, 3), ((1, 4),)))
    assert (turned.shape, turned.stored_shape) == ((3, 3), (3, 4))
    assert turned.parts == described(3).parts
    assert turned.flat_view(6, (1, 3)).steps[-1] == ("rows", (3, 3), ((2, 3),))
    with pytest.raises(ValueError, match="flat view"):
        turned.flat_view(1, (1, 3))


def test_names_are_for_messages_only():
    one = described(3)
    other = replace(one, parts=(replace(one.parts[0], name="renamed"),))
    assert one == other


def test_a_table_for_all_rows_stays_whole():
    table = Part("scales", Region.of([Span(TWO, 0, 2)]), 0)
    both = replace(described(10), parts=(*described(10).parts, table))
    assert both.select_rows([(4, 6)]).parts[1] == table


def blocked(rows: int) -> Description:
    """Entries of 2 bytes that serve 4 rows each; entry e holds the bytes (2e, 2e + 1) of ``TWO``."""
    table = Part("scales", Region.of([Span(TWO, 0, -(-rows // 4) * 2)]), 2, rows=4)
    return replace(described(rows), parts=(*described(rows).parts, table), positions=())


def entry_of_rows(description: Description) -> list[bytes]:
    data = content(description.parts[1].region)
    positions = [position for begin, end in description.positions for position in range(begin, end)]
    return [data[position // 4 * 2 : position // 4 * 2 + 2] for position in positions]


@given(st.integers(1, 20), st.data())
def test_rows_keep_their_entries(rows, data):
    description = blocked(rows)
    assert description.positions == ((0, rows),)
    numbers = list(range(rows))
    for _ in range(data.draw(st.integers(0, 3))):
        bounds = st.tuples(st.integers(0, len(numbers) - 1), st.integers(1, len(numbers))).filter(lambda b: b[0] < b[1])
        ranges = data.draw(st.lists(bounds, min_size=1, max_size=4))
        numbers = [number for begin, end in ranges for number in numbers[begin:end]]
        description = description.select_rows(ranges)
    assert entry_of_rows(description) == [bytes([100 + row // 4 * 2, 101 + row // 4 * 2]) for row in numbers]
    assert content(description.parts[0].region) == b"".join(bytes(range(8 + r * 4, 12 + r * 4)) for r in numbers)
    used = len({position // 4 for begin, end in description.positions for position in range(begin, end)})
    assert description.parts[1].region.length == used * 2


def test_where_a_selection_lies_in_the_table_does_not_matter():
    first, second = blocked(20).select_rows([(1, 6)]), blocked(20).select_rows([(9, 14)])
    assert first.positions == second.positions == ((1, 6),)
    assert blocked(20).select_rows([(2, 6)]).positions != first.positions
