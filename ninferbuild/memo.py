"""The digest memo: digests of regions that need not be read again, and when a file may be trusted not to have changed.

A row is (real path, inode, size, mtime, ctime, header digest, byte ranges) → digest. It is used only on file systems
known to keep a kernel ctime, and only if the file was last modified well before it was hashed: a write within the same
clock tick as the hashing would leave no trace in its times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
import struct
import threading
import time
from typing import TYPE_CHECKING

import xxhash

from ninferbuild.cache.filesystem import kind_of
from ninferbuild.errors import SourceChangedError
from ninferbuild.sources.regions import FileIdentity, Region, SourceFile

if TYPE_CHECKING:
    from ninferbuild.cache import Cache

KERNEL_CTIME = frozenset({"ext4", "xfs", "btrfs", "zfs", "apfs", "tmpfs"})
"""File systems on which every write moves the change time."""

SETTLED_NS = 2_000_000_000
"""How long before the hashing a file must have been left alone, in nanoseconds."""


_BOUNDS = struct.Struct("<QQ")


class Memo:
    """Digests of regions across builds, and the state of source files within one build.

    Args:
        cache: where rows are kept; None remembers nothing.
        trust_stat: use rows on any file system (``[cache] trust_stat``).
        rehash: use no row.
    """

    def __init__(self, cache: Cache | None, *, trust_stat: bool = False, rehash: bool = False):
        self._cache = cache
        self._trust_stat = trust_stat
        self._rehash = rehash
        self._seen: dict[int, tuple[SourceFile, FileIdentity | None, bytes]] = {}
        self._trusted: dict[str, bool] = {}
        self._empty = False
        self._lock = threading.Lock()
        self.distrusted: dict[str, str] = {}
        """File system type → a path on it, for which the build re-reads instead of trusting file times."""

    def _file(self, file: SourceFile) -> tuple[SourceFile, FileIdentity | None, bytes]:
        # The file object stays referenced: its id() must not be reused while this build runs.
        entry = self._seen.get(id(file))
        if entry is None:
            with self._lock:
                entry = self._seen.get(id(file))
                if entry is None:
                    identity = file.identity()
                    entry = self._seen[id(file)] = (file, identity, _file_key(identity, file))
        return entry

    def paths(self) -> list[Path]:
        """The files behind the regions that were asked for."""
        return [Path(identity.path) for _, identity, _ in list(self._seen.values()) if identity is not None]

    def key(self, region: Region) -> bytes:
        """Identity of a region: equal for equal byte ranges of the same unchanged files, 16 bytes."""
        spans = region.spans
        if len(spans) == 1:
            span = spans[0]
            entry = self._seen.get(id(span.file)) or self._file(span.file)
            return xxhash.xxh3_128_digest(entry[2] + _BOUNDS.pack(span.begin, span.end))
        self._empty |= not spans
        hasher = xxhash.xxh3_128()
        current: SourceFile | None = None
        for span in spans:
            if span.file is not current:
                current = span.file
                hasher.update(self._file(current)[2])
            hasher.update(_BOUNDS.pack(span.begin, span.end))
        return hasher.digest()

    def lies_in_memory(self, region: Region) -> bool:
        """Whether no byte of the region comes from a file."""
        return all(self._file(file)[1] is None for file in region.files)

    @property
    def may_know(self) -> bool:
        """Whether the digest of a region that :meth:`key` was asked of may be had without reading a file."""
        in_memory = (identity is None for _, identity, _ in list(self._seen.values()))
        return self._recalls or self._empty or any(in_memory)

    @property
    def _recalls(self) -> bool:
        return self._cache is not None and not self._rehash

    def known(self, regions: Sequence[Region], keys: Sequence[bytes]) -> list[bytes | None]:
        """Remembered digests, None where a region has to be read."""
        if self._cache is None or not self._recalls:
            return [None] * len(keys)
        wanted = [index for index, region in enumerate(regions) if self._may_trust(region)]
        found: list[bytes | None] = [None] * len(keys)
        for index, digest in zip(wanted, self._cache.remembered([keys[index] for index in wanted]), strict=True):
            found[index] = digest
        return found

    def _may_trust(self, region: Region) -> bool:
        return all(map(self._trusts_file, region.files))

    def _trusts_file(self, file: SourceFile) -> bool:
        identity = self._file(file)[1]
        if identity is None:
            return False
        if self._trust_stat:
            return True
        trusted = self._trusted.get(identity.path)
        if trusted is None:
            kind = kind_of(Path(identity.path)) or "unknown"
            trusted = self._trusted[identity.path] = kind in KERNEL_CTIME
            if not trusted:
                self.distrusted.setdefault(kind, identity.path)
        return trusted

    def keepable(self, region: Region, hashed_at_ns: int) -> bool:
        """Whether a digest taken at ``hashed_at_ns`` (wall clock) may be remembered."""
        for file in region.files:
            identity = self._file(file)[1]
            if identity is None or not self._trusts_file(file):
                return False
            if hashed_at_ns - max(identity.mtime_ns, identity.ctime_ns) < SETTLED_NS:
                return False
        return True

    def check_unchanged(self, regions: Iterable[Region]) -> None:
        """Compare the files behind ``regions`` with what they were when this build first looked at them.

        Raises:
            SourceChangedError: one of them was modified in the meantime.
        """
        for file in {id(file): file for region in regions for file in region.files}.values():
            before = self._file(file)[1]
            if before is not None and file.identity() != before:
                raise SourceChangedError(f"{before.path}: the file changed while it was read; build again")

    @staticmethod
    def now_ns() -> int:
        """The wall clock that file times are compared with, in nanoseconds."""
        return time.time_ns()


def _file_key(identity: FileIdentity | None, file: SourceFile) -> bytes:
    if identity is None:  # bytes in memory: this object and no other
        return b"memory" + id(file).to_bytes(8, "little")
    numbers = (identity.inode, identity.size, identity.mtime_ns, identity.ctime_ns)
    text = "\0".join([identity.path, *map(str, numbers), identity.header.hex()])
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogateescape"))
