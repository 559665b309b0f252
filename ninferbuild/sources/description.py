"""What a source is made of, said without torch and without reading it.

A :class:`Description` is what planning and the action keys see of an input; :mod:`ninferbuild.sources.decoding` turns
the same description and its bytes into tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
import struct

import msgspec
from msgspec.structs import force_setattr, replace

from ninferbuild.artifact.formats import GGUF_FORMATS
from ninferbuild.sources.dtypes import WORD_BYTES
from ninferbuild.sources.ranges import Concatenation, Range, coalesce
from ninferbuild.sources.regions import Region
from ninferbuild.sources.steps import Step, are_elementwise, for_rows, for_shape, gathered, is_row_local


class Part(msgspec.Struct, frozen=True, eq=False):
    """One region of a source and how the rows of the source lie in it.

    The region is a sequence of entries of ``row_bytes`` bytes. An entry serves ``rows`` consecutive rows along the
    leading axis; with 1, the rule, the entries are read along with the rows. A part with more rows an entry, or with
    ``row_bytes`` 0 (the whole region belongs to every row), is a table and read before the first row.

    ``name`` is the stored tensor, for error messages only; parts are equal whatever it is.
    """

    role: str  # "values", "codes", "scales"
    region: Region
    row_bytes: int
    rows: int = 1
    name: str = ""

    def _compared(self) -> tuple[str, Region, int, int]:
        return self.role, self.region, self.row_bytes, self.rows

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, Part) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared())

    @property
    def table(self) -> bool:
        return self.row_bytes == 0 or self.rows > 1


class Description(msgspec.Struct, frozen=True):
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
        steps: transformations of the decoded values, in order; see :mod:`ninferbuild.sources.steps`. Values stream
            through steps that are local to rows; a description with any other is materialised whole before it is read.
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
    steps: tuple[Step, ...] = ()
    encoding: str | None = None
    stored_shape: tuple[int, ...] = ()
    positions: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        if not self.stored_shape and not self.steps:
            force_setattr(self, "stored_shape", self.shape)
        if not self.positions and self.stored_shape:
            for part in self.parts:
                if part.rows > 1:
                    force_setattr(self, "positions", ((0, self.stored_shape[0]),))

    @property
    def stored_dtype(self) -> str:
        """The element type that the decoder gives, before ``steps``."""
        return next((step[2] for step in self.steps if step[0] == "float32"), self.dtype)

    @property
    def stored(self) -> Description:
        """The description without its steps."""
        return replace(self, shape=self.stored_shape, dtype=self.stored_dtype, steps=())

    @property
    def row_local(self) -> bool:
        """Whether each row of the values needs only the same row of the parts."""
        return all(is_row_local(step) for step in self.steps)

    @property
    def is_one_region(self) -> bool:
        """Whether all that makes the values is one region and its type, shape and decoder."""
        return len(self.parts) == 1 and not self.steps and not self.positions and not self.words

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
            return self._select_through_steps(ranges, shape)
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

    def _select_through_steps(self, ranges: tuple[Range, ...], shape: tuple[int, ...]) -> Description:
        """Rows are selected before steps that are local to rows: then only those rows are read at all."""
        if not self.row_local:
            return replace(self, shape=shape, steps=(*self.steps, ("rows", self.shape, ranges)))
        stored = self.stored.select_rows(ranges)
        return replace(stored, shape=shape, dtype=self.dtype, steps=for_rows(self.steps, shape[0]))

    def transpose(self, axes: tuple[int, ...], shape: tuple[int, ...]) -> Description:
        """The whole source with its axes permuted and then reshaped to ``shape``.

        Raises:
            ValueError: ``shape`` has another number of elements.
        """
        if prod(shape) != self.elements:
            raise ValueError(f"a transposed source of shape {self.shape} cannot have the shape {shape}")
        return replace(self, shape=shape, encoding=None, steps=(*self.steps, ("transpose", self.shape, axes)))

    def reshape(self, shape: tuple[int, ...]) -> Description:
        """The same values in C order, seen as ``shape``.

        Raises:
            ValueError: ``shape`` has another number of elements.
        """
        if shape == self.shape:
            return self
        if prod(shape) != self.elements:
            raise ValueError(f"a source of shape {self.shape} cannot have the shape {shape}")
        if self.decoder == "plain" and are_elementwise(self.steps):  # stored words can be seen as any shape
            view = self.stored.flat_view(0, shape)
            return replace(view, dtype=self.dtype, steps=for_shape(self.steps, shape))
        return replace(self, shape=shape, encoding=None, steps=(*self.steps, ("reshape", self.shape, shape)))

    def gather(self, axis: int, ranges: Sequence[Range]) -> Description:
        """The positions ``ranges`` of one axis, in order; repeats are allowed.

        Raises:
            ValueError: there is no such axis, or a range lies outside.
        """
        if not 0 <= axis < len(self.shape):
            raise ValueError(f"axis {axis} is none of the {len(self.shape)} axes of a source")
        if axis == 0:
            return self.select_rows(ranges)
        ranges = coalesce(ranges)
        extent = gathered(self.shape[axis], ranges)
        if ranges == ((0, self.shape[axis]),):
            return self
        shape = (*self.shape[:axis], extent, *self.shape[axis + 1 :])
        return replace(self, shape=shape, encoding=None, steps=(*self.steps, ("gather", self.shape, axis, ranges)))

    def to_float32(self) -> Description:
        """The values widened to FP32.

        Raises:
            ValueError: FP32 does not hold every value of the element type.
        """
        if self.dtype == "F32":
            return self
        if self.dtype not in ("BF16", "F16"):
            raise ValueError(f"values of type {self.dtype} cannot be widened to FP32")
        return replace(self, dtype="F32", encoding=None, steps=(*self.steps, ("float32", self.shape, self.dtype)))

    def add(self, constant: float) -> Description:
        """``x + constant``, rounded to FP32.

        Raises:
            ValueError: the values are not FP32, or ``constant`` is no FP32 number.
        """
        try:
            exact = struct.unpack("<f", struct.pack("<f", constant))[0] == constant
        except OverflowError:
            exact = False
        if not exact:
            raise ValueError(f"the constant {constant} is no FP32 number")
        return self._in_float32("add", float(constant))

    def log_negative(self) -> Description:
        """``float32(log(-float64(x)))`` of negative values; reading others raises ``ValueError``.

        Raises:
            ValueError: the values are not FP32.
        """
        return self._in_float32("log_negative")

    def _in_float32(self, step: str, *arguments: float) -> Description:
        if self.dtype != "F32":
            raise ValueError(f"step {step} requires FP32 values, not {self.dtype}")
        return replace(self, encoding=None, steps=(*self.steps, (step, self.shape, *arguments)))

    @staticmethod
    def stack(descriptions: Sequence[Description], axis: int) -> Description:
        """Sources of one shape, one after another along a new axis ``axis``.

        Raises:
            ValueError: there are none, they cannot be read as one (see :meth:`stacks_with`), or there is no such axis.
        """
        first, *others = descriptions
        if not all(first.stacks_with(other) for other in others):
            raise ValueError("stacked sources must have one shape, one stored type and the same steps")
        if not 0 <= axis <= len(first.shape):
            raise ValueError(f"a stack of sources of shape {first.shape} has no axis {axis}")
        shape = (len(descriptions) * first.shape[0], *first.shape[1:])
        spans = [span for item in descriptions for span in item.parts[0].region.spans]
        part = replace(first.parts[0], region=Region.of(spans))
        joined = Description(shape, first.stored_dtype, first.decoder, (part,), first.words)
        joined = replace(joined, dtype=first.dtype, steps=for_shape(first.steps, shape))
        joined = joined.reshape((len(descriptions), *first.shape))
        axes = (*range(1, axis + 1), 0, *range(axis + 1, len(joined.shape)))
        return joined.transpose(axes, tuple(joined.shape[index] for index in axes)) if axis else joined

    def stacks_with(self, other: Description) -> bool:
        """Whether both can be read as one sequence of rows."""
        forms = [(item.shape, item.dtype, item.decoder, item.words, item.steps) for item in (self, other)]
        whole = all(len(item.parts) == 1 and not item.parts[0].table and item.shape for item in (self, other))
        return whole and forms[0] == forms[1] and are_elementwise(self.steps)

    def flat_view(self, begin: int, shape: tuple[int, ...]) -> Description:
        """``prod(shape)`` values from flat element ``begin``, seen as ``shape``.

        Raises:
            ValueError: the elements lie outside, or values that are not plain stored words are cut within a row of
                ``shape``.
        """
        return self.flat_views(shape)(begin)

    def flat_views(self, shape: tuple[int, ...]) -> Callable[[int], Description]:
        """:meth:`flat_view` for one shape and very many first elements: what they have in common is computed once."""
        size, elements, words = prod(shape), self.elements, self.words
        plain = self.decoder == "plain" and not self.steps
        word = WORD_BYTES[self.dtype] if plain else 0
        role, name, row_bytes, dtype = self.parts[0].role, self.parts[0].name, prod(shape[1:]) * word, self.dtype

        def view(begin: int) -> Description:
            end = begin + size
            if not 0 <= begin <= end <= elements:
                raise ValueError(f"elements [{begin}, {end}) lie outside {elements} stored elements")
            if not plain:
                return self._rows_view(begin, end, shape)
            region = self.parts[0].region.select(((begin * word, end * word),))
            part = Part(role, region, row_bytes, 1, name)
            return Description(shape, dtype, "plain", (part,), words, (), None, shape)  # as in `select_rows`

        return view

    def _rows_view(self, begin: int, end: int, shape: tuple[int, ...]) -> Description:
        if (begin, end) == (0, self.elements):
            return self.reshape(shape)
        columns = prod(shape[1:])
        if not columns or begin % columns or self.elements % columns:
            raise ValueError("a flat view of values that are not plain stored words requires whole rows")
        rows = self.reshape((self.elements // columns, columns))
        return rows.select_rows(((begin // columns, end // columns),)).reshape(shape)

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
    "pq2_0": 1,  # ternary GGUF blocks: two bits a code
    "ptq1_0": 1,  # ternary GGUF blocks: five codes a byte
    **dict.fromkeys(GGUF_FORMATS, 1),  # ggml blocks, named like the format that keeps them
}
"""Decoder → version. A version is part of every key; it changes when the decoded bits change."""
