"""Opening LMDB environments so that a bad file is a message and never a crash.

Stamps: the last process to close a cache leaves beside each data file the number of its newest transaction and a
digest of its pages. A stamp that still fits proves that the environment was closed in order and that nothing changed
since; without one the file is walked page by page before the engine may map it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
import os
from pathlib import Path
import time

import lmdb
import msgspec

from ninferbuild.cache import btree, filesystem
from ninferbuild.errors import CacheDamagedError, CacheError

MAX_READERS = 1024
STAMP_FILE = "stamp"
SUSPECT_FILE = "suspect"
_DAMAGE = (
    *(lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.IncompatibleError),
    *(lmdb.BadTxnError, lmdb.BadDbiError, lmdb.BadValsizeError, lmdb.CursorFullError, lmdb.PageFullError),
)
"""What the engine says when pages are not what it wrote."""

_LOCK_FILE = "lock.mdb"
_LOCK_BYTES = MAX_READERS * 64 + 4096  # one cache line a reader, and the header
_NEW_BYTES = 1 << 20  # room for two meta pages, a lock file and the first transactions
_ENGINE = 0  # LMDB 0.9: the format that `btree` reads


class Stamp(msgspec.Struct, frozen=True):
    """State of an environment when it was last closed in order."""

    transaction: int
    digest: bytes


Digest = Callable[[int], bytes]


@dataclass(frozen=True)
class Health:
    """What an environment looks like before the engine has touched it.

    Attributes:
        damage: why the engine must not map it; None when it may.
        altered: it was closed in order, but its bytes are not those of then: single records may be damaged.
    """

    damage: str | None = None
    altered: bool = False


def examine(folder: Path, digest: Digest, *, after_crash: bool = False) -> Health:
    """Look at the environment in ``folder``. Nobody else may have it open.

    Args:
        after_crash: it was not closed in order. Then no stamp is believed: bits that flipped while it was open are in
            the stamp of a later close, and may be what the last process died of.

    A folder without a data file, or with an empty one, is sound: its creation was interrupted.
    """
    try:
        descriptor = btree.open_data(folder)
    except FileNotFoundError:
        return Health()
    except OSError as error:
        return Health(f"data file cannot be read: {error.strerror}")
    try:
        if os.fstat(descriptor).st_size == 0:
            return Health()
        if (folder / SUSPECT_FILE).exists():
            return Health("the engine could not read it")
        meta = btree.read_meta(descriptor)
        stamp = _read_stamp(folder)
        stamped = stamp is not None and stamp.transaction == meta.transaction
        intact = stamp is not None and stamped and stamp.digest == digest(descriptor)
        if intact and not after_crash:
            return Health()
    except (btree.DamagedError, OSError) as error:
        return Health(str(error))
    finally:
        os.close(descriptor)
    return Health(walk(folder), altered=stamped and not intact)


def walk(folder: Path) -> str | None:
    """The first fault of the environment's pages, all of which are visited, or None. Nobody may write meanwhile."""
    from lmdb import verify  # pure Python; only needed after an unclean shutdown

    try:
        problems = verify.verify(str(folder), subdir=True)  # type: ignore[no-untyped-call]
    except Exception as error:  # the walker meets arbitrary bytes, whatever it trips over is damage
        return str(error) or type(error).__name__
    return problems[0] if problems else None


def stamp(folder: Path, digest: Digest) -> None:
    """Note that the environment was closed in order. Nobody else may have it open.

    A full disk is no reason to fail: without a stamp the next process checks the file page by page.
    """
    try:
        descriptor = btree.open_data(folder)
    except OSError:
        return
    try:
        meta = btree.read_meta(descriptor)
        old = _read_stamp(folder)
        if old is None or old.transaction != meta.transaction:
            new = Stamp(meta.transaction, digest(descriptor))
            filesystem.replace_file(folder / STAMP_FILE, msgspec.msgpack.encode(new))
    except (btree.DamagedError, OSError):
        return
    finally:
        os.close(descriptor)


def suspect(folder: Path) -> None:
    """Note that the engine met damage here: whoever next has the environment alone sets it aside."""
    with suppress(OSError):
        (folder / SUSPECT_FILE).touch()


