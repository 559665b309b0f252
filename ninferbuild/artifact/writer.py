"""Writing ``.ninfer`` file sets: every byte of every object once, in any order, published only when complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import os
from pathlib import Path
import threading
from types import TracebackType
from typing import Any, Self
import uuid

from ninferbuild.artifact.coverage import Coverage
from ninferbuild.artifact.directory import Directory
from ninferbuild.artifact.framing import (
    ARTIFACT_ID_BYTES,
    HEADER,
    IO_CHUNK_BYTES,
    MAGIC,
    PART_MAGIC,
    SegmentMap,
)
from ninferbuild.artifact.objects import ArtifactObject, ResourceSpec, TensorSpec, plan_objects
from ninferbuild.artifact.primitives import ArtifactError, check_u64
from ninferbuild.artifact.publication import PendingFiles
from ninferbuild.artifact.sizing import layout_directory

__all__ = ["DEFAULT_MAX_FILE_BYTES", "ArtifactWriter", "layout_directory"]

DEFAULT_MAX_FILE_BYTES = 32_000_000_000
"""The limit that older writers applied unless told otherwise. Here a file has no limit unless one is given."""

_ZEROS = bytes(1 << 20)

Buffer = bytes | bytearray | memoryview


class ArtifactWriter:
    """Writer of one artifact; a context manager that finishes, or aborts on an exception.

    Regions may be written in any order and from several threads. Errors in arguments leave the writer usable; writing
    bytes twice or a failing disk does not.

    Args:
        path: the entry. Parts, if any, are its siblings.
        specs: the objects, in file order.
        components, bindings, uses, metadata, provenance: JSON values of the directory, copied.
        max_file_bytes: the most bytes of one file; None for a single file of any size.
        artifact_id: the 16 bytes that identify the set; random (UUID version 4) when None.

    Attributes:
        path, directory, payload_offset, artifact_id: as of the reader.
        objects, by_id: the planned objects, and the same by id.

    Raises:
        ArtifactError: invalid description or objects, a limit that is too small; nothing was created.
        FileExistsError: the entry or a part exists; nothing was created.
        OSError: the system's reason why the files cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Iterable[TensorSpec | ResourceSpec],
        *,
        components: Mapping[str, Any],
        bindings: Mapping[str, Any],
        uses: Sequence[Any] = (),
        metadata: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        max_file_bytes: int | None = None,
        artifact_id: bytes | None = None,
    ):
        self.path = Path(path)
        self.objects = plan_objects(specs)
        self.by_id: dict[str, ArtifactObject] = {item.id: item for item in self.objects}
        last = self.objects[-1]
        description = {
            "components": components,
            "objects": [item.to_json() for item in self.objects],
            "bindings": bindings,
            "uses": list(uses) if isinstance(uses, tuple) else uses,
            "metadata": {} if metadata is None else metadata,
            "provenance": {} if provenance is None else provenance,
        }
        self.directory, text, self.payload_offset = layout_directory(
            self.path.name, description, last.offset + last.bytes, max_file_bytes=max_file_bytes
        )
        self.artifact_id = uuid.uuid4().bytes if artifact_id is None else bytes(artifact_id)
        if len(self.artifact_id) != ARTIFACT_ID_BYTES:
            raise ArtifactError(f"an artifact id has {ARTIFACT_ID_BYTES} bytes, not {len(self.artifact_id)}")
        self._segments = SegmentMap(self.directory.files, self.payload_offset)
        self._coverage = {item.id: Coverage() for item in self.objects}
        self._lock = threading.Lock()
        self._failed = False
        self._finished = False
        self._files = PendingFiles(
            [
                (self.path if record.path is None else self.path.with_name(record.path), self._segments.file_length(i))
                for i, record in enumerate(self.directory.files)
            ]
        )
        try:
            self._write_framing(text)
        except BaseException:
            self.abort()
            raise

    def _write_framing(self, text: bytes) -> None:
        self._files.write(0, 0, memoryview(HEADER.pack(MAGIC, len(text), self.artifact_id) + text))
        for index in range(1, len(self.directory.files)):
            self._files.write(index, 0, memoryview(HEADER.pack(PART_MAGIC, index, self.artifact_id)))

    def write_region(self, object_id: str, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset`` of an object.

        Raises:
            ArtifactError: the writer is closed or failed, the object is unknown, the region is outside the object, or
                it meets bytes that were written before (which makes the writer fail).
            OSError: the system's reason (which makes the writer fail).
        """
        view = memoryview(data).cast("B")
        item = self._check_region(object_id, offset, len(view))
        if not view:
            return
        end = offset + len(view)
        with self._lock:
            self._require_open()
            if not self._coverage[object_id].add(offset, end):
                self._failed = True
                raise ArtifactError(f"object {object_id!r}: duplicate output coverage in [{offset}, {end})")
        try:
            for span in self._segments.spans(item.offset + offset, item.offset + end):
                for done in range(0, span.length, IO_CHUNK_BYTES):
                    count = min(IO_CHUNK_BYTES, span.length - done)
                    self._files.write(span.file, span.position + done, view[:count])
                    view = view[count:]
        except BaseException:
            self._failed = True
            raise

    def write_zeros(self, object_id: str, offset: int, length: int) -> None:
        """Write ``length`` zero bytes at ``offset`` of an object. Raises as :meth:`write_region`."""
        self._check_region(object_id, offset, check_u64(length, f"object {object_id!r}: length"))
        for done in range(0, length, len(_ZEROS)):
            self.write_region(object_id, offset + done, memoryview(_ZEROS)[: length - done])

    def write_object(self, object_id: str, data: Buffer | Iterable[Buffer]) -> None:
        """Write an object from its start: bytes, or chunks in order. Raises as :meth:`write_region`."""
        chunks = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
        offset = 0
        for chunk in chunks:
            self.write_region(object_id, offset, chunk)
            offset += memoryview(chunk).nbytes

    def _check_region(self, object_id: str, offset: int, length: int) -> ArtifactObject:
        self._require_open()
        item = self.by_id.get(object_id)
        if item is None:
            raise ArtifactError(f"no object {object_id!r} to write")
        end = check_u64(offset, f"object {object_id!r}: offset") + length
        if end > item.bytes:
            raise ArtifactError(f"object {object_id!r}: region [{offset}, {end}) exceeds its {item.bytes} bytes")
        return item

    def finish(self) -> Directory:
        """Check that everything is written, publish parts and then the entry, and return the directory.

        Calling it again returns the directory again. After an error nothing of this writer is left on disk.

        Raises:
            ArtifactError: the writer failed or was aborted, or an object is not completely written.
            FileExistsError: a target appeared meanwhile; it is left alone.
            OSError: the system's reason.
        """
        if self._finished:
            return self.directory
        try:
            self._require_open()
            for item in self.objects:
                gap = self._coverage[item.id].first_gap(item.bytes)
                if gap is not None:
                    raise ArtifactError(f"object {item.id!r}: coverage is incomplete, [{gap[0]}, {gap[1]}) is missing")
            self._files.publish([*range(1, len(self.directory.files)), 0])
        except BaseException:
            self.abort()
            raise
        self._finished = True
        return self.directory

    def abort(self) -> None:
        """Delete everything an unfinished writer made; after a successful finish, nothing."""
        if not self._finished:
            self._failed = True
            self._files.discard()

    def _require_open(self) -> None:
        if self._finished:
            raise ArtifactError(f"{self.path}: the artifact is finished")
        if self._failed:
            raise ArtifactError(f"{self.path}: the writer failed or was aborted")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()
