"""What the cache asks of a file system: its kind, its free space, holes, and what a folder really occupies."""

from __future__ import annotations

from collections.abc import Iterator
import ctypes
import errno
import os
from pathlib import Path
import sys

from ninferbuild.errors import CacheError

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs"),
        *("gfs2", "ocfs2", "orangefs", "pvfs2", "davfs", "fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.ceph"),
        *("fuse.rclone", "fuse.gcsfuse", "fuse.juicefs"),
    )
)
"""Kinds on which memory maps or file locks are not coherent between machines, which LMDB relies on."""

_MOUNTS = Path("/proc/self/mounts")


def existing_parent(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def kind_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The file system's kind as the kernel names it (``ext4``, ``nfs4``); None where that is unknown."""
    try:
        table = mounts.read_text(errors="surrogateescape")
    except OSError:
        return None
    real = os.path.realpath(existing_parent(path))
    best, kind = "", None
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount at the same point hides the earlier one
            best, kind = point, fields[2]
    return kind


def refuse_network(path: Path) -> None:
    """Raises :class:`CacheError` when ``path`` is on a network file system."""
    kind = kind_of(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise CacheError(
            f"cache directory {path} is on a network file system ({kind}), where LMDB loses data; choose a local "
            "directory with NINFERBUILD_CACHE or [cache] dir, or set allow_foreign_fs there if only one machine uses it"
        )


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of ``path``."""
    status = os.statvfs(existing_parent(path))
    return status.f_bavail * status.f_frsize


def allocated_bytes(path: Path) -> int:
    """Bytes that a file, or everything below a folder, occupies; holes do not count."""
    return sum(status.st_blocks * 512 for status in _statuses(path))


def _statuses(path: Path) -> Iterator[os.stat_result]:
    try:
        if not path.is_dir():
            yield path.lstat()
            return
        for folder, _, names in os.walk(path):
            for name in names:
                try:
                    yield os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return


def preallocate(path: Path, size: int) -> None:
    """Make the first ``size`` bytes of ``path`` exist on the disk.

    LMDB maps its lock file writable: a page of it that turns out not to fit on the disk is a SIGBUS, not an error.

    Raises:
        OSError: there is no space, or the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        elif os.fstat(descriptor).st_size < size:
            os.pwrite(descriptor, bytes(size), 0)
    finally:
        os.close(descriptor)


_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def punch_hole(descriptor: int, offset: int, length: int) -> bool:
    """Give a range of a file back to the file system; it reads as zeros afterwards. False where that cannot be done."""
    if _libc is None or not hasattr(_libc, "fallocate"):
        return False
    result = _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(offset), ctypes.c_longlong(length))
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.EPERM, errno.ENOSPC):
        return False
    raise OSError(code, os.strerror(code))


def sync_directory(path: Path) -> None:
    """Make creations and renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is either the old or the new one at any instant."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
