"""Who uses the cache: the shared lock, the write lock, the readers' locks and the list of sessions.

All of them are ``flock`` locks: the kernel drops them when a process dies, whatever kills it, and they work between
containers, where process ids do not.

- ``use``: shared by every process that has the cache open; exclusive for what needs to be alone (quarantine,
  ``compact``, ``clear``).
- ``write``: exclusive, around each batch of writes. LMDB has such a lock for each environment; this one spans the
  index and the segments, so that pruning never sees a block whose row is still to come.
- ``readers``, ``readers-unleased``: shared by views of payloads, so that space under a view is not given back.
- ``sessions/ID``: exclusive, held as long as a process has the cache open for writing. Its text names the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
import errno
import fcntl
import os
from pathlib import Path
import sys
import threading
import time

from ninferbuild.errors import CacheError

SESSION_BYTES = 8


class FileLock:
    """One ``flock`` on a file of its own. Not for use by several threads at once."""

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path = path
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)

    def shared(self) -> None:
        """Wait for the lock; other shared holders are no obstacle."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def try_shared(self) -> bool:
        """Take the lock shared if nobody holds it alone."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def exclusive(self, timeout: float | None = None) -> bool:
        """Take the lock alone. With a timeout in seconds (0: do not wait) False when others keep it."""
        if timeout is None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            return True
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(0.01, timeout))

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)


class WriteLock:
    """The lock around each batch of writes: excludes other processes and other threads of this one. Reentrant."""

    def __init__(self, path: Path):
        self._lock = FileLock(path)
        self._thread = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._thread.acquire()
        try:
            if self._depth == 0:
                self._lock.exclusive()
            self._depth += 1
        except BaseException:
            self._thread.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._lock.release()
        self._thread.release()

    def close(self) -> None:
        self._lock.close()


@contextmanager
def momentarily_exclusive(path: Path, timeout: float) -> Iterator[bool]:
    """Hold ``path`` exclusively if that is possible within ``timeout`` seconds; yields whether it is held."""
    lock = FileLock(path)
    try:
        yield lock.exclusive(timeout)
    finally:
        lock.close()


class Session:
    """This process's entry in ``sessions/``."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.id = os.urandom(SESSION_BYTES)
        self._path = folder / self.id.hex()
        temporary = folder / f"{self.id.hex()}.tmp"
        self._lock = FileLock(temporary)
        try:
            self._lock.exclusive()
            with suppress(OSError):  # on a full disk it stays nameless
                temporary.write_text(_describe_process())
            temporary.rename(self._path)  # it appears locked, or not at all
        except BaseException:
            self._lock.close()
            temporary.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        try:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        finally:
            self._lock.close()


def live_sessions(folder: Path) -> dict[bytes, str]:
    """id → description of each process that has the cache open for writing. Entries of dead ones are removed."""
    live: dict[bytes, str] = {}
    try:
        entries = list(folder.iterdir())
    except OSError:
        return live
    for entry in entries:
        try:
            lock = FileLock(entry, read_only=True)
        except OSError:
            continue
        try:
            if lock.try_shared():  # its process is gone
                if entry.suffix != ".tmp" or time.time() - entry.stat().st_mtime > 60:
                    entry.unlink(missing_ok=True)
                continue
            if entry.suffix != ".tmp":
                live[bytes.fromhex(entry.name)] = entry.read_text(errors="replace") or "a process"
        except (OSError, ValueError):
            continue
        finally:
            lock.close()
    return live


def in_use(root: Path, sessions: Path, own: bytes | None) -> CacheError:
    """The error for what needs to be alone and is not."""
    others = [text for session, text in live_sessions(sessions).items() if session != own]
    names = "; ".join(others) if others else "a process that only reads it"
    return CacheError(f"cache {root} is in use by {names}; try again when that has finished")


def _describe_process() -> str:
    command = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])[:200]
    return f"process {os.getpid()} ({command})"
