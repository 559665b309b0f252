"""What a source is made of, said without torch and without reading it.

A :class:`Description` is what planning and the action keys see of an input; :mod:`ninferbuild.sources.decoding` turns
the same description and its bytes into tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ninferbuild.sources.dtypes import WORD_BYTES
from ninferbuild.sources.ranges import Concatenation, Range, coalesce
from ninferbuild.sources.regions import Region


@dataclass(frozen=True, slots=True)
class Part:
    """One region of a source and how the rows of the source lie in it.

    The region is a sequence of entries of ``row_bytes`` bytes. An entry serves ``rows`` consecutive rows along the
    leading axis; with 1, the rule, the entries are read along with the rows. A part with more rows an entry, or with
    ``row_bytes`` 0 (the whole region belongs to every row), is a table and read before the first row.

    ``name`` is the stored tensor, for error messages only.
    """

    role: str  # "values", "codes", "scales"
    region: Region
    row_bytes: int
    rows: int = 1
    name: str = field(default="", compare=False)

    @property
    def table(self) -> bool:
        return self.row_bytes == 0 or self.rows > 1


@dataclass(frozen=True, slots=True)
class Description:
    """Regions, decoder and transformations of one input.

    Two descriptions that are equal but for the files behind their regions decode to the same values exactly when the
    bytes of the regions are the same.

    Attributes:
        shape: shape of the values after ``steps``.
        dtype: Safetensors name of the element type that reading values gives (``BF16``, ``F32``, ``I64``, …).
        decoder: name of a decoder in :data:`DECODER_VERSIONS`.
        parts: regions in consumption order.
        words: scalars and small facts found in the file that the values depend on, as bytes:
            ``(("weight_divisor", b"…"),)``.
        steps: transformations of the decoded values, in order, each a tuple of a name, the shape it starts from and
            plain values. A description with steps is materialised whole before it is read.
        encoding: format name of the encoded rows that the source offers, or None.
        stored_shape: shape that the parts hold, before ``steps``; leading axis = rows of the parts.
        positions: where a part has entries of several rows: the rows of the description, as ranges of the rows that
            the entries cover. Row ``r`` uses entry ``position(r) // rows``. Empty without such a part.
    """

    shape: tuple[int, ...]
    dtype: str
    decoder: str
    parts: tuple[Part, ...]
    words: tuple[tuple[str, bytes], ...] = ()
    steps: tuple[tuple[Any, ...], ...] = ()
    encoding: str | None = None
    stored_shape: tuple[int, ...] = ()
    positions: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        if not self.stored_shape and not self.steps:
            object.__setattr__(self, "stored_shape", self.shape)
        if not self.positions and self.stored_shape:
            for part in self.parts:
                if part.rows > 1:
                    object.__setattr__(self, "positions", ((0, self.stored_shape[0]),))

    def word(self, name: str) -> bytes | None:
        """The scalar ``name`` found in the file, or None."""
        return next((data for key, data in self.words if key == name), None)

    def select_rows(self, ranges: Sequence[Range]) -> Description:
        """The description of leading-axis row ranges, in order; repeats are allowed.

        Raises:
            ValueError: the description has no axis, or a range lies outside.
        """
        if not self.shape:
            raise ValueError("a scalar has no rows to select")
        height = self.shape[0]
        for begin, end in ranges:
            if not 0 <= begin <= end <= height:
                raise ValueError(f"selected rows [{begin}, {end}) lie outside {height} rows")
        ranges = coalesce(ranges)
        shape = (sum(end - begin for begin, end in ranges), *self.shape[1:])
        if self.steps:
            return replace(self, shape=shape, steps=(*self.steps, ("rows", self.shape, ranges)))
        positions: tuple[Range, ...] = ()
        parts = []
        for part in self.parts:
            if not part.table:
                wanted = [(begin * part.row_bytes, end * part.row_bytes) for begin, end in ranges]
                part = Part(part.role, part.region.select(wanted), part.row_bytes, name=part.name)
            elif part.rows > 1:
                part, positions = _select_entries(part, self.positions, ranges)
            parts.append(part)
        return Description(  # many thousands of these are made, and `replace` takes several times as long
            shape, self.dtype, self.decoder, tuple(parts), self.words, (), self.encoding, shape, positions
        )

    def transpose(self, axes: tuple[int, ...], shape: tuple[int, ...]) -> Description:
        """The whole source with its axes permuted and then reshaped to ``shape``.

        Raises:
            ValueError: ``shape`` has another number of elements.
        """
        if prod(shape) != self.elements:
            raise ValueError(f"a transposed source of shape {self.shape} cannot have the shape {shape}")
        return replace(self, shape=shape, encoding=None, steps=(*self.steps, ("transpose", self.shape, axes)))

    def flat_view(self, begin: int, shape: tuple[int, ...]) -> Description:
        """``prod(shape)`` stored words from flat element ``begin``, seen as ``shape``.

        Raises:
            ValueError: the elements lie outside, or the values are not plain stored words.
        """
        end = begin + prod(shape)
        if self.decoder != "plain" or self.steps:
            raise ValueError("a flat view requires plain stored values")
        if not 0 <= begin <= end <= self.elements:
            raise ValueError(f"elements [{begin}, {end}) lie outside {self.elements} stored elements")
        word = WORD_BYTES[self.dtype]
        (whole,) = self.parts
        part = Part(
            whole.role, whole.region.select(((begin * word, end * word),)), prod(shape[1:]) * word, 1, whole.name
        )
        return Description(shape, self.dtype, "plain", (part,), self.words, (), None, shape)  # as in `select_rows`

    @property
    def elements(self) -> int:
        return prod(self.shape)


def _select_entries(
    part: Part, positions: tuple[Range, ...], ranges: Sequence[Range]
) -> tuple[Part, tuple[Range, ...]]:
    """Only the entries that the rows ``ranges`` use, and the positions of the rows among those.

    The result depends on where rows lie within an entry, not on where the entries lie in the table.
    """
    current = Concatenation(positions)
    entries: list[Range] = []
    selected: list[Range] = []
    count = 0  # entries so far
    newest = -1  # the entry of the table that came last
    for wanted in ranges:
        for _, begin, end in current.pieces(*wanted):
            first, last = begin // part.rows, (end - 1) // part.rows + 1
            start = count - 1 if first == newest else count
            entries.append((first + 1 if first == newest else first, last))
            count = start + last - first
            newest = last - 1
            base = start * part.rows + begin % part.rows
            selected.append((base, base + end - begin))
    region = part.region.select([(begin * part.row_bytes, end * part.row_bytes) for begin, end in coalesce(entries)])
    return replace(part, region=region), coalesce(selected)


DECODER_VERSIONS = {
    "plain": 1,  # stored words are the values
    "nvfp4": 1,  # E2M1 codes, E4M3FN scales, one FP32 divisor
    "fp8_row": 1,  # E4M3FN codes, one scale a row
    "fp8_block": 1,  # E4M3FN codes, one scale a 128 × 128 block
}
"""Decoder → version. A version is part of every key; it changes when the decoded bits change."""
