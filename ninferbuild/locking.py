"""Locking a target: build it, describe the files that came out, keep that in the lock and in ``OUT.sha256``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import build
from ninferbuild.cache import Cache
from ninferbuild.describe import describe_artifact, recorded_actions
from ninferbuild.errors import CacheError, UsageError
from ninferbuild.lock import LockedAction, LockedTarget, kept_targets, lock_path, sums_path, sums_text, update_lock
from ninferbuild.publish import behind_link, replace_file, require_regular
from ninferbuild.session import open_cache

if TYPE_CHECKING:
    from ninferbuild.progress import Progress
    from ninferbuild.target import Target


@dataclass(frozen=True, slots=True)
class Locked:
    """What locking a target did.

    Attributes:
        path: the lock.
        sums: the file for ``sha256sum -c``.
        changed: whether the lock says something else than before.
        lost: whether a damaged lock was replaced, and with it what it held of other targets.
    """

    target: Target
    path: Path
    sums: Path
    content: LockedTarget
    changed: bool
    lost: bool = False

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "target": self.target.name,
            "lock": str(self.path),
            "artifact_id": self.content.artifact_id,
            "files": [
                {"path": str(self.target.out.with_name(name)), "bytes": file.bytes, "sha256": file.sha256}
                for name, file in self.content.files.items()
            ],
            "objects": len(self.content.objects),
            "sums": str(self.sums),
            "changed": self.changed,
        }


def lock(
    target: Target, *, device: str | None = None, jobs: int | None = None, progress: Progress | None = None
) -> Locked:
    """Lock what building ``target`` gives. The lock's other targets stay as they are, unless it is damaged.

    Raises:
        UsageError: the target has no file beside which a lock could lie, or what lies there is no lock.
        NinferbuildError, ValueError, TypeError, OSError: as :func:`ninferbuild.build.build`; the lock stays as it is.
    """
    path = lock_of(target)
    require_regular(path)
    _, lost = kept_targets(path)  # before the work of a build
    target = replace(target, out=behind_link(target.out))  # file names of the lock are those of the files
    require_regular(sums_path(target.out))
    build(target, device=device, jobs=jobs, progress=progress)
    content = describe_artifact(target.out, actions_of(target, target.out))
    sums, text = sums_path(target.out), sums_text(content.files).encode()
    if not sums.exists() or sums.read_bytes() != text:
        replace_file(sums, text)
    return Locked(target, path, sums, content, update_lock(path, {target.name: content}), lost)


def lock_of(target: Target) -> Path:
    """The lock of a target.

    Raises:
        UsageError: the target comes from options and not from a file.
    """
    if target.file is None:
        raise UsageError(f"{target.name}: only targets of a file can be locked; make one with 'ninferbuild init'")
    return lock_path(target.file)


def cache_of(target: Target) -> Cache | None:
    """The cache of a target for reading, if it has one."""
    try:
        return open_cache(target, read_only=True)
    except CacheError:
        return None


def actions_of(target: Target, entry: Path) -> dict[str, LockedAction]:
    """Object id → the action that made it, if the last build of ``target`` made the artifact ``entry``."""
    cache = cache_of(target)
    if cache is None:
        return {}
    with cache, Artifact(entry) as artifact:
        last = next(iter(cache.builds(target.identity, limit=1)), None)
        if last is None or last.artifact_id != artifact.artifact_id.hex():
            return {}
        return recorded_actions(cache, last, artifact.directory)
