"""The files that regions refer to: checkpoint files on disk, and bytes in memory."""

from __future__ import annotations

from collections import OrderedDict
import os
from pathlib import Path
import threading

from ninferbuild import platform_io
from ninferbuild.errors import SourceChangedError
from ninferbuild.opening import opening
from ninferbuild.sources.regions import FileIdentity

OPEN_FILES = 64
"""Checkpoint descriptors that are kept open at most, besides those being read at the moment."""


class _Descriptor:
    __slots__ = ("number", "users")

    def __init__(self, number: int):
        self.number = number
        self.users = 0


class DescriptorPool:
    """Descriptors of the files used last, shared by all threads."""

    def __init__(self, limit: int = OPEN_FILES):
        self.limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[CheckpointFile, _Descriptor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, file: CheckpointFile) -> _Use:
        """A context in which the descriptor of ``file`` that it gives stays open."""
        return _Use(self, file)

    def take(self, file: CheckpointFile) -> _Descriptor:
        """The descriptor of ``file``, which stays open until it is given back."""
        with self._lock:
            entry = self._open.get(file)
            if entry is None:
                entry = self._open[file] = _Descriptor(file.open_descriptor())
            self._open.move_to_end(file)
            entry.users += 1
        return entry

    def give_back(self, file: CheckpointFile, entry: _Descriptor) -> None:
        """Let a descriptor that was taken be closed."""
        with self._lock:
            entry.users -= 1
            if self._open.get(file) is not entry:  # forgotten while in use
                if not entry.users:
                    os.close(entry.number)
            elif len(self._open) > self.limit:
                self._close_unused()

    def _close_unused(self) -> None:
        for file, entry in list(self._open.items()):
            if len(self._open) <= self.limit:
                return
            if not entry.users:
                del self._open[file]
                os.close(entry.number)

    def forget(self, file: CheckpointFile) -> None:
        """Close the descriptor of ``file``, at once or when its last reader is done."""
        with self._lock:
            entry = self._open.pop(file, None)
            if entry is not None and not entry.users:
                os.close(entry.number)


class _Use:
    """A class, since planning reads very many scalars and a generator takes several times as long."""

    __slots__ = ("_entry", "_file", "_pool")

    def __init__(self, pool: DescriptorPool, file: CheckpointFile):
        self._pool = pool
        self._file = file

    def __enter__(self) -> int:
        self._entry = self._pool.take(self._file)
        return self._entry.number

    def __exit__(self, *_exception: object) -> None:
        self._pool.give_back(self._file, self._entry)


DESCRIPTORS = DescriptorPool()


class CheckpointFile:
    """A file on disk that is read at offsets. Thread-safe.

    The inode, size and modification time at the first look are the file's for good: once one of them differs, reading
    or asking for the identity raises :class:`SourceChangedError`, so bytes of two versions never mix.

    Args:
        path: the path as it was given; error messages use it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._real_path = ""
        self._stat: os.stat_result | None = None
        self._lock = threading.Lock()
        self.bytes_read = 0
        """Payload bytes read so far."""

    @property
    def path(self) -> Path:
        return self._path

    @property
    def size(self) -> int:
        """Bytes of the file at the first look."""
        return self._first_look().st_size

    def header_digest(self) -> bytes:
        """Digest of what offsets into the file were taken from; empty for a file without a header."""
        return b""

    def _first_look(self) -> os.stat_result:
        with self._lock:
            if self._stat is None:
                self._real_path = os.path.realpath(self._path)
                self._stat = os.stat(self._real_path)
            return self._stat

    def _require_unchanged(self, now: os.stat_result) -> None:
        first = self._first_look()
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (first.st_ino, first.st_size, first.st_mtime_ns):
            raise SourceChangedError(f"{self._path}: the file changed while it was in use; run the build again")

    def identity(self) -> FileIdentity:
        """The file as it is on disk now.

        Raises:
            SourceChangedError: it is not the file of the first look any more.
        """
        header = self.header_digest()
        self._first_look()
        now = os.stat(self._real_path)
        self._require_unchanged(now)
        return FileIdentity(self._real_path, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns, header)

    def open_descriptor(self) -> int:
        """A new descriptor, for the pool."""
        self._first_look()
        with opening(self):
            descriptor = platform_io.open_for_reading(self._real_path)
        try:
            self._require_unchanged(os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        platform_io.advise_sequential(descriptor)
        return descriptor

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``.

        Raises:
            ValueError: the file ends before.
            OSError: the system cannot read it; names the file.
        """
        self.read_uncounted(offset, buffer)
        with self._lock:
            self.bytes_read += len(buffer)

    def read_uncounted(self, offset: int, buffer: memoryview) -> None:
        """:meth:`read_into` for headers, which are no payload."""
        with DESCRIPTORS.use(self) as descriptor:
            try:
                count = platform_io.read_into(descriptor, offset, buffer)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
        if count != len(buffer):
            raise ValueError(
                f"{self._path}: the file ends at byte {offset + count}, {len(buffer) - count} bytes short; "
                "it is truncated, download it again"
            )

    def close(self) -> None:
        """Give the descriptor back; reading again opens a new one."""
        DESCRIPTORS.forget(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"


class MemoryFile:
    """Bytes in memory, seen as a source file without a path."""

    __slots__ = ("_data", "label")

    def __init__(self, data: bytes, label: str):
        self._data = memoryview(data)
        self.label = label

    @property
    def path(self) -> None:
        return None

    def identity(self) -> None:
        return None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Raises ``ValueError`` when the bytes end before."""
        end = offset + len(buffer)
        if not 0 <= offset <= end <= len(self._data):
            raise ValueError(f"{self.label}: bytes [{offset}, {end}) lie outside {len(self._data)}")
        buffer[:] = self._data[offset:end]
