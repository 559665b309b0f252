"""Reading ``.ninfer`` file sets: the entry at once, each part when a range needs it."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import threading
from types import TracebackType
from typing import BinaryIO, Self

from ninferbuild.artifact.directory import decode_directory
from ninferbuild.artifact.framing import (
    HEADER,
    IO_CHUNK_BYTES,
    PART_MAGIC,
    SegmentMap,
    entry_header,
    part_name,
    payload_start,
)
from ninferbuild.artifact.objects import ArtifactObject, validate_encoding
from ninferbuild.artifact.primitives import ArtifactError, check_positive, check_u64


def _entry_of_set(path: Path) -> Path:
    """``path``; where it leads, if it is a symbolic link and the parts lie there and not beside the link."""
    if not path.is_symlink() or path.with_name(part_name(path.name, 1)).exists():
        return path
    real = Path(os.path.realpath(path))
    return real if real.with_name(part_name(real.name, 1)).exists() else path


class Artifact:
    """An open artifact; a context manager. Reads are safe from several threads.

    Attributes:
        path: the entry.
        directory: the checked directory.
        artifact_id: 16 bytes that the entry and its parts share.
        payload_offset: where the payload starts in the entry.
        objects: all objects, in file order.
        by_id: object id to object.

    Raises:
        ArtifactError: the entry is not a valid one; the message names the file.
        OSError: the system's reason why the entry cannot be opened or read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = _entry_of_set(Path(path))
        self._lock = threading.Lock()
        self._closed = False
        entry = self.path.open("rb")
        self._files: dict[int, BinaryIO] = {0: entry}
        try:
            self._read_entry(entry)
        except ArtifactError as error:
            self.close()
            raise ArtifactError(f"{self.path}: {error}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the artifact whose entry file is ``path``; a context manager. Parts are opened when they are read.

        Raises:
            ArtifactError: the framing or the directory breaks a rule.
            OSError: the system's reason.
        """
        return cls(path)

    def _read_entry(self, entry: BinaryIO) -> None:
        file_bytes = os.fstat(entry.fileno()).st_size
        json_bytes, self.artifact_id = entry_header(entry.read(HEADER.size))
        if json_bytes > file_bytes - HEADER.size:
            raise ArtifactError(f"the header declares {json_bytes} bytes of directory; the file has {file_bytes}")
        text = entry.read(json_bytes)
        if len(text) != json_bytes:
            raise ArtifactError("the file ended inside its directory")
        self.directory = decode_directory(text, entry_name=self.path.name)
        self.payload_offset = payload_start(json_bytes)
        self.objects = self.directory.objects
        self.by_id = {item.id: item for item in self.objects}
        self._checked: set[str] = set()
        self._segments = SegmentMap(self.directory.files, self.payload_offset)
        expected = self._segments.file_length(0)
        if file_bytes != expected:
            raise ArtifactError(f"the file has {file_bytes} bytes; its directory declares {expected}")

    @property
    def payload_bytes(self) -> int:
        """Length of the logical payload."""
        return self._segments.payload_bytes

    @property
    def file_bytes(self) -> int:
        """Length of all files of the set as declared, framing included; parts need not exist."""
        return sum(self._segments.file_length(index) for index in range(len(self.directory.files)))

    def object(self, object_id: str) -> ArtifactObject:
        """The object of that id, its encoding checked.

        Raises:
            ArtifactError: unknown id, or an encoding that is unknown or does not fit the object.
        """
        item = self.by_id.get(object_id)
        if item is None:
            raise ArtifactError(f"{self.path}: no object {object_id!r}")
        if object_id not in self._checked:
            validate_encoding(item)
            self._checked.add(object_id)
        return item

    def iter_range(self, offset: int, length: int, chunk_bytes: int = IO_CHUNK_BYTES) -> Iterator[bytes]:
        """Logical bytes ``[offset, offset + length)`` in pieces of at most ``chunk_bytes``.

        Raises:
            ArtifactError: bad arguments, a range that exceeds the payload, a closed artifact, a part that does not
                belong to the entry, or a file that ends early.
            FileNotFoundError: a part that the range needs is missing.
        """
        check_u64(offset, "offset")
        check_u64(length, "length")
        check_positive(chunk_bytes, "chunk bytes")
        if offset + length > self.payload_bytes:
            raise ArtifactError(
                f"{self.path}: range [{offset}, {offset + length}) exceeds payload of {self.payload_bytes} bytes"
            )
        self._require_open()
        for span in self._segments.spans(offset, offset + length):
            for done in range(0, span.length, chunk_bytes):
                yield self._read(span.file, span.position + done, min(chunk_bytes, span.length - done))

    def read_range(self, offset: int, length: int) -> bytes:
        """Logical bytes ``[offset, offset + length)``. Raises as :meth:`iter_range`."""
        return b"".join(self.iter_range(offset, length))

    def iter_object(self, object_id: str, chunk_bytes: int = IO_CHUNK_BYTES) -> Iterator[bytes]:
        """The encoded bytes of an object in pieces. Raises as :meth:`object` and :meth:`iter_range`."""
        item = self.object(object_id)
        yield from self.iter_range(item.offset, item.bytes, chunk_bytes)

    def read_object(self, object_id: str) -> bytes:
        """The encoded bytes of an object. Raises as :meth:`object` and :meth:`iter_range`."""
        return b"".join(self.iter_object(object_id))

    def close(self) -> None:
        """Close all files; every later read raises ``ArtifactError``."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ArtifactError(f"{self.path}: the artifact is closed")

    def _read(self, index: int, position: int, length: int) -> bytes:
        # One lock for seek and read: positional reads are not available everywhere, and a reader that wants parallel
        # input can open the artifact once for each thread.
        with self._lock:
            self._require_open()
            file = self._files.get(index) or self._open_part(index)
            file.seek(position)
            data = file.read(length)
        if len(data) != length:
            raise ArtifactError(f"{file.name}: the file ended {length - len(data)} bytes early")
        return data

    def _open_part(self, index: int) -> BinaryIO:
        name = self.directory.files[index].path
        assert name is not None
        file = self.path.with_name(name).open("rb")
        try:
            if file.read(HEADER.size) != HEADER.pack(PART_MAGIC, index, self.artifact_id):
                raise ArtifactError(f"{file.name}: continuation does not belong to this entry {self.path.name!r}")
            actual, expected = os.fstat(file.fileno()).st_size, self._segments.file_length(index)
            if actual != expected:
                raise ArtifactError(f"{file.name}: the file has {actual} bytes; the directory declares {expected}")
        except BaseException:
            file.close()
            raise
        self._files[index] = file
        return file
