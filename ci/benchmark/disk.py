"""What the disk can do: read and write rates, plain copies, and whether the page cache was dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import errno
import os
from pathlib import Path
import shutil
import time

THREADS = (1, 2, 4, 8)
PIECE = 8 << 20
"""Bytes of one read or write."""

PAGE_CACHE_ONLY = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class Rate:
    """The best of several numbers of threads. ``all`` has the bytes a second of each number."""

    bytes_per_second: float
    threads: int
    all: dict[int, float]


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` lies on."""
    target = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def drop_pages(paths: Sequence[Path]) -> str | None:
    """Drop the page cache of files; None when that worked, else why reads that follow are not cold."""
    kind = file_system(paths[0])
    if kind in PAGE_CACHE_ONLY:
        return f"{kind} lies in memory: reads are never cold there"
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    left = resident(paths)
    if left is None:
        return f"{kind} does not tell whether the page cache was dropped"
    return f"{kind} kept {left:.0%} of the sampled pages in memory" if left > 0.1 else None


def resident(paths: Sequence[Path], samples: int = 16) -> float | None:
    """The part of sampled pages of files that is in the page cache; None where the system does not tell."""
    found = total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            for index in range(samples):
                try:
                    os.preadv(descriptor, [bytearray(1)], size * index // samples, os.RWF_NOWAIT)
                    found += 1
                except BlockingIOError:
                    pass
                except OSError as error:
                    if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                        return None
                    raise
                total += 1
        finally:
            os.close(descriptor)
    return found / total


def warm_pages(paths: Sequence[Path]) -> None:
    """Read files once, so that later reads find them in the page cache."""
    _read(_pieces(paths, None), 4)


def read_rate(paths: Sequence[Path], limit: int, *, cold: bool) -> Rate:
    """Bytes a second of reading files into reused buffers, at most ``limit`` bytes of them for each measurement."""
    pieces = _pieces(paths, limit)
    size = sum(length for _, _, length in pieces)
    if not cold:
        _read(pieces, 4)

    def measure(threads: int) -> float:
        if cold:
            drop_pages(paths)
        return size / _timed(lambda: _read(pieces, threads))

    return _best(measure)


def write_rate(path: Path, size: int, data: memoryview) -> Rate:
    """Bytes a second of writing one new file of ``size`` bytes in place, fsync included. The file is removed."""
    offsets = range(0, size, PIECE)

    def measure(threads: int) -> float:
        os.sync()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, size)

            def write(offset: int) -> None:
                length = min(PIECE, size - offset)
                start = offset * 7 % max(1, len(data) - length)
                _write_at(descriptor, offset, data[start : start + length])

            def run() -> None:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(write, offsets))
                os.fsync(descriptor)

            return size / _timed(run)
        finally:
            os.close(descriptor)
            path.unlink()

    return _best(measure)


def copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy of one file, fsync included."""

    def run() -> None:
        shutil.copyfile(source, target)
        descriptor = os.open(target, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return _timed(run)


def same_from(first: Path, first_offset: int, second: Path, second_offset: int) -> bool:
    """Whether two files are equal from the given offsets to their ends."""
    with first.open("rb") as one, second.open("rb") as other:
        one.seek(first_offset)
        other.seek(second_offset)
        while True:
            left, right = one.read(PIECE), other.read(PIECE)
            if left != right:
                return False
            if not left:
                return True


Piece = tuple[Path, int, int]


def _pieces(paths: Sequence[Path], limit: int | None) -> list[Piece]:
    pieces = [
        (path, offset, min(PIECE, size - offset))
        for path in paths
        for size in [path.stat().st_size]
        for offset in range(0, size, PIECE)
    ]
    return pieces if limit is None else pieces[: max(1, limit // PIECE)]


def _read(pieces: Sequence[Piece], threads: int) -> None:
    def work(mine: Sequence[Piece]) -> None:
        buffer = memoryview(bytearray(PIECE))
        for path, offset, length in mine:
            descriptor = descriptors[path]
            done = 0
            while done < length:
                count = os.preadv(descriptor, [buffer[done:length]], offset + done)
                if not count:
                    raise OSError(f"{path} ends at byte {offset + done}")
                done += count

    descriptors = {path: os.open(path, os.O_RDONLY) for path in {path for path, _, _ in pieces}}
    try:
        with ThreadPoolExecutor(threads) as pool:
            # Neighbours go to different threads, so that together they read forwards.
            list(pool.map(work, [pieces[index::threads] for index in range(threads)]))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        offset, data = offset + count, data[count:]


def _best(measure: Callable[[int], float]) -> Rate:
    rates = {threads: measure(threads) for threads in THREADS}
    threads = max(rates, key=lambda count: rates[count])
    return Rate(rates[threads], threads, rates)


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
