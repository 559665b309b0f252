"""Segments: LMDB environments of payload blocks, digest → bytes. One takes new blocks, the others are sealed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import shutil
import threading

import lmdb

from ninferbuild.cache import btree, filesystem
from ninferbuild.cache.environment import engine_error, open_environment
from ninferbuild.errors import CacheError

DROPPED_SUFFIX = ".dropped"


@dataclass
class _Opened:
    environment: lmdb.Environment
    inode: int
    users: int = 0
    doomed: bool = False


class Segments:
    """All segments below one folder. Thread-safe."""

    def __init__(self, folder: Path, map_size: int, *, read_only: bool):
        self.folder = folder
        self._map_size = map_size
        self._read_only = read_only
        self._opened: dict[int, _Opened] = {}
        self._known = {number for number in self.ids() if self.on_disk(number)}
        self._lock = threading.RLock()

    def path(self, number: int) -> Path:
        return self.folder / f"{number:04d}"

    def ids(self) -> list[int]:
        """Numbers of the segments on the disk, ascending."""
        try:
            return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdigit())
        except FileNotFoundError:
            return []

    def exists(self, number: int) -> bool:
        """Whether a segment is there. One that another process dropped may be reported a while longer: the row of
        each block in it is gone or changed."""
        if number not in self._known:
            if not self.on_disk(number):
                return False
            self._known.add(number)
        return True

    def on_disk(self, number: int) -> bool:
        """Whether a segment is there now."""
        return self._inode(number) != 0

    def _inode(self, number: int) -> int:
        """Inode of the data file on the disk; 0 when there is none, or nothing in it yet."""
        try:
            status = (self.path(number) / btree.DATA_FILE).stat()
        except FileNotFoundError:
            return 0
        return status.st_ino if status.st_size else 0

    @contextmanager
    def _using(self, number: int) -> Iterator[lmdb.Environment]:
        with self._lock:
            opened = self._opened.get(number)
            if opened is not None and opened.inode != self._inode(number):  # another process dropped it
                self.forget(number)
                opened = None
            if opened is None:
                environment = open_environment(self.path(number), self._map_size, read_only=self._read_only)
                opened = self._opened[number] = _Opened(environment, self._inode(number))
                self._known.add(number)
            opened.users += 1
        try:
            yield opened.environment
        finally:
            with self._lock:
                opened.users -= 1
                if opened.doomed and not opened.users:
                    opened.environment.close()

    @contextmanager
    def reader(self, number: int) -> Iterator[lmdb.Transaction[memoryview]]:
        """A snapshot of one segment that gives memoryviews. None of them may outlive it.

        Raises:
            CacheError: the segment cannot be opened or read.
        """
        try:
            with self._using(number) as environment, environment.begin(buffers=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise engine_error(self.path(number), error) from error

    def put(self, number: int, blocks: Iterable[tuple[bytes, bytes | memoryview]]) -> None:
        """Store blocks in one transaction, creating the segment if need be. The caller holds the write lock.

        Raises:
            CacheError: they could not be written; nothing changed.
        """
        new = not self.on_disk(number)
        self.folder.mkdir(exist_ok=True)
        with self._using(number) as environment:
            try:
                with environment.begin(write=True) as transaction:
                    for digest, data in blocks:
                        transaction.put(digest, data)
            except lmdb.Error as error:
                raise engine_error(self.path(number), error) from error
        if new:
            filesystem.sync_directory(self.path(number))
            filesystem.sync_directory(self.folder)

    def used_bytes(self, number: int) -> int:
        """Bytes of the segment up to the last page in use; 0 when it does not exist."""
        try:
            descriptor = btree.open_data(self.path(number))
        except FileNotFoundError:
            return 0
        try:
            return btree.read_meta(descriptor).size
        except btree.DamagedError:
            return 0
        finally:
            os.close(descriptor)

    def allocated_bytes(self, number: int) -> int:
        return filesystem.allocated_bytes(self.path(number))

    def values(self, number: int) -> list[btree.Value]:
        """Every stored block. The caller holds the write lock. Raises :class:`btree.DamagedError`."""
        descriptor = btree.open_data(self.path(number))
        try:
            return list(btree.values(descriptor))
        finally:
            os.close(descriptor)

    def punch(self, number: int, dead: Iterable[btree.Value]) -> bool:
        """Give the space of dead blocks back. The caller holds the write lock; nobody may be reading the blocks.

        The first page of each run stays: the engine reads its header when it reuses the run. False where the file
        system cannot make holes.
        """
        descriptor = os.open(self.path(number) / btree.DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            page = btree.read_meta(descriptor).page_size
            for value in dead:
                if value.pages > page:
                    offset = value.begin - btree.PAGE_HEADER + page
                    if not filesystem.punch_hole(descriptor, offset, value.pages - page):
                        return False
            return True
        finally:
            os.close(descriptor)

    def drop(self, number: int) -> None:
        """Remove a segment. Views of it that are open in this process stay valid."""
        path = self.path(number)
        aside = path.with_name(path.name + DROPPED_SUFFIX)
        with self._lock:
            try:
                path.rename(aside)
            except FileNotFoundError:
                return
            self.forget(number)
        shutil.rmtree(aside, ignore_errors=True)

    def forget(self, number: int) -> None:
        """Close a segment once nobody in this process uses it."""
        with self._lock:
            self._known.discard(number)
            opened = self._opened.pop(number, None)
            if opened is not None:
                opened.doomed = True
                if not opened.users:
                    opened.environment.close()

    def forget_dropped(self) -> None:
        """Let go of segments that other processes have dropped, so that their space comes free."""
        with self._lock:
            for number, opened in list(self._opened.items()):
                if opened.inode != self._inode(number):
                    self.forget(number)

    def idle(self) -> bool:
        """Whether nobody in this process reads a payload now."""
        with self._lock:
            return not any(opened.users for opened in self._opened.values())

    def close(self) -> None:
        with self._lock:
            if not self.idle():
                raise CacheError("the cache is closed while payloads are being read")
            for opened in self._opened.values():
                opened.environment.close()
            self._opened.clear()
