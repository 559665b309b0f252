"""From descriptions and bytes to tensors.

Streams read forwards: each byte of each part is read once, block by block, and shown to an observer before it is
decoded. Results lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Protocol

import torch

from ninferbuild.sources.decoders import DECODERS, Decoder, PackingDecoder
from ninferbuild.sources.description import Description
from ninferbuild.sources.dtypes import torch_dtype
from ninferbuild.sources.encoded import EncodedRows
from ninferbuild.sources.regions import RegionReader
from ninferbuild.sources.steps import are_elementwise, for_rows
from ninferbuild.sources.transforms import apply_steps

__all__ = ["DECODERS", "EncodedStream", "ValueStream", "open_encoded", "open_values", "read_encoded", "read_values"]

PartObserver = Callable[[int, memoryview], None]
"""Called with the index of a part and each buffer read from it, in the order of the part's region."""


class ValueStream(Protocol):
    """The values of one source from the first element to the last."""

    dtype: torch.dtype

    def read(self, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The next ``count`` elements in C order, 1-D.

        Args:
            out: contiguous 1-D CPU tensor of ``count`` elements of :attr:`dtype` to fill and return.

        Raises:
            ValueError: fewer elements are left, or the stored bytes are damaged.
        """


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _PartReaders:
    """Sequential readers of the parts of a description: tables at once, the others row by row."""

    def __init__(self, description: Description, observe: PartObserver | None):
        self._rows = description.stored_shape[0] if description.stored_shape else 1
        self._row = 0
        self._row_bytes = [0 if part.table else part.row_bytes for part in description.parts]
        self._readers = [
            RegionReader(part.region, None if observe is None else partial(observe, index))
            for index, part in enumerate(description.parts)
        ]
        self._tables = {
            index: self._fill(index, part.region.length) for index, part in enumerate(description.parts) if part.table
        }

    def _fill(self, index: int, length: int) -> torch.Tensor:
        data = torch.empty(length, dtype=torch.uint8)
        if length:
            self._readers[index].read_into(buffer_of(data))
        return data

    def read(self, rows: int) -> list[torch.Tensor]:
        """For each part uint8 ``[rows, row bytes]``, or the whole table 1-D."""
        if not 0 <= rows <= self._rows - self._row:
            raise ValueError(f"{rows} rows from row {self._row} exceed a source of {self._rows} rows")
        self._row += rows
        return [
            self._tables[index] if index in self._tables else self._fill(index, rows * width).reshape(rows, width)
            for index, width in enumerate(self._row_bytes)
        ]


class _PlainValues:
    """Stored words are the values: bytes go from the file into the tensor."""

    def __init__(self, description: Description, observe: PartObserver | None):
        (part,) = description.parts
        self.dtype = torch_dtype(description.dtype)
        self._left = description.elements
        self._reader = RegionReader(part.region, None if observe is None else partial(observe, 0))

    def read(self, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        _require_left(count, self._left)
        self._left -= count
        values = torch.empty(count, dtype=self.dtype) if out is None else out
        if count:
            self._reader.read_into(buffer_of(values))
        return values


class _RowValues:
    """Rows are made in blocks; what a caller leaves of a row waits for the next read."""

    def __init__(self, description: Description):
        self.dtype = torch_dtype(description.dtype)
        self._columns = max(1, prod(description.shape[1:]))
        self._left = description.elements
        self._rest = torch.empty(0, dtype=self.dtype)

    def _make(self, rows: int, out: torch.Tensor) -> None:
        """Write the next ``rows`` rows to ``out``, 1-D."""
        raise NotImplementedError

    def read(self, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        _require_left(count, self._left)
        self._left -= count
        values = torch.empty(count, dtype=self.dtype) if out is None else out
        done = min(count, self._rest.numel())
        values[:done] = self._rest[:done]
        self._rest = self._rest[done:]
        whole = (count - done) // self._columns
        if whole:
            self._make(whole, values[done : done + whole * self._columns])
            done += whole * self._columns
        if done < count:
            row = torch.empty(self._columns, dtype=self.dtype)
            self._make(1, row)
            values[done:] = row[: count - done]
            self._rest = row[count - done :]
        return values


class _DecodedValues(_RowValues):
    """Stored rows through their decoder."""

    def __init__(self, description: Description, observe: PartObserver | None):
        super().__init__(description)
        self._decoder: Decoder = DECODERS[description.decoder](description)
        self._parts = _PartReaders(description, observe)

    def _make(self, rows: int, out: torch.Tensor) -> None:
        self._decoder.decode(self._parts.read(rows), out.view(rows, self._columns))


class _SteppedRows(_RowValues):
    """A source whose steps are all local to rows: blocks of rows go through them one after another."""

    def __init__(self, description: Description, observe: PartObserver | None):
        super().__init__(description)
        self._steps = description.steps
        self._name = description.parts[0].name
        self._stored = open_values(description.stored, observe)
        self._stored_columns = prod(description.stored_shape[1:])

    def _make(self, rows: int, out: torch.Tensor) -> None:
        values = self._stored.read(rows * self._stored_columns)
        out.copy_(apply_steps(values, for_rows(self._steps, rows), self._name))


class _TransformedValues:
    """A source with a step that needs it whole: all is read at the first use, transformed, and served from memory."""

    def __init__(self, description: Description, observe: PartObserver | None):
        self.dtype = torch_dtype(description.dtype)
        self._description = description
        self._observe = observe
        self._values: torch.Tensor | None = None
        self._position = 0

    def read(self, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        _require_left(count, self._description.elements - self._position)
        if self._values is None:
            self._values = _materialise(self._description, self._observe)
        values = self._values[self._position : self._position + count]
        self._position += count
        return values if out is None else out.copy_(values)


def _materialise(description: Description, observe: PartObserver | None) -> torch.Tensor:
    stored = description.stored
    values = open_values(stored, observe).read(stored.elements)
    return apply_steps(values, description.steps, description.parts[0].name)


def _require_left(count: int, left: int) -> None:
    if not 0 <= count <= left:
        raise ValueError(f"read of {count} elements where {left} are left")


class EncodedStream:
    """The encoded rows of one source from the first to the last.

    Args:
        packed: give packed codes where the decoder can.
    """

    def __init__(self, description: Description, observe: PartObserver | None = None, *, packed: bool = False):
        if description.encoding is None or description.steps:
            raise ValueError("the source does not provide encoded rows")
        decoder: Decoder = DECODERS[description.decoder](description)
        self._rows = decoder.packed if packed and isinstance(decoder, PackingDecoder) else decoder.encoded
        self._parts = _PartReaders(description, observe)

    def read(self, rows: int) -> EncodedRows:
        """The next ``rows`` rows.

        Raises:
            ValueError: fewer are left, or words are invalid in the format.
        """
        return self._rows(self._parts.read(rows))


def open_values(description: Description, observe: PartObserver | None = None) -> ValueStream:
    """The decoded values of ``description``, to be read forwards."""
    if description.steps:
        return (_SteppedRows if description.row_local else _TransformedValues)(description, observe)
    if description.decoder == "plain":
        return _PlainValues(description, observe)
    return _DecodedValues(description, observe)


def open_encoded(
    description: Description, observe: PartObserver | None = None, *, packed: bool = False
) -> EncodedStream:
    """The encoded rows of ``description``, to be read forwards. ``ValueError`` when it offers none.

    Args:
        packed: give codes in the bit order of the target layout where that is less work.
    """
    return EncodedStream(description, observe, packed=packed)


def read_values(description: Description, begin: int, end: int) -> torch.Tensor:
    """Elements ``[begin, end)`` of the values, 1-D. A source that steps need whole is materialised for each call."""
    if begin == end:
        return torch.empty(0, dtype=torch_dtype(description.dtype))
    if not description.row_local:
        return _materialise(description, None)[begin:end]
    if description.decoder == "plain" and are_elementwise(description.steps):
        return open_values(description.flat_view(begin, (end - begin,))).read(end - begin)
    columns = prod(description.shape[1:])
    first, last = begin // columns, -(-end // columns)
    rows = description.select_rows([(first, last)])
    return open_values(rows).read(rows.elements)[begin - first * columns : end - first * columns]


def read_encoded(description: Description, begin: int, end: int) -> EncodedRows:
    """Encoded rows ``[begin, end)``."""
    return open_encoded(description.select_rows([(begin, end)])).read(end - begin)
