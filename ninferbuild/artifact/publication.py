"""Files that come into being complete or not at all.

Each file is written under a temporary name beside its target. Publication gives all of them their names without ever
replacing a file that exists, in an order the caller chooses; a failure takes back what was published.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import ctypes
import errno
import os
from pathlib import Path
import secrets
import sys
import threading

SYNC_BYTES = 64 << 20
"""After this many bytes written, dirty files are synced and dropped from the page cache."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class PendingFiles:
    """Temporaries of a set of target files, created with their final lengths and filled with zeros.

    Args:
        targets: (path, length in bytes), in the order in which files are numbered.

    Raises:
        FileExistsError: a target exists; nothing was created.
        OSError: the system's reason why a temporary cannot be created.
    """

    def __init__(self, targets: Sequence[tuple[Path, int]]):
        self._targets = [path for path, _ in targets]
        self._lengths = [length for _, length in targets]
        self._temporaries: list[Path] = []
        self._descriptors: list[int] = []
        self._published: list[tuple[Path, os.stat_result]] = []
        self._dirty: set[int] = set()
        self._unsynced = 0
        self._lock = threading.Lock()
        for path in self._targets:
            if path.exists():
                raise FileExistsError(errno.EEXIST, "refusing to replace an existing file", str(path))
        try:
            for path, length in targets:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._create(path, length)
        except BaseException:
            self.discard()
            raise

    def _create(self, target: Path, length: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        while True:
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
            try:
                descriptor = os.open(temporary, flags, 0o666)
            except FileExistsError:
                continue
            break
        self._temporaries.append(temporary)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, length)

    def write(self, file: int, position: int, data: memoryview) -> None:
        """Write all of ``data`` at ``position`` of file number ``file``; safe from several threads."""
        descriptor = self._descriptors[file]
        done = 0
        while done < len(data):
            count = self._write_once(descriptor, position + done, data[done:])
            if count <= 0:
                raise OSError(errno.EIO, "a write made no progress", str(self._targets[file]))
            done += count
        with self._lock:
            self._dirty.add(file)
            self._unsynced += len(data)
            if self._unsynced < SYNC_BYTES:
                return
            dirty, self._dirty, self._unsynced = self._dirty, set(), 0
        for index in dirty:
            self._sync(index)

    def _write_once(self, descriptor: int, position: int, data: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(descriptor, data, position)
        with self._lock:
            os.lseek(descriptor, position, os.SEEK_SET)
            return os.write(descriptor, data)

    def _sync(self, file: int) -> None:
        descriptor = self._descriptors[file]
        getattr(os, "fdatasync", os.fsync)(descriptor)
        if hasattr(os, "posix_fadvise"):
            # Written once and read by nobody soon: leave the page cache to the sources.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def publish(self, order: Sequence[int]) -> None:
        """Sync and close every file, then give each its name, in ``order``; nothing is replaced.

        Raises:
            FileExistsError: a target appeared meanwhile.
            OSError: a file has lost its length, or the system refused.
        """
        for index, descriptor in enumerate(self._descriptors):
            length = os.fstat(descriptor).st_size
            if length != self._lengths[index]:
                raise OSError(errno.EIO, f"{length} bytes instead of {self._lengths[index]}", str(self._targets[index]))
            self._sync(index)
        self._close()
        for index in order:
            # Noted first: an interrupt right after the call must find it. Discarding compares identities.
            self._published.append((self._targets[index], self._temporaries[index].stat()))
            _publish(self._temporaries[index], self._targets[index])
        for temporary in self._temporaries:
            temporary.unlink(missing_ok=True)
        for directory in {path.parent for path in self._targets}:
            _sync_directory(directory)
        self._published.clear()
        self._temporaries.clear()

    def discard(self) -> None:
        """Delete the temporaries and whatever an unfinished publication published; foreign files stay."""
        self._close()
        for path, identity in reversed(self._published):
            with contextlib.suppress(OSError):
                if os.path.samestat(path.lstat(), identity):
                    path.unlink()
        self._published.clear()
        for temporary in self._temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self._temporaries.clear()

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _publish(temporary: Path, target: Path) -> None:
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            _rename_new(temporary, target)
        except NotImplementedError:
            raise error from None


def _rename_new(source: Path, target: Path) -> None:
    """Rename without replacing, on file systems without hard links.

    Raises:
        FileExistsError: the target exists.
        NotImplementedError: this system has no such call.
    """
    if sys.platform == "win32":
        source.rename(target)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = os.fsencode(source), os.fsencode(target)
    if hasattr(libc, "renameat2"):
        at_fdcwd, rename_noreplace = -100, 1
        failed = libc.renameat2(at_fdcwd, arguments[0], at_fdcwd, arguments[1], rename_noreplace)
    elif hasattr(libc, "renamex_np"):
        rename_excl = 4
        failed = libc.renamex_np(*arguments, rename_excl)
    else:
        raise NotImplementedError
    if failed:
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL):
            raise NotImplementedError
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def _sync_directory(directory: Path) -> None:
    # Not every system can open or sync a directory, and the files themselves are synced already.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
