"""Tensor and resource records, and their places in the logical payload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ninferbuild.artifact.layouts import align_up, encoded_size, get_layout
from ninferbuild.artifact.primitives import ArtifactError, check_id, check_positive, check_shape, check_u64, fail

RESOURCE_ENCODING = "raw_bytes_v1"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to place: ``divisors`` is the number of stacked matrices with a divisor of their own (``nvfp4``)."""

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    divisors: int = 1


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """A resource to place, ``bytes`` long."""

    id: str
    bytes: int
    encoding: str = RESOURCE_ENCODING


@dataclass(frozen=True, slots=True)
class TensorObject:
    """A tensor at ``offset`` of the logical payload, ``bytes`` long."""

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    bytes: int
    divisors: int = 1
    kind: ClassVar[Literal["tensor"]] = "tensor"

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in a file; ``divisors`` only when it is not 1."""
        record: dict[str, Any] = {
            "id": self.id,
            "shape": list(self.shape),
            "format": self.format,
            "layout": self.layout,
            "offset": self.offset,
            "bytes": self.bytes,
        }
        if self.divisors != 1:
            record["divisors"] = self.divisors
        record["kind"] = self.kind
        return record


@dataclass(frozen=True, slots=True)
class ResourceObject:
    """A resource at ``offset`` of the logical payload, ``bytes`` long."""

    id: str
    encoding: str
    offset: int
    bytes: int
    kind: ClassVar[Literal["resource"]] = "resource"

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in a file."""
        return {
            "id": self.id,
            "encoding": self.encoding,
            "offset": self.offset,
            "bytes": self.bytes,
            "kind": self.kind,
        }


ArtifactObject = TensorObject | ResourceObject


def plan_objects(specs: Iterable[TensorSpec | ResourceSpec]) -> tuple[ArtifactObject, ...]:
    """Place objects one after another, each tensor at its layout's alignment. The order is kept.

    Raises:
        ArtifactError: no specs, an id twice, or an object that cannot be encoded as asked; the message has the id.
        TypeError: something that is no spec.
    """
    placed: list[ArtifactObject] = []
    seen: set[str] = set()
    cursor = 0
    for spec in specs:
        if not isinstance(spec, TensorSpec | ResourceSpec):
            raise TypeError(f"expected a TensorSpec or a ResourceSpec, not {type(spec).__name__}")
        label = f"object {check_id(spec.id, 'object id')!r}"
        if spec.id in seen:
            fail(label, "duplicate id")
        seen.add(spec.id)
        item = _place(spec, cursor, label)
        cursor = check_u64(item.offset + item.bytes, f"{label}: end")
        placed.append(item)
    if not placed:
        raise ArtifactError("an artifact needs at least one object")
    return tuple(placed)


def _place(spec: TensorSpec | ResourceSpec, cursor: int, label: str) -> ArtifactObject:
    if isinstance(spec, ResourceSpec):
        resource = ResourceObject(spec.id, spec.encoding, cursor, check_positive(spec.bytes, f"{label}: bytes"))
        validate_encoding(resource)
        return resource
    shape = check_shape(spec.shape, f"{label}: shape")
    try:
        size = encoded_size(spec.layout, spec.format, shape, spec.divisors)
        start = align_up(cursor, get_layout(spec.layout).alignment)
    except ValueError as error:
        raise ArtifactError(f"{label}: {error}") from error
    check_positive(size, f"{label}: bytes")
    return TensorObject(spec.id, shape, spec.format, spec.layout, start, size, spec.divisors)


def validate_encoding(obj: ArtifactObject) -> None:
    """Check that this software knows the encoding of ``obj`` and that size and offset agree with it.

    Raises:
        ArtifactError: unknown or mismatched names, an illegal shape or divisor count, wrong bytes or alignment.
    """
    label = f"object {obj.id!r}"
    if isinstance(obj, ResourceObject):
        if obj.encoding != RESOURCE_ENCODING:
            fail(label, f"unknown resource encoding {obj.encoding!r}")
        return
    try:
        expected = encoded_size(obj.layout, obj.format, obj.shape, obj.divisors)
        alignment = get_layout(obj.layout).alignment
    except ValueError as error:
        raise ArtifactError(f"{label}: {error}") from error
    if obj.bytes != expected:
        fail(label, f"{obj.bytes} bytes, but {obj.format} {list(obj.shape)} takes {expected}")
    if obj.offset % alignment:
        fail(label, f"offset {obj.offset} is not a multiple of {alignment}")
