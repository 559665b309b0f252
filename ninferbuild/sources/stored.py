"""Readers of stored data: a description that is made when first asked for, and what can be read through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ninferbuild.sources.description import Description

if TYPE_CHECKING:
    import torch

    from ninferbuild.sources.encoded import EncodedRows


class StoredReader(msgspec.Struct, eq=False):
    """Reads values and encoded rows of what ``describe`` describes.

    Construction does nothing: a missing or mis-shaped tensor is reported by the first :meth:`describe`. The methods
    are what the built-in constructors put into a ``LogicalSource``; a source is *described* while it carries them.

    Attributes:
        make: makes the description; called once, by :meth:`describe`.
        shape: the shape that the description will have, when it is known already. :meth:`describe` holds it to that.
        name: what error messages call the source.
        input_divisor_reader: reads the divisor of the activations, apart from the description because no value of the
            weight depends on it.
    """

    make: Callable[[], Description]
    shape: tuple[int, ...] | None = None
    name: str = "source"
    input_divisor_reader: Callable[[], bytes] | None = None
    _description: Description | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def describe(self) -> Description:
        """The description, made on the first call. Raises what looking at the stored tensors raises."""
        description = self._description
        if description is None:  # two threads may both make it; the results are equal
            description = self.make()
            if self.shape is not None and description.shape != self.shape:
                raise ValueError(f"{self.name}: described shape {description.shape} differs from {self.shape}")
            self._description = description
        return description

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether this reader reads a source of ``shape``."""
        return (self.shape if self.shape is not None else self.describe().shape) == shape

    def read_values(self, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` in C order, 1-D, in the type that the description names."""
        from ninferbuild.sources import decoding

        return decoding.read_values(self.describe(), begin, end)

    def read_encoded(self, begin: int, end: int) -> EncodedRows:
        """Encoded rows ``[begin, end)``.

        Raises:
            ValueError: the source holds no encoded rows, or the range lies outside.
        """
        from ninferbuild.sources import decoding

        description = self.describe()
        if description.encoding is None:
            raise ValueError(f"{self.name}: selected source does not provide encoded rows")
        if not 0 <= begin < end <= description.shape[0]:
            raise ValueError(f"{self.name}: invalid encoded rows [{begin}, {end}) of {description.shape[0]}")
        return decoding.read_encoded(description, begin, end)

    def weight_divisor(self) -> bytes:
        """The FP32 word that decoded weights are divided by, 4 little-endian bytes.

        Raises:
            ValueError: the source has none.
        """
        word = self.describe().word("weight_divisor")
        if word is None:
            raise ValueError(f"{self.name}: selected source does not provide weight_divisor")
        return word

    def input_divisor(self) -> bytes:
        """The FP32 word that activations are divided by, 4 little-endian bytes.

        Raises:
            ValueError: the source has none.
        """
        if self.input_divisor_reader is None:
            raise ValueError(f"{self.name}: selected source does not provide input_divisor")
        return self.input_divisor_reader()
