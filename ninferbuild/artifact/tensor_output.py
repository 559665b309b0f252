"""Writing one tensor object in blocks: what a method's ``produce`` receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from ninferbuild.artifact.codecs import row_encoder
from ninferbuild.artifact.formats import DirectFormat, Nvfp4Format, get_format
from ninferbuild.artifact.layouts import SCALE_TILE_ROWS, planes
from ninferbuild.artifact.objects import ArtifactObject, TensorObject
from ninferbuild.artifact.primitives import ArtifactError

if TYPE_CHECKING:
    import torch


class RegionWriter(Protocol):
    """What an output writes to: an ``ArtifactWriter`` or anything that stores regions of objects."""

    @property
    def by_id(self) -> Mapping[str, ArtifactObject]: ...

    def write_region(self, object_id: str, offset: int, data: bytes | bytearray | memoryview, /) -> None: ...

    def write_zeros(self, object_id: str, offset: int, length: int, /) -> None: ...


class TensorOutput:
    """One tensor object, written in blocks of rows (or of elements) in any order.

    Whatever the blocks, the object's bytes are the same. The zeros between its planes are written once, with the first
    block.

    Attributes:
        object: the planned tensor (id, shape, format, layout, offset, bytes, divisors).
        format: its format's record.
        writer: where regions go.

    Raises:
        ArtifactError: no tensor of that id.
        ValueError: the object cannot be encoded.
    """

    def __init__(self, writer: RegionWriter, object_id: str):
        item = writer.by_id.get(object_id)
        if not isinstance(item, TensorObject):
            raise ArtifactError(f"no tensor object {object_id!r} to write")
        self.writer = writer
        self.object = item
        self.format = get_format(item.format)
        self._planes = planes(item.layout, item.format, item.shape, item.divisors)
        self._padded = False
        self._divisors: dict[int, bytes] = {}

    def write_values(self, element_begin: int, values: Any) -> None:
        """Write elements of a direct format, flattened in C order, from element ``element_begin`` on.

        Args:
            values: a bfloat16, float32 or int32 tensor (or such a numpy array), exactly as the format says.

        Raises:
            TypeError: the object is not direct, or another element type.
            ValueError: elements outside the object, or written before.
        """
        import torch

        from ninferbuild.artifact.codecs import direct

        if not isinstance(self.format, DirectFormat):
            raise TypeError(f"{self.object.id}: {self.format.name} holds codes and scales; use write_codes")
        tensor = torch.as_tensor(values)
        direct.require_dtype(tensor, self.format)
        self.write_planes(element_begin, (direct.pack(tensor),))

    def write_codes(
        self,
        row_begin: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        weight_divisor: bytes | bytearray | memoryview | None = None,
    ) -> None:
        """Check and write complete rows of an encoded format.

        Args:
            row_begin: the first row. ``nvfp4``: a multiple of 128, as is the number of rows.
            codes, scales: grouped: int8 ``[r, R, G]`` and float16 ``[r, R]``; FP8: uint8 ``[r, K]`` and bfloat16
                ``[r]``; ``nvfp4``: uint8 ``[r, K / 2]`` and natural uint8 ``[r, K / 16]``; ``gguf_*``: uint8
                ``[r, row bytes]``, scales are ignored.
            weight_divisor: ``nvfp4`` only: four little-endian bytes, the same for all blocks of a stacked matrix.

        Raises:
            TypeError: the object is direct, or another element type or shape.
            ValueError: rows outside the object or written before, illegal words, or a divisor that is missing,
                illegal or not the one given before.
        """
        encode = row_encoder(self.format)
        rows, columns = self.object.shape
        count = len(codes)
        if not 0 <= row_begin < rows or count < 1:
            raise ValueError(f"{self.object.id}: invalid encoded row origin {row_begin}, {count} rows of {rows}")
        if row_begin + count > rows:
            raise ValueError(f"{self.object.id}: rows [{row_begin}, {row_begin + count}) exceed parent of {rows} rows")
        if isinstance(self.format, Nvfp4Format):
            index, word = self._stacked_matrix(row_begin, count, weight_divisor)
            pieces = encode(codes, scales, self.format, columns)
            if index not in self._divisors:
                self._divisors[index] = word
                self.writer.write_region(self.object.id, self._planes[-1].offset + 4 * index, word)
        else:
            pieces = encode(codes, scales, self.format, columns)
        self.write_planes(row_begin, pieces)

    def write_planes(self, first_row: int, pieces: Sequence[torch.Tensor]) -> None:
        """Write the final bytes that rows append to each plane. Words are not checked.

        Args:
            first_row: the first row (direct formats: the first element).
            pieces: a 1-D uint8 tensor on any device for each plane. ``nvfp4``: a third one, for the divisor plane,
                holds the words of the stacked matrices that begin in these rows; it may be empty or left out.

        Raises:
            ValueError: another number of planes, pieces of unequal rows, or bytes outside the object or written
                before.
        """
        stacked = isinstance(self.format, Nvfp4Format)
        data = self._planes[:2] if stacked else self._planes
        if not len(data) <= len(pieces) <= len(self._planes):
            raise ValueError(f"{self.object.id}: {len(pieces)} plane pieces for {len(self._planes)} planes")
        units = self._units()
        pitches = [plane.bytes // units for plane in data]
        counts = {divmod(piece.numel(), pitch) for piece, pitch in zip(pieces, pitches, strict=False)}
        count, rest = counts.pop()
        if counts or rest:
            raise ValueError(f"{self.object.id}: the plane pieces do not hold the same whole rows")
        if first_row < 0 or first_row + count > units:
            raise ValueError(f"{self.object.id}: rows [{first_row}, {first_row + count}) exceed parent of {units} rows")
        if stacked and (first_row % SCALE_TILE_ROWS or count % SCALE_TILE_ROWS):
            raise ValueError(f"{self.object.id}: NVFP4 output needs whole 128-row tiles, not {count} at {first_row}")
        self._write_padding()
        for plane, pitch, piece in zip(data, pitches, pieces, strict=False):
            self._write_tensor(plane.offset + first_row * pitch, piece)
        if len(pieces) > len(data):
            share = units // self.object.divisors
            self._write_tensor(self._planes[-1].offset + 4 * -(-first_row // share), pieces[-1])

    def write_bytes(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write raw bytes at ``offset`` of the object. Raises as the writer does."""
        self.writer.write_region(self.object.id, offset, data)

    def _units(self) -> int:
        """Rows of the object, or elements of a direct one: what planes are divided into."""
        if isinstance(self.format, DirectFormat):
            return self._planes[0].bytes // self.format.word_bytes
        return self.object.shape[0]

    def _write_tensor(self, offset: int, piece: torch.Tensor) -> None:
        from ninferbuild.artifact.codecs.buffers import host_memory

        if piece.numel():
            self.writer.write_region(self.object.id, offset, host_memory(piece))

    def _write_padding(self) -> None:
        if self._padded:
            return
        self._padded = True
        for plane, following in pairwise(self._planes):
            end = plane.offset + plane.bytes
            if end < following.offset:
                self.writer.write_zeros(self.object.id, end, following.offset - end)

    def _stacked_matrix(
        self, row_begin: int, count: int, weight_divisor: bytes | bytearray | memoryview | None
    ) -> tuple[int, bytes]:
        """Index and divisor word of the stacked matrix that the rows belong to."""
        from ninferbuild.artifact.codecs.nvfp4 import check_divisor

        if weight_divisor is None or row_begin % SCALE_TILE_ROWS or count % SCALE_TILE_ROWS:
            raise ValueError(f"{self.object.id}: NVFP4 output needs whole 128-row tiles and weight divisor")
        share = self.object.shape[0] // self.object.divisors
        index = row_begin // share
        if row_begin + count > (index + 1) * share:
            raise ValueError(f"{self.object.id}: a row block may not span two separately quantised sources")
        word = check_divisor(bytes(weight_divisor))
        if self._divisors.get(index, word) != word:
            raise ValueError(f"{self.object.id}: weight divisor changed between row blocks")
        return index, word
