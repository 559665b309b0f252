"""What a source is made of, said without torch and without reading it.

A :class:`Description` is what planning and the action keys see of an input; :mod:`ninferbuild.sources.decoding` turns
the same description and its bytes into tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ninferbuild.sources.regions import Region


@dataclass(frozen=True, slots=True)
class Part:
    """One region of a source and how the rows of the source lie in it.

    ``row_bytes`` is the number of bytes that one leading-axis row of the source takes from the region; 0 means that
    the whole region belongs to every row (a table of scales that is read first).
    """

    role: str  # "values", "codes", "scales"
    region: Region
    row_bytes: int


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
        words: scalars found in the file, as bytes: ``(("weight_divisor", b"…"),)``.
        steps: transformations of the decoded values, in order, each a tuple of a name and plain values. A description
            with steps is materialised whole before it is read.
        encoding: format name of the encoded rows that the source offers, or None.
        stored_shape: shape that the parts hold, before ``steps``; leading axis = rows of the parts.
    """

    shape: tuple[int, ...]
    dtype: str
    decoder: str
    parts: tuple[Part, ...]
    words: tuple[tuple[str, bytes], ...] = ()
    steps: tuple[tuple[object, ...], ...] = ()
    encoding: str | None = None
    stored_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stored_shape and not self.steps:
            object.__setattr__(self, "stored_shape", self.shape)

    def word(self, name: str) -> bytes | None:
        """The scalar ``name`` found in the file, or None."""
        return next((data for key, data in self.words if key == name), None)

    def select_rows(self, ranges: Sequence[tuple[int, int]]) -> Description:
        """The description of leading-axis row ranges, in order; repeats are allowed."""
        rows = sum(end - begin for begin, end in ranges)
        shape = (rows, *self.shape[1:])
        if self.steps:
            return replace(self, shape=shape, steps=(*self.steps, ("rows", tuple(ranges))))
        parts = tuple(
            part
            if part.row_bytes == 0
            else replace(
                part,
                region=part.region.select([(begin * part.row_bytes, end * part.row_bytes) for begin, end in ranges]),
            )
            for part in self.parts
        )
        return replace(self, shape=shape, stored_shape=shape, parts=parts)

    def transpose(self, axes: tuple[int, ...], shape: tuple[int, ...]) -> Description:
        """The whole source with its axes permuted and then reshaped to ``shape``."""
        return replace(self, shape=shape, encoding=None, steps=(*self.steps, ("transpose", self.shape, axes)))

    @property
    def elements(self) -> int:
        return prod(self.shape)


DECODER_VERSIONS = {
    "plain": 1,  # stored words are the values
    "nvfp4": 1,  # E2M1 codes, E4M3FN scales, one FP32 divisor
    "fp8_row": 1,  # E4M3FN codes, one scale a row
    "fp8_block": 1,  # E4M3FN codes, one scale a 128 × 128 block
}
"""Decoder → version. A version is part of every key; it changes when the decoded bits change."""
