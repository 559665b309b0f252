"""The directory of a ``.ninfer`` file: components, objects, bindings, uses and files.

Everything is checked once, when a value becomes a :class:`Directory`. Formats, layouts and encodings that nobody knows
do not stop a directory from being read: an object is checked when it is wanted
(:func:`ninferbuild.artifact.objects.validate_encoding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ninferbuild.artifact.json_text import decode_json, encode_json
from ninferbuild.artifact.objects import ArtifactObject, ResourceObject, TensorObject
from ninferbuild.artifact.primitives import (
    check_array,
    check_id,
    check_members,
    check_object,
    check_positive,
    check_shape,
    check_u64,
    fail,
)

ACTIVATION_POLICIES = ("A16Only", "AllowA8", "AllowA4")
"""What a use permits: 16-bit activations; 8-bit as well; 8 and 4-bit as well."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the set: ``path`` is None for the entry, the name of a sibling for a part."""

    path: str | None
    payload_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in a file."""
        return {"path": self.path, "payload_bytes": self.payload_bytes}


@dataclass(frozen=True, slots=True)
class Directory:
    """A checked directory; everything but objects and files is the JSON value as it was given."""

    components: dict[str, Any]
    objects: tuple[ArtifactObject, ...]
    bindings: dict[str, Any]
    uses: list[Any]
    files: tuple[FileRecord, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Length of the logical payload: the segments of all files."""
        return sum(record.payload_bytes for record in self.files)

    def to_json(self) -> dict[str, Any]:
        """The directory as a JSON value. A file orders its members differently, see ``writer.layout_directory``."""
        return {
            "components": self.components,
            "objects": [item.to_json() for item in self.objects],
            "bindings": self.bindings,
            "uses": self.uses,
            "files": [record.to_json() for record in self.files],
            "metadata": self.metadata,
            "provenance": self.provenance,
        }


def encode_directory(value: Mapping[str, Any]) -> bytes:
    """The JSON text of a directory value, members in the order given.

    Raises:
        ArtifactError: the value holds what JSON cannot.
    """
    return encode_json(value)


def decode_directory(data: bytes, *, entry_name: str | None = None) -> Directory:
    """The directory in a JSON region.

    Raises:
        ArtifactError: the text or the value breaks a rule; only the first violation is named.
    """
    return parse_directory(decode_json(data), entry_name=entry_name)


def parse_directory(value: Any, *, entry_name: str | None = None) -> Directory:
    """Check a JSON value and make it a :class:`Directory`, which shares the value's parts.

    Args:
        entry_name: file name of the entry, which no part may have; None skips that test.

    Raises:
        ArtifactError: a rule is broken; only the first violation is named.
    """
    required = ("components", "objects", "bindings", "uses", "files")
    root = check_members(value, required, ("metadata", "provenance"), "directory")
    files = _files(root["files"], entry_name)
    objects = _objects(root["objects"], sum(record.payload_bytes for record in files))
    by_id = {item.id: item for item in objects}
    components = _components(root["components"], by_id)
    bindings = check_object(root["bindings"], "bindings")
    for name, binding in bindings.items():
        check_id(name, "bindings: parameter name")
        binding_parts(binding, by_id, f"bindings[{name!r}]")
    uses = _uses(root["uses"], bindings, by_id)
    metadata = check_object(root.get("metadata", {}), "metadata")
    if "name" in metadata:
        check_id(metadata["name"], "metadata.name")
    provenance = check_object(root.get("provenance", {}), "provenance")
    return Directory(components, objects, bindings, uses, files, metadata, provenance)


