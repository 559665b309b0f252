"""Artifacts as sources: a component that another artifact holds, taken object by object as it is stored.

Only headers and the directory are read here. Payloads are regions of the entry and its parts, read like those of any
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from ninferbuild.artifact.framing import ARTIFACT_ID_BYTES, HEADER, SegmentMap
from ninferbuild.artifact.objects import ResourceObject, TensorObject
from ninferbuild.artifact.reader import Artifact
from ninferbuild.digest import digest_of
from ninferbuild.errors import SourceChangedError
from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.files import CheckpointFile
from ninferbuild.sources.logical import LogicalSource
from ninferbuild.sources.regions import Region, SourceFile, Span
from ninferbuild.sources.stored import StoredReader


class PayloadFile(CheckpointFile):
    """One file of an artifact's set.

    Args:
        framing: bytes before its payload, which say where objects lie.
        artifact_id: of the set.

    Raises:
        SourceChangedError: the file is of another set by now.
    """

    def __init__(self, path: Path, framing: int, artifact_id: bytes):
        super().__init__(path)
        head = bytearray(framing)
        self.read_uncounted(0, memoryview(head))  # from here on the file has to stay as it is
        if head[HEADER.size - ARTIFACT_ID_BYTES : HEADER.size] != artifact_id:
            raise SourceChangedError(f"{path}: the file changed while it was in use; run the build again")
        self._digest = digest_of(head)

    def header_digest(self) -> bytes:
        return self._digest


@dataclass(frozen=True, slots=True)
class StoredComponent:
    """What an artifact holds of one component.

    Attributes:
        record: the component's record in the directory.
        bindings: of the component's parameters.
        uses: of the component's parameters.
        readers: uses of other parameters that multiply a state of the component, such as those of the output head.
        tensors: tensor objects that bindings and uses refer to, sorted by id.
        resources: role → resource object of the record.
    """

    name: str
    record: dict[str, Any]
    bindings: dict[str, dict[str, Any]]
    uses: tuple[dict[str, Any], ...]
    readers: tuple[dict[str, Any], ...]
    tensors: tuple[TensorObject, ...]
    resources: dict[str, ResourceObject]

    def elements(self, parameter: str) -> int | None:
        """How many elements a parameter has; None if there is no such parameter."""
        binding = self.bindings.get(parameter)
        if binding is None:
            return None
        if "object" in binding:
            return next(prod(item.shape) for item in self.tensors if item.id == binding["object"])
        parts: list[dict[str, Any]] = binding["parts"]
        return sum(int(part["range"][1]) - int(part["range"][0]) for part in parts)


class ArtifactSource:
    """A ``.ninfer`` artifact, opened as a source; a context manager.

    Attributes:
        path: the entry, as given.
        root: its directory.
        config: empty: an artifact is no checkpoint that parameters could be looked up in.

    Raises:
        ArtifactError: the entry is not a valid artifact.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.root = self.path.parent
        self.config: dict[str, Any] = {}
        self._artifact = Artifact(self.path)
        self._segments = SegmentMap(self._artifact.directory.files, self._artifact.payload_offset)
        self._files: dict[int, PayloadFile] = {}

    @property
    def artifact_id(self) -> str:
        """The id, hexadecimal."""
        return self._artifact.artifact_id.hex()

    def paths(self) -> list[Path]:
        """The files of the set, entry first."""
        return [self.path, *(self.path.with_name(str(file.path)) for file in self._artifact.directory.files[1:])]

    @property
    def artifact(self) -> Artifact:
        """The opened artifact."""
        return self._artifact

    @property
    def components(self) -> Mapping[str, Any]:
        """The records of its components, by name."""
        return self._artifact.directory.components

    def has(self, name: str) -> bool:
        return False

    def component(self, name: str) -> StoredComponent:
        """What the artifact holds of the component ``name``.

        Raises:
            ValueError: it has no such component, or none of its parameters.
            ArtifactError: an object has an encoding that is unknown or does not fit it.
        """
        directory = self._artifact.directory
        if name not in directory.components:
            there = ", ".join(directory.components)
            raise ValueError(f"{self.path}: the artifact has no component {name!r}; it has {there}")
        prefix = f"{name}/"
        bindings = {key: value for key, value in directory.bindings.items() if key.startswith(prefix)}
        if not bindings:
            raise ValueError(f"{self.path}: the artifact binds no parameter of component {name!r}")
        uses = tuple(use for use in directory.uses if use["parameter"].startswith(prefix))
        readers = tuple(
            use for use in directory.uses if not use["parameter"].startswith(prefix) and use["input"].startswith(prefix)
        )
        auxiliaries = (binding for use in uses for binding in use.get("auxiliaries", {}).values())
        wanted = {key for binding in (*bindings.values(), *auxiliaries) for key in objects_of(binding)}
        tensors = [item for key in sorted(wanted) if isinstance(item := self._artifact.object(key), TensorObject)]
        record = directory.components[name]
        resources = {role: self._artifact.object(key) for role, key in record.get("resources", {}).items()}
        return StoredComponent(
            name,
            record,
            bindings,
            uses,
            readers,
            tuple(tensors),
            {role: item for role, item in resources.items() if isinstance(item, ResourceObject)},
        )

    def payload(self, item: TensorObject) -> LogicalSource:
        """The encoded bytes of an object, as ``U8 [bytes]``."""
        label = f"{self.path}:{item.id}"
        reader = StoredReader(lambda: self._describe(item), shape=(item.bytes,), name=label)
        return LogicalSource((item.bytes,), label, reader.read_values)

    def _describe(self, item: TensorObject) -> Description:
        spans = [
            Span(self._file(span.file), span.position, span.position + span.length)
            for span in self._segments.spans(item.offset, item.offset + item.bytes)
        ]
        part = Part("values", Region(tuple(spans)), 1, name=item.id)
        return Description(shape=(item.bytes,), dtype="U8", decoder="plain", parts=(part,))

    def _file(self, index: int) -> PayloadFile:
        file = self._files.get(index)
        if file is None:
            name = self._artifact.directory.files[index].path
            path = self._artifact.path if name is None else self._artifact.path.with_name(name)
            begin = sum(record.payload_bytes for record in self._artifact.directory.files[:index])
            self._artifact.read_range(begin, 1)  # opens a part and checks that it belongs to the entry
            framing = self._artifact.payload_offset if index == 0 else HEADER.size
            file = self._files.setdefault(index, PayloadFile(path, framing, self._artifact.artifact_id))
        return file

    def owns(self, file: SourceFile) -> bool:
        """Whether ``file`` is one of this artifact's."""
        return any(own is file for own in self._files.values())

    def close(self) -> None:
        """Give all descriptors back."""
        self._artifact.close()
        for file in self._files.values():
            file.close()

    def __enter__(self) -> ArtifactSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"


def objects_of(binding: Mapping[str, Any]) -> Iterator[str]:
    """Ids of the objects that a binding refers to."""
    if "object" in binding:
        yield binding["object"]
    else:
        yield from (part["object"] for part in binding["parts"])


def renamed_binding(binding: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy of ``binding`` with other object ids."""
    if "object" in binding:
        return {"object": names[binding["object"]]}
    parts: Sequence[Mapping[str, Any]] = binding["parts"]
    return {"parts": [{"object": names[part["object"]], "range": list(part["range"])} for part in parts]}
