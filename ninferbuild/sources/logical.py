"""Logical sources: what parameters are read from, and the constructors that derive one from another.

A source is *described* when everything about it can be said without reading it (:attr:`LogicalSource.description`);
stored tensors, arrays, and what the constructors here make of them are. A source with a reader of its own is *opaque*:
its values are known only by reading them. Nothing here reads or imports torch before values are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from operator import index
from pathlib import Path
import sys
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr, replace

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.dtypes import NAMES_OF_NUMPY, NAMES_OF_TORCH, WORD_BYTES
from ninferbuild.sources.encoded import EncodedRows, concatenate_encoded
from ninferbuild.sources.files import MemoryFile
from ninferbuild.sources.ranges import Concatenation, Range, coalesce
from ninferbuild.sources.regions import Region, Span
from ninferbuild.sources.stored import StoredReader
from ninferbuild.struct_fields import with_dataclass_fields

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "EncodedRows",
    "LogicalSource",
    "StoredReader",
    "array_source",
    "concatenate_encoded",
    "gather_source",
    "leading_rows",
    "select_rows",
    "transpose_source",
]


_UNKNOWN = object()


class _Declared(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The fields of a source that are given by name."""

    files: tuple[Path | str, ...] | None = None
    fingerprint: str | bytes | None = None
    _described: Any = _UNKNOWN  # what `description` found, of this source alone: no part of its value