def binding_parts(
    binding: Any, objects_by_id: Mapping[str, ArtifactObject], label: str = "binding"
) -> tuple[tuple[str, int, int], ...]:
    """The ranges ``(object id, begin, end)`` of logical elements that a binding concatenates.

    Raises:
        ArtifactError: not one of the two forms, an object that is no tensor of the artifact, or a bad range.
    """
    record = check_object(binding, label)
    if "object" in record:
        tensor = _tensor(check_members(record, ("object",), (), label)["object"], objects_by_id, label)
        return ((tensor.id, 0, prod(tensor.shape)),)
    parts = check_array(check_members(record, ("parts",), (), label)["parts"], f"{label}.parts")
    if not parts:
        fail(f"{label}.parts", "must not be empty")
    return tuple(_part(part, objects_by_id, f"{label}.parts[{index}]") for index, part in enumerate(parts))


def _part(value: Any, objects_by_id: Mapping[str, ArtifactObject], label: str) -> tuple[str, int, int]:
    record = check_members(value, ("object", "range"), (), label)
    tensor = _tensor(record["object"], objects_by_id, label)
    bounds = check_array(record["range"], f"{label}.range")
    if len(bounds) != 2:
        fail(f"{label}.range", f"expected [begin, end], not {len(bounds)} elements")
    begin, end = (check_u64(bound, f"{label}.range") for bound in bounds)
    if not begin < end <= prod(tensor.shape):
        fail(f"{label}.range", f"[{begin}, {end}) is empty or outside object {tensor.id!r} {list(tensor.shape)}")
    return tensor.id, begin, end


def _tensor(value: Any, objects_by_id: Mapping[str, ArtifactObject], label: str) -> TensorObject:
    item = objects_by_id.get(check_id(value, f"{label}.object"))
    if not isinstance(item, TensorObject):
        fail(label, f"{value!r} is {'a resource, not a tensor' if item else 'no object of the artifact'}")
    return item


def _files(value: Any, entry_name: str | None) -> tuple[FileRecord, ...]:
    records: list[FileRecord] = []
    names = {entry_name}
    total = 0
    for index, item in enumerate(check_array(value, "files")):
        label = f"files[{index}]"
        record = check_members(item, ("path", "payload_bytes"), (), label)
        path = record["path"]
        if index == 0:
            if path is not None:
                fail(f"{label}.path", "must be null for the entry")
        else:
            check_id(path, f"{label}.path")
            if path in (".", "..") or "/" in path or "\\" in path:
                fail(f"{label}.path", f"{path!r} is no plain file name")
            if path in names:
                fail(f"{label}.path", f"{path!r} is the name of another file of the set")
            names.add(path)
        total = check_positive(total + check_positive(record["payload_bytes"], f"{label}.payload_bytes"), "files")
        records.append(FileRecord(path, record["payload_bytes"]))
    if not records:
        fail("files", "must not be empty")
    return tuple(records)


def _objects(value: Any, payload_bytes: int) -> tuple[ArtifactObject, ...]:
    objects = tuple(_object(item, f"objects[{index}]") for index, item in enumerate(check_array(value, "objects")))
    if not objects:
        fail("objects", "must not be empty")
    seen: set[str] = set()
    cursor = 0
    for item in objects:
        if item.id in seen:
            fail(f"object {item.id!r}", "duplicate id")
        seen.add(item.id)
        if item.offset < cursor:
            fail(f"object {item.id!r}", f"offset {item.offset} is before the end {cursor} of the object before it")
        cursor = item.offset + item.bytes
        if cursor > payload_bytes:
            fail(f"object {item.id!r}", f"end {cursor} exceeds the payload of {payload_bytes} bytes")
    return objects


def _object(value: Any, label: str) -> ArtifactObject:
    kind = check_object(value, label).get("kind")
    if kind == "tensor":
        return _tensor_object(value, label)
    if kind != "resource":
        fail(f"{label}.kind", "must be 'tensor' or 'resource'")
    record = check_members(value, ("id", "kind", "encoding", "offset", "bytes"), (), label)
    identifier = check_id(record["id"], f"{label}.id")
    label = f"object {identifier!r}"
    encoding = check_id(record["encoding"], f"{label}: encoding")
    return ResourceObject(identifier, encoding, *_extent(record, label))


