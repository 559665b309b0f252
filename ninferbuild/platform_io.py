"""Calls that differ between systems, each with a portable fall-back.

Reading: :func:`open_for_reading`, :func:`read_into` and the advice functions. Files are read at explicit offsets into
buffers of the caller and never memory-mapped, so a file that shrinks is an error and not a signal.

Writing: :func:`start_writeback` and :func:`finish_writeback` send bytes to the disk before a sync asks for them, and
:func:`clone_range` lets two files share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import errno
import functools
import os
from pathlib import Path
import signal
import struct
import sys
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


def advise_unneeded(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel forget pages of a file, except those that are not on the disk yet or in use."""
    _advise(descriptor, offset, length, "POSIX_FADV_DONTNEED")


def _advise(descriptor: int, offset: int, length: int, advice: str) -> None:
    value = getattr(os, advice, None)
    if value is None or not hasattr(os, "posix_fadvise"):
        return
    try:
        os.posix_fadvise(descriptor, offset, length, value)
    except OSError:  # advice only: pipes and some FUSE file systems refuse it
        return


_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # SYNC_FILE_RANGE_*


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel begin to write ``length`` bytes at ``offset`` to the disk, where it can be told.

    Raises:
        OSError: what was written before could not be stored.
    """
    _sync_file_range(descriptor, offset, length, _WRITE)


def finish_writeback(descriptor: int, offset: int, length: int) -> None:
    """Wait until ``length`` bytes at ``offset`` have left memory for the disk; elsewhere than on Linux, all bytes.

    Less than a sync: neither the file's length nor the disk's own cache is looked after.

    Raises:
        OSError: the bytes could not be stored.
    """
    if not _sync_file_range(descriptor, offset, length, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)


def _sync_file_range(descriptor: int, offset: int, length: int, flags: int) -> bool:
    """False where there is no such call."""
    import ctypes

    call = _sync_file_range_call()
    if call is None:
        return False
    while call(descriptor, offset, length, flags):
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
            return False
        if code != errno.EINTR:
            # The kernel tells a descriptor once of an error of write-back: the sync at the end may not hear of it.
            raise OSError(code, os.strerror(code))
    return True


@functools.cache
def _sync_file_range_call() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def memory_bytes() -> int | None:
    """Bytes of physical memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


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

    def clone_range(source: int, source_offset: int, length: int, target: int, offset: int) -> None:
        """Raises ``OSError``: files share nothing here."""
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

else:
    _FICLONERANGE = getattr(fcntl, "FICLONERANGE", 0x4020940D)
    _CLONE_RANGE = struct.Struct("=qQQQ")  # struct file_clone_range

    def clone_range(source: int, source_offset: int, length: int, target: int, offset: int) -> None:
        """Let ``target`` share bytes of ``source`` until either is written to (XFS, btrfs).

        Offsets and length are multiples of the file system's block; both files lie on it.

        Raises:
            OSError: the file system cannot, or not these ranges.
        """
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.ioctl(target, _FICLONERANGE, _CLONE_RANGE.pack(source, source_offset, length, offset))

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