def engine_error(folder: Path, error: lmdb.Error) -> CacheError:
    """What an error of the engine means; damage is noted for the next open.

    A partial write on a full disk reaches us as an I/O error.
    """
    if isinstance(error, _DAMAGE):
        suspect(folder)
        return CacheDamagedError(f"{folder} is damaged: {error}")
    if filesystem.free_bytes(folder) < (8 << 20):
        return OutOfSpaceError(
            f"no space left for the cache {folder.parent}: make room (`ninferbuild cache prune --max-size SIZE` may), "
            "or choose another disk with NINFERBUILD_CACHE or [cache] dir"
        )
    return CacheError(f"cannot use {folder}: {error}")


class OutOfSpaceError(CacheError):
    """The file system of the cache is full."""


def _read_stamp(folder: Path) -> Stamp | None:
    try:
        return msgspec.msgpack.decode((folder / STAMP_FILE).read_bytes(), type=Stamp)
    except (OSError, msgspec.MsgspecError):
        return None


def set_aside(folder: Path) -> Path:
    """Rename a damaged environment out of the way; returns where it went."""
    date = time.strftime("%Y%m%dT%H%M%S")
    for attempt in range(1000):
        target = folder.with_name(f"{folder.name}.broken-{date}" + (f"-{attempt}" if attempt else ""))
        if not target.exists():
            folder.rename(target)
            return target
    raise CacheError(f"{folder} is damaged and cannot be set aside; remove it")


def open_environment(
    folder: Path, map_size: int, *, databases: int = 0, read_only: bool = False, smallest_map: int = 1 << 30
) -> lmdb.Environment:
    """Open, or create, the environment in ``folder``.

    The map is opened at ``map_size`` bytes and never resized; under a limit of address space it is halved until it
    fits.

    Raises:
        CacheError: the file is damaged, the disk is too full to create it, or the engine refuses it.
    """
    data = folder / btree.DATA_FILE
    try:
        if data.exists() and data.stat().st_size:
            _check_size(folder)
        elif read_only:
            raise CacheError(f"no cache at {folder}")
        else:
            if filesystem.free_bytes(folder) < _NEW_BYTES:
                raise CacheError(
                    f"not enough free space to create {folder}; make room, or choose another disk with "
                    "NINFERBUILD_CACHE or [cache] dir"
                )
            folder.mkdir(parents=True, exist_ok=True)
        if not read_only:
            filesystem.preallocate(folder / _LOCK_FILE, _LOCK_BYTES)
    except OSError as error:
        raise CacheError(
            f"cannot open {folder}: {error.strerror}; check the disk, or choose another cache with NINFERBUILD_CACHE "
            "or [cache] dir"
        ) from error
    while True:
        try:
            return _open(folder, map_size, databases, read_only)
        except lmdb.MemoryError as error:
            if map_size // 2 < smallest_map:
                raise CacheError(f"cannot map {folder}: the address space is limited to too little") from error
            map_size //= 2
        except lmdb.Error as error:
            raise CacheError(f"cannot open {folder}: {error}") from error


def _open(folder: Path, map_size: int, databases: int, read_only: bool) -> lmdb.Environment:
    def attempt(lock: bool) -> lmdb.Environment:
        return lmdb.open(
            str(folder),
            map_size=map_size,
            readonly=read_only,
            max_dbs=databases,
            max_readers=MAX_READERS,
            lock=lock,
            create=not read_only,
            lib_version=_ENGINE,
        )

    if not read_only:
        environment = attempt(lock=True)
        environment.reader_check()
        return environment
    if not os.access(folder / _LOCK_FILE, os.W_OK):
        return attempt(lock=False)  # nobody can register as a reader here, and so nobody writes here either
    return attempt(lock=True)


def _check_size(folder: Path) -> None:
    descriptor = btree.open_data(folder)
    try:
        btree.read_meta(descriptor)
    except btree.DamagedError as error:
        raise CacheError(
            f"{folder} is damaged ({error}); close the programs that use the cache and run the build again, which "
            "sets it aside"
        ) from error
    finally:
        os.close(descriptor)
