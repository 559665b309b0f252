"""The interface for method authors: what a method receives and returns.

A method is a callable ``m(request: PrepareRequest) -> PreparedMethod``. It is called once for a parent, must not
write, and returns ``request.job(produce=…, auxiliaries=…)``; ``produce(output)`` runs later, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite, prod
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from ninferbuild.artifact.layouts import HADAMARD_BLOCK
from ninferbuild.struct_fields import with_dataclass_fields

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.sources.logical import EncodedRows, LogicalSource

UseKey = tuple[str, str]
"""(parameter, input)"""

AuxiliaryKey = tuple[str, str, str]
"""(parameter, input, role)"""

Method = Callable[["PrepareRequest"], "PreparedMethod"]

_SIGN_WORDS = {1: b"\x80\x3f", -1: b"\x80\xbf"}
"""Sign → bfloat16 word, little-endian."""


@dataclass(frozen=True, slots=True)
class AuxiliaryValue:
    """One auxiliary tensor: ``data`` is already in the default layout of ``format``."""

    format: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def activation_divisor(cls, value: float | bytes) -> AuxiliaryValue:
        """An ``activation_input_divisor``: a number, or the four little-endian bytes of a binary32 word.

        Raises:
            ValueError: the word is not a positive finite FP32.
        """
        try:
            raw = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else struct.pack("<f", value)
        except (OverflowError, struct.error) as error:
            raise ValueError(f"activation input divisor must be positive finite FP32, not {value!r}") from error
        if len(raw) != 4 or not (isfinite(number := struct.unpack("<f", raw)[0]) and number > 0):
            raise ValueError("activation input divisor must be positive finite FP32")
        return cls("fp32", (), raw)

    @classmethod
    def hadamard_signs(cls, signs: Iterable[int]) -> AuxiliaryValue:
        """The ``hadamard_signs`` of a matrix that acts on rotated activations: +1 or −1 for each of its columns.

        With ``H`` the normalised Sylvester–Walsh–Hadamard transform of each block of 1024 columns,
        ``H[i][j] = (-1)**popcount(i & j) / 32``, and ``s`` the signs, such a matrix gives ``y = W · H(s ⊙ x)``; a row
        ``w`` of it stands for ``s ⊙ H(w)``, since ``H · H = I``.

        Returns:
            bfloat16 ``[columns]``.

        Raises:
            ValueError: a value is neither +1 nor −1, or the columns are not whole blocks.
        """
        words = []
        for index, sign in enumerate(signs):
            if sign not in _SIGN_WORDS:
                raise ValueError(f"Hadamard signs are +1 or -1; element {index} is {sign!r}")
            words.append(_SIGN_WORDS[sign])
        if not words or len(words) % HADAMARD_BLOCK:
            raise ValueError(f"Hadamard signs come in whole blocks of {HADAMARD_BLOCK}, not {len(words)}")
        return cls("bf16", (len(words),), b"".join(words))


@with_dataclass_fields
class MethodInput(msgspec.Struct, frozen=True):
    """One input of a parent: the parameter, its source restricted to the selected rows, and its uses."""

    parameter: str
    source: LogicalSource
    uses: tuple[UseKey, ...]


@dataclass(frozen=True, slots=True)
class PreparedMethod:
    """What a method returns."""

    produce: Callable[[Any], None]
    auxiliaries: Mapping[AuxiliaryKey, AuxiliaryValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What a method sees of its parent."""

    target: TensorSpec
    inputs: tuple[MethodInput, ...]
    policies: Mapping[UseKey, str]
    parameters: Mapping[str, Any]
    device: str
    rows_per_chunk: int
    auxiliary_overrides: Mapping[AuxiliaryKey, AuxiliaryValue]

    @property
    def source_offsets(self) -> tuple[int, ...]:
        """Cumulative element offsets of the inputs, starting with 0."""
        return (0, *accumulate(prod(item.source.shape) for item in self.inputs))

    @property
    def source(self) -> LogicalSource:
        """The single input's source. Raises ``ValueError`` when there are several."""
        if len(self.inputs) != 1:
            raise ValueError("this method does not accept multiple inputs")
        return self.inputs[0].source

    def require_input_shape(self, shape: tuple[int, ...]) -> None:
        """Raises ``ValueError`` unless the single input has ``shape``."""
        if tuple(self.source.shape) != tuple(shape):
            raise ValueError(f"source shape {tuple(self.source.shape)} differs from {tuple(shape)}")

    def job(
        self,
        *,
        produce: Callable[[Any], None],
        auxiliaries: Mapping[AuxiliaryKey, AuxiliaryValue] | None = None,
    ) -> PreparedMethod:
        return PreparedMethod(produce, dict(auxiliaries or {}))

    def values(self, begin: int, end: int) -> torch.Tensor:
        """Elements ``[begin, end)`` of the inputs concatenated in order, 1-D.

        Raises:
            ValueError: the bounds exceed the inputs.
        """
        import torch

        offsets = self.source_offsets
        if not 0 <= begin <= end <= offsets[-1]:
            raise ValueError(f"range [{begin}, {end}) does exceed method inputs of {offsets[-1]} elements")
        pieces = [
            item.source.values(max(begin, first) - first, min(end, last) - first)
            for item, first, last in zip(self.inputs, offsets, offsets[1:], strict=False)
            if max(begin, first) < min(end, last)
        ]
        if not pieces:
            return torch.empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def encoded_rows(self, begin: int, end: int) -> EncodedRows:
        """Encoded rows ``[begin, end)`` of the inputs stacked in order.

        Raises:
            ValueError: an input has no encoded rows or another width, the range is empty or outside, or the rows
                disagree about format or divisor.
        """
        from ninferbuild.sources.logical import concatenate_encoded

        width = self.target.shape[1] if len(self.target.shape) == 2 else -1
        for item in self.inputs:
            if len(item.source.shape) != 2 or item.source.shape[1] != width:
                raise ValueError(f"{item.parameter}: encoded grouping requires complete rows")
            if item.source.read_encoded is None:
                raise ValueError(f"{item.parameter}: encoded rows are unavailable")
        rows = [0, *accumulate(item.source.shape[0] for item in self.inputs)]
        if not 0 <= begin < end <= rows[-1]:
            raise ValueError(f"encoded row range is invalid: [{begin}, {end}) of {rows[-1]}")
        pieces = []
        for item, first, last in zip(self.inputs, rows, rows[1:], strict=False):
            if max(begin, first) < min(end, last):
                assert item.source.read_encoded is not None
                pieces.append(item.source.read_encoded(max(begin, first) - first, min(end, last) - first))
        return concatenate_encoded(pieces, "encoded inputs cannot share one parent format/divisor")