def _tensor_object(value: dict[str, Any], label: str) -> TensorObject:
    required = ("id", "kind", "shape", "format", "layout", "offset", "bytes")
    record = check_members(value, required, ("divisors",), label)
    identifier = check_id(record["id"], f"{label}.id")
    label = f"object {identifier!r}"
    return TensorObject(
        identifier,
        check_shape(record["shape"], f"{label}: shape"),
        check_id(record["format"], f"{label}: format"),
        check_id(record["layout"], f"{label}: layout"),
        *_extent(record, label),
        check_positive(record.get("divisors", 1), f"{label}: divisors"),
    )


def _extent(record: dict[str, Any], label: str) -> tuple[int, int]:
    offset = check_u64(record["offset"], f"{label}: offset")
    size = check_positive(record["bytes"], f"{label}: bytes")
    check_u64(offset + size, f"{label}: end")
    return offset, size


def _components(value: Any, by_id: Mapping[str, ArtifactObject]) -> dict[str, Any]:
    components = check_object(value, "components")
    if not components:
        fail("components", "must not be empty")
    for name, component in components.items():
        check_id(name, "components: name")
        label = f"components[{name!r}]"
        record = check_members(component, ("config",), ("target", "resources", "proposal"), label)
        check_object(record["config"], f"{label}.config")
        if "target" in record and check_id(record["target"], f"{label}.target") not in components:
            fail(f"{label}.target", f"{record['target']!r} is no component")
        if "resources" in record:
            _resources(record["resources"], by_id, f"{label}.resources")
        if "proposal" in record:
            if name != "text":
                fail(label, "only component 'text' may have a proposal")
            _proposal(record["proposal"], f"{label}.proposal")
    return components


def _resources(value: Any, by_id: Mapping[str, ArtifactObject], label: str) -> None:
    for role, identifier in check_object(value, label).items():
        check_id(role, f"{label}: role")
        item = by_id.get(check_id(identifier, f"{label}[{role!r}]"))
        if not isinstance(item, ResourceObject):
            fail(f"{label}[{role!r}]", f"{identifier!r} is no resource of the artifact")


def _proposal(value: Any, label: str) -> None:
    record = check_members(value, ("domain",), ("rows",), label)
    if record["domain"] == "full":
        if "rows" in record:
            fail(f"{label}.rows", "must be absent for domain 'full'")
    elif record["domain"] == "indexed":
        check_positive(record.get("rows"), f"{label}.rows")
    else:
        fail(f"{label}.domain", "must be 'full' or 'indexed'")


def _uses(value: Any, bindings: Mapping[str, Any], by_id: Mapping[str, ArtifactObject]) -> list[Any]:
    uses = check_array(value, "uses")
    seen: set[tuple[str, str]] = set()
    for index, use in enumerate(uses):
        label = f"uses[{index}]"
        record = check_members(use, ("parameter", "input"), ("activation_policy", "auxiliaries"), label)
        parameter = check_id(record["parameter"], f"{label}.parameter")
        if parameter not in bindings:
            fail(f"{label}.parameter", f"{parameter!r} has no binding")
        key = (parameter, check_id(record["input"], f"{label}.input"))
        if key in seen:
            fail(label, f"parameter {key[0]!r} with input {key[1]!r} appears twice")
        seen.add(key)
        if "activation_policy" in record:
            policy = check_id(record["activation_policy"], f"{label}.activation_policy")
            if policy not in ACTIVATION_POLICIES:
                fail(f"{label}.activation_policy", f"{policy!r} is none of {', '.join(ACTIVATION_POLICIES)}")
        if "auxiliaries" in record:
            for role, binding in check_object(record["auxiliaries"], f"{label}.auxiliaries").items():
                check_id(role, f"{label}.auxiliaries: role")
                binding_parts(binding, by_id, f"{label}.auxiliaries[{role!r}]")
    return uses
