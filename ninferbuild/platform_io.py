"""Calls that differ between systems, each with a portable fall-back.

Reading: :func:`open_for_reading`, :func:`read_into` and the advice functions. Files are read at explicit offsets into
buffers of the caller and never memory-mapped, so a file that shrinks is an error and not a signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import signal
import threading

ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a program to end."""

_LARGEST_READ = 1 << 30  # macOS refuses reads above 2 GiB; Linux shortens them


def open_for_reading(path: str | Path) -> int:
    """A descriptor of ``path``, closed on exec. The caller closes it."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))


if hasattr(os, "preadv"):

    def _read_some(descriptor: int, offset: int, buffer: memoryview) -> int:
        return os.preadv(descriptor, [buffer], offset)

else:

    def _read_some(descriptor: int, offset: int, buffer: memoryview) -> int:
        data = os.pread(descriptor, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)


def read_into(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fill ``buffer`` from ``offset`` as far as the file reaches; returns the number of bytes read.

    The file position is neither used nor moved, so threads may share a descriptor.
    """
    filled = 0
    while filled < len(buffer):
        count = _read_some(descriptor, offset + filled, buffer[filled : filled + _LARGEST_READ])
        if count == 0:
            break
        filled += count
    return filled


def advise_sequential(descriptor: int) -> None:
    """Tell the kernel that the file is mostly read forwards, which widens its read-ahead."""
    _advise(descriptor, 0, 0, "POSIX_FADV_SEQUENTIAL")


def advise_needed(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to start reading ``length`` bytes at ``offset`` now, without waiting for them."""
    _advise(descriptor, offset, length, "POSIX_FADV_WILLNEED")


def _advise(descriptor: int, offset: int, length: int, advice: str) -> None:
    value = getattr(os, advice, None)
    if value is None or not hasattr(os, "posix_fadvise"):
        return
    try:
        os.posix_fadvise(descriptor, offset, length, value)
    except OSError:  # advice only: pipes and some FUSE file systems refuse it
        return


def sync_directory(directory: str | Path) -> None:
    """Make renames inside ``directory`` durable, where the system can."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:  # Windows opens no directories
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network and FUSE file systems refuse; the files themselves are synced
        pass
    finally:
        os.close(descriptor)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Keep signals that end a program from interrupting the block; one that came meanwhile takes effect behind it.

    Only the main thread is ever interrupted. A signal's handler is exchanged because a mask would not do: another
    thread would take the signal, and Python would tell the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        number: handler
        for number in ENDING_SIGNALS
        if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)
    }
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def locked_directory(directory: str | Path) -> Iterator[None]:
    """Hold the lock of a directory; waits for other processes of this program that hold it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:  # Windows opens no directories
        yield
        return
    try:
        lock_exclusive(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


try:
    import fcntl
except ImportError:  # Windows: an open file cannot be removed there, which tells work from leftovers just as well

    def lock_exclusive(descriptor: int, *, wait: bool = False) -> None:
        """Hold a lock on an open file until it is closed."""

    def try_lock_exclusive(descriptor: int) -> bool:
        """Whether nobody holds a lock on the file."""
        return True

else:

    def lock_exclusive(descriptor: int, *, wait: bool = False) -> None:
        """Hold a lock on an open file until it is closed."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no locks on this file system: its leftovers are then removed by the next run
            return

    def try_lock_exclusive(descriptor: int) -> bool:
        """Whether nobody holds a lock on the file; takes it if so."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def keep_freed_memory(largest: int) -> None:
    """Let the allocator keep freed blocks of up to ``largest`` bytes instead of returning each to the system.

    A build frees and takes buffers of some MiB all the time; taking fresh pages for each costs more than filling them.
    Only glibc needs to be told, and other allocators are left as they are.
    """
    import ctypes

    mmap_threshold, trim_threshold = -3, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(mmap_threshold, largest)
    mallopt(trim_threshold, 4 * largest)