@with_dataclass_fields
class LogicalSource(_Declared, frozen=True, eq=False):
    """A tensor that can be read in pieces.

    Attributes:
        shape: logical shape.
        label: how the conversion report names it.
        read_values: ``(begin, end)`` flat element bounds in C order → tensor of ``end - begin`` elements.
        read_encoded: ``(begin, end)`` row bounds → :class:`EncodedRows`, or None.
        weight_divisor: → 4 little-endian bytes of an FP32 word, or None.
        input_divisor: the same for activations.
        files: for a custom reader: files whose content stands for the values when keys are made.
        fingerprint: for a custom reader: text or bytes that stand for the values when keys are made.
    """

    shape: tuple[int, ...]
    label: str
    read_values: Callable[[int, int], torch.Tensor]
    read_encoded: Callable[[int, int], EncodedRows] | None = None
    weight_divisor: Callable[[], bytes] | None = None
    input_divisor: Callable[[], bytes] | None = None

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple:
            force_setattr(self, "shape", tuple(self.shape))
        if self._described is not _UNKNOWN:  # `replace` took it along, perhaps to another reader
            force_setattr(self, "_described", _UNKNOWN)

    def _value(self) -> tuple[Any, ...]:
        readers = (self.read_values, self.read_encoded, self.weight_divisor, self.input_divisor)
        return (self.shape, self.label, *readers, self.files, self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return self._value() == other._value() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value())

    def __repr__(self) -> str:
        names = (name for name in self.__struct_fields__ if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def description(self) -> Description | None:
        """What the source is made of, or None for an opaque one.

        Raises:
            ValueError: a described source's stored tensors are missing, mis-shaped or damaged.
        """
        known = self._described
        if known is _UNKNOWN:  # asked for several times by every stage, of very many sources
            known = self._describe()
            force_setattr(self, "_described", known)
        return known  # type: ignore[no-any-return]

    def _describe(self) -> Description | None:
        reader = stored_reader(self)
        if reader is None:
            return None
        description = reader.describe()
        if self.read_encoded is None and description.encoding is not None:
            return replace(description, encoding=None)
        return description

    @property
    def derivation(self) -> tuple[LogicalSource, tuple[tuple[Any, ...], ...]]:
        """The source that an opaque source was derived from by the constructors of this module, and their steps.

        A source that was not derived is its own origin, with no steps. The steps have the form of
        :attr:`Description.steps`.
        """
        reader = getattr(self.read_values, "__self__", None)
        if isinstance(reader, _Derived) and self.read_values == reader.read_values and reader.shape == self.shape:
            origin, steps = reader.source.derivation
            return origin, (*steps, reader.step)
        return self, ()

    def values(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements ``[begin, end)`` in C order, 1-D, in the type that the reader gives.

        Raises:
            ValueError: the range lies outside, or the reader returned another number of elements.
            TypeError: the reader did not return a tensor.
        """
        size = prod(self.shape)
        end = size if end is None else end
        if not 0 <= begin <= end <= size:
            raise ValueError(f"{self.label}: invalid logical range [{begin}, {end}) of {size} elements")
        values = self.read_values(begin, end)
        if not hasattr(values, "numel"):
            raise TypeError(f"{self.label}: read_values must return a torch.Tensor, not {type(values).__name__}")
        if values.numel() != end - begin:
            raise ValueError(f"{self.label}: source returned {values.numel()} elements for [{begin}, {end})")
        return values.reshape(-1)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows ``[begin, end)`` of a matrix, ``[end - begin, K]``.

        Raises:
            ValueError: the source is not a matrix, or as :meth:`values`.
        """
        if len(self.shape) != 2:
            raise ValueError(f"{self.label}: reading rows requires a matrix, not shape {self.shape}")
        columns = self.shape[1]
        return self.values(begin * columns, end * columns).reshape(end - begin, columns)


def stored_reader(source: LogicalSource) -> StoredReader | None:
    """The reader behind a described source, or None for an opaque one.

    A source is described only while *both* its reading functions are those of one reader and it has the reader's
    shape, so that a source whose reader was replaced is opaque without further care.
    """
    reader = getattr(source.read_values, "__self__", None)
    if type(reader) is not StoredReader or source.read_values != reader.read_values:
        return None
    if source.read_encoded is not None and source.read_encoded != reader.read_encoded:
        return None
    return reader if reader.has_shape(source.shape) else None


def array_source(values: torch.Tensor | np.ndarray[Any, Any], label: str) -> LogicalSource:
    """A snapshot of a torch tensor or numpy array; later changes of ``values`` are not seen.

    Raises:
        TypeError: ``values`` is something else, or has an element type without a name in Safetensors.
    """
    shape = tuple(int(extent) for extent in values.shape) if hasattr(values, "shape") else ()
    dtype, data = _snapshot(values, label)
    columns = prod(shape[1:])
    region = Region.of([Span(MemoryFile(data, label), 0, len(data))])
    description = Description(
        shape=shape,
        dtype=dtype,
        decoder="plain",
        parts=(Part("values", region, columns * WORD_BYTES[dtype], name=label),),
    )
    reader = StoredReader(lambda: description, shape=shape, name=label)
    return LogicalSource(shape, label, reader.read_values)


def _snapshot(values: object, label: str) -> tuple[str, bytes]:
    """Safetensors type name and little-endian bytes of an array, in C order."""
    import numpy as np

    if isinstance(values, np.ndarray):  # asked first: a recipe's deferred torch must not load for an array
        dtype = NAMES_OF_NUMPY.get(f"{values.dtype.kind}{values.dtype.itemsize}")
        if dtype is not None:
            return dtype, values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    elif "torch" in sys.modules and isinstance(values, sys.modules["torch"].Tensor):
        dtype = NAMES_OF_TORCH.get(str(values.dtype))
        if dtype is not None:
            words = values.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
            return dtype, words.numpy().tobytes()
    else:
        raise TypeError(f"{label}: array_source takes a torch.Tensor or numpy array, not {type(values).__name__}")
    raise TypeError(f"{label}: array_source cannot hold elements of type {values.dtype}")


class _Derived:
    """Reader of a source derived from an opaque one. ``step`` says how, in the form of ``Description.steps``."""

    def __init__(self, source: LogicalSource, shape: tuple[int, ...], step: tuple[Any, ...]):
        self.source = source
        self.shape = shape
        self.step = step

    def read_values(self, begin: int, end: int) -> torch.Tensor:
        raise NotImplementedError


class _Transposed(_Derived):
    def __init__(self, source: LogicalSource, axes: tuple[int, ...], shape: tuple[int, ...]):
        super().__init__(source, shape, ("transpose", source.shape, axes))
        self.axes = axes

    def read_values(self, begin: int, end: int) -> torch.Tensor:
        whole = self.source.values().reshape(self.source.shape)
        return whole.permute(self.axes).reshape(-1)[begin:end]


class _SelectedRows(_Derived):
    """Rows along the leading axis; the columns of a row are all its other elements."""

    def __init__(self, source: LogicalSource, ranges: Iterable[Range], shape: tuple[int, ...]):
        self.selected = Concatenation(coalesce(ranges))
        super().__init__(source, shape, ("rows", source.shape, self.selected.ranges))
        self.columns = prod(shape[1:])

    def read_values(self, begin: int, end: int) -> torch.Tensor:
        if begin == end:
            return self.source.values(0, 0)
        first = begin // self.columns
        last = -(-end // self.columns)
        start = first * self.columns
        pieces = []
        for _, top, bottom in self.selected.pieces(first, last):
            stop = start + (bottom - top) * self.columns
            base = top * self.columns - start  # source element of selected element 0 of this piece
            pieces.append(self.source.values(max(begin, start) + base, min(end, stop) + base))
            start = stop
        if len(pieces) == 1:
            return pieces[0]
        import torch

        return torch.cat(pieces)

    def read_encoded(self, begin: int, end: int) -> EncodedRows:
        assert self.source.read_encoded is not None
        if not 0 <= begin < end <= self.shape[0]:
            raise ValueError(f"{self.source.label}: invalid encoded rows [{begin}, {end}) of {self.shape[0]}")
        pieces = [self.source.read_encoded(top, bottom) for _, top, bottom in self.selected.pieces(begin, end)]
        return concatenate_encoded(pieces, f"{self.source.label}: incompatible encoded row groups")


def transpose_source(source: LogicalSource, axes: Sequence[int], shape: Sequence[int]) -> LogicalSource:
    """``source`` with its axes permuted, then seen as ``shape``. Values only.

    Raises:
        ValueError: ``axes`` is not a permutation of the source's axes.
    """
    axes, shape = tuple(axes), tuple(shape)
    if sorted(axes) != list(range(len(source.shape))):
        raise ValueError(f"{source.label}: axes {axes} do not permute the {len(source.shape)} axes of the source")
    label = f"transpose({source.label},{axes})"
    reader = stored_reader(source)
    if reader is None:
        return LogicalSource(shape, label, _Transposed(source, axes, shape).read_values)
    stored = reader
    derived = StoredReader(lambda: stored.describe().transpose(axes, shape), shape=shape, name=label)
    return LogicalSource(shape, label, derived.read_values)


def select_rows(source: LogicalSource, ranges: Sequence[Range]) -> LogicalSource:
    """The rows of ``ranges`` of a matrix in their order; repeats and any order are allowed.

    Values and, where ``source`` has them, encoded rows; the divisors are those of ``source``.

    Raises:
        ValueError: the source is not a matrix, ``ranges`` is empty, or a range is empty or outside.
    """
    ranges = tuple(ranges)
    if len(source.shape) != 2 or not ranges:
        raise ValueError(f"{source.label}: row selection requires a matrix and nonempty ranges")
    height = source.shape[0]
    total = 0
    for begin, end in ranges:
        if not 0 <= begin < end <= height:
            raise ValueError(f"{source.label}: invalid selected rows [{begin}, {end}) of {height}")
        total += end - begin
    label = f"rows({source.label}, {len(ranges)} spans, {total} rows)"
    return _rows_of(source, ranges, (total, source.shape[1]), label, encoded=True)


def gather_source(source: LogicalSource, indices: torch.Tensor | np.ndarray[Any, Any] | Sequence[int]) -> LogicalSource:
    """Single rows of a matrix in the order of ``indices`` (1-D integers).

    Raises:
        ValueError: the source is not a matrix, ``indices`` is empty or names a row outside.
        TypeError: an index is not an integer.
    """
    if len(source.shape) != 2:
        raise ValueError(f"{source.label}: the source of gathered rows must be a matrix, not shape {source.shape}")
    rows = [index(row) for row in (indices.tolist() if hasattr(indices, "tolist") else indices)]
    if not rows or min(rows) < 0 or max(rows) >= source.shape[0]:
        raise ValueError(f"{source.label}: row indices are empty or outside source rows 0..{source.shape[0] - 1}")
    return select_rows(source, tuple((row, row + 1) for row in rows))


def leading_rows(source: LogicalSource, begin: int, end: int) -> LogicalSource:
    """Rows ``[begin, end)`` along the leading axis: what a row selection of a parameter reads.

    All rows give ``source`` itself, a matrix :func:`select_rows`; other ranks a view of the values under the same
    label.

    Raises:
        ValueError: the source has no axis, or the range is empty or outside.
    """
    if not source.shape:
        raise ValueError(f"{source.label}: a scalar has no complete leading-axis rows")
    if (begin, end) == (0, source.shape[0]):
        return source
    if len(source.shape) == 2:
        return select_rows(source, ((begin, end),))
    if not 0 <= begin < end <= source.shape[0]:
        raise ValueError(f"{source.label}: invalid selected rows [{begin}, {end}) of {source.shape[0]}")
    return _rows_of(source, ((begin, end),), (end - begin, *source.shape[1:]), source.label, encoded=False)


def _rows_of(
    source: LogicalSource, ranges: tuple[Range, ...], shape: tuple[int, ...], label: str, *, encoded: bool
) -> LogicalSource:
    encoded = encoded and source.read_encoded is not None
    reader: StoredReader | _SelectedRows
    stored = stored_reader(source)
    if stored is None:
        reader = _SelectedRows(source, ranges, shape)
    else:
        reader = StoredReader(
            partial(_describe_rows, stored, ranges, encoded),
            shape=shape,
            name=stored.name,
            input_divisor_reader=stored.input_divisor_reader,
        )
    if not encoded:
        return LogicalSource(shape, label, reader.read_values)
    return LogicalSource(
        shape, label, reader.read_values, reader.read_encoded, source.weight_divisor, source.input_divisor
    )


def _describe_rows(reader: StoredReader, ranges: tuple[Range, ...], encoded: bool) -> Description:
    description = reader.describe().select_rows(ranges)
    return description if encoded or description.encoding is None else replace(description, encoding=None)
