"""``import_encoded``: codes and scales of an encoded checkpoint, stored word for word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import struct
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ninferbuild.artifact.formats import (
    FP8_E4M3FN_ROW_BF16,
    GGUF_FORMATS,
    NVFP4,
    T2_G128_FP16,
    get_format,
    valid_positive_fp32_word,
)
from ninferbuild.artifact.layouts import SCALE_TILE_ROWS
from ninferbuild.method import AuxiliaryKey, AuxiliaryValue
from ninferbuild.rules.preflight import check_counts, refuse_parameters
from ninferbuild.rules.rule import Rule, RuleCheck

if TYPE_CHECKING:
    import torch

    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.method import MethodInput, PrepareRequest
    from ninferbuild.rules.error_flags import ErrorFlags
    from ninferbuild.sources.logical import EncodedRows

IMPORTABLE = (NVFP4.name, FP8_E4M3FN_ROW_BF16.name, T2_G128_FP16.name, *GGUF_FORMATS)
"""Formats with encoded rows; each has a packer in :mod:`ninferbuild.rules.encoded_words`."""

DIVISOR_ROLE = "activation_input_divisor"
ALLOW_A4 = "AllowA4"


@dataclass(frozen=True, slots=True)
class ImportState:
    """The weight divisor of each stacked matrix: one for a plain NVFP4 parent, none for other formats."""

    weight_divisors: tuple[bytes, ...] = ()


class _Offer(NamedTuple):
    """What one input offers: the format of its encoded rows and, for NVFP4, the divisor of its weights."""

    format: str
    weight_divisor: bytes | None
    described: bool


class ImportEncoded(Rule):
    """No dequantisation and no rounding: values are never read."""

    name: ClassVar[str] = "import_encoded"
    version: ClassVar[int] = 1
    reads: ClassVar[Literal["values", "encoded", "payload"]] = "encoded"

    def check(self, request: PrepareRequest) -> RuleCheck:
        target = request.target
        if get_format(target.format).name not in IMPORTABLE or len(target.shape) != 2:
            raise ValueError(
                f"{self.name} requires a known encoded matrix target, "
                f"not {target.format} of shape {tuple(target.shape)}"
            )
        refuse_parameters(self.name, request)
        check_counts(request)
        offers = [_offer(item, target) for item in request.inputs]
        if target.format != NVFP4.name:
            return RuleCheck(state=ImportState())
        words = _weight_divisors(request, offers)
        # The words of described inputs are part of the key already; those that a reader returned are not.
        known = all(offer.described for offer in offers)
        facts = () if known else (f"weight_divisors: {','.join(word.hex() for word in words)}",)
        return RuleCheck(_activation_divisors(request), facts, ImportState(words))

    def block_rows(self, target: TensorSpec, rows_per_chunk: int) -> int:
        if target.format != NVFP4.name:
            return rows_per_chunk
        return max(SCALE_TILE_ROWS, rows_per_chunk // SCALE_TILE_ROWS * SCALE_TILE_ROWS)

    def blocks(self, request: PrepareRequest) -> Iterator[tuple[int, EncodedRows]]:
        """Blocks of rows; those of stacked NVFP4 start anew with each matrix."""
        target = request.target
        share, step = target.shape[0] // target.divisors, self.block_rows(target, request.rows_per_chunk)
        for first in range(0, target.shape[0], share):
            for begin in range(first, first + share, step):
                yield begin, request.encoded_rows(begin, min(begin + step, first + share))

    def encode_block(
        self,
        block: Any,
        target: TensorSpec,
        checked: RuleCheck,
        first_row: int,
        device: torch.device,
        errors: ErrorFlags,
    ) -> tuple[torch.Tensor, ...]:
        from ninferbuild.rules.encoded_words import PACKERS

        if block.format != target.format:
            raise ValueError(f"encoded rows are {block.format} and differ from target {target.format}")
        return PACKERS[target.format](block, target, checked.state.weight_divisors, first_row, device, errors)


def _offer(item: MethodInput, target: TensorSpec) -> _Offer:
    """Look at the description of an input or, where a user's reader hides it, at its first row."""
    source = item.source
    if source.read_encoded is None:
        raise ValueError(f"{item.parameter}: encoded rows are unavailable from {source.label}")
    if len(source.shape) != 2 or source.shape[1] != target.shape[1]:
        raise ValueError(
            f"{item.parameter}: encoded grouping requires complete rows of {target.shape[1]} columns, "
            f"not shape {source.shape}"
        )
    description = source.description
    if description is not None:
        if description.encoding is None:
            raise ValueError(
                f"{item.parameter}: encoded rows are unavailable: {source.label} does not provide encoded rows"
            )
        offer = _Offer(description.encoding, description.word("weight_divisor"), described=True)
    else:
        row = source.read_encoded(0, 1)
        word = row.weight_divisor
        if word is None and source.weight_divisor is not None and row.format == NVFP4.name:
            word = source.weight_divisor()
        offer = _Offer(row.format, word, described=False)
    if offer.format != target.format:
        raise ValueError(f"{item.parameter}: source {offer.format} differs from target {target.format}")
    return offer


def _weight_divisors(request: PrepareRequest, offers: list[_Offer]) -> tuple[bytes, ...]:
    """One word for each stacked matrix of an NVFP4 parent."""
    words = []
    for item, offer in zip(request.inputs, offers, strict=True):
        word = offer.weight_divisor
        if word is None or len(word) != 4 or not valid_positive_fp32_word(struct.unpack("<I", word)[0]):
            found = "missing" if word is None else bytes(word).hex()
            raise ValueError(f"{item.parameter}: the NVFP4 weight divisor must be finite and positive, it is {found}")
        words.append(bytes(word))
    divisors = request.target.divisors
    if divisors == 1:
        if len(set(words)) != 1:
            raise ValueError("NVFP4 weight divisors differ; choose separate parents or a conversion method")
        return (words[0],)
    if len(words) != divisors:
        raise ValueError(f"a stack of {divisors} NVFP4 matrices needs as many inputs, got {len(words)}")
    return tuple(words)


def _activation_divisors(request: PrepareRequest) -> dict[AuxiliaryKey, AuxiliaryValue]:
    """The activation divisor of each use that has an override or allows 4-bit activations."""
    found: dict[AuxiliaryKey, AuxiliaryValue] = {}
    smallest: AuxiliaryValue | None = None
    for item in request.inputs:
        for use in item.uses:
            key = (*use, DIVISOR_ROLE)
            if key in request.auxiliary_overrides:
                found[key] = request.auxiliary_overrides[key]
            elif request.policies.get(use) == ALLOW_A4:
                smallest = smallest or _smallest_input_divisor(request, item)
                found[key] = smallest
    return found


def _smallest_input_divisor(request: PrepareRequest, wanted_by: MethodInput) -> AuxiliaryValue:
    """The smallest input divisor of the parent's inputs: the activation is quantised once, and this cannot saturate."""
    accessors = [item.source.input_divisor for item in request.inputs]
    values = [AuxiliaryValue.activation_divisor(accessor()) for accessor in accessors if accessor is not None]
    if not values:
        raise ValueError(f"{wanted_by.parameter}: supply an activation divisor for {ALLOW_A4}")
    return min(values, key=lambda value: float(struct.unpack("<f", value.data)[0]))


import_encoded = ImportEncoded()
