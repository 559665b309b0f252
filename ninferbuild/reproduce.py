"""Building a target again from nothing and comparing what comes out with what was there before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.framing import MAGIC
from ninferbuild.build import build
from ninferbuild.describe import describe_artifact
from ninferbuild.differences import Because, Difference, compare, reasons
from ninferbuild.errors import UsageError
from ninferbuild.lock import LockedAction, LockedFile, LockedTarget, locked_target, read_lock
from ninferbuild.locking import actions_of, cache_of, lock_of
from ninferbuild.publish import behind_link
from ninferbuild.target_schema import CacheSettings

if TYPE_CHECKING:
    from ninferbuild.cache import Cache
    from ninferbuild.progress import Progress
    from ninferbuild.target import Target

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Reference:
    """What a target has to give.

    Attributes:
        path: the lock or artifact that says so.
        entry: the artifact, if it is one.
    """

    path: Path
    content: LockedTarget
    entry: Path | None


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What building a target again gave.

    Attributes:
        against: what it was compared with.
        kept: the directory that holds the new artifact and its cache, if it was to be kept.
    """

    target: Target
    against: Path
    artifact_id: str | None
    files: Mapping[str, LockedFile]
    objects: int
    differences: tuple[Difference, ...]
    seconds: float
    kept: Path | None

    @property
    def reproduced(self) -> bool:
        """Whether every byte is the same."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "target": self.target.name,
            "against": str(self.against),
            "reproduced": self.reproduced,
            "artifact_id": self.artifact_id,
            "files": [{"name": name, "bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()],
            "objects": self.objects,
            "differences": [difference.to_json() for difference in self.differences],
            "seconds": round(self.seconds, 3),
            "kept": str(self.kept) if self.kept is not None else None,
        }


def reference(target: Target, against: Path | None = None) -> Reference:
    """What ``target`` is compared with.

    Args:
        against: a lock or the entry of an artifact; None takes the target's lock if it is in there, else its output.

    Raises:
        UsageError: there is nothing to compare with, or a lock does not have the target.
        NinferbuildError, ArtifactError, OSError: it is damaged or cannot be read.
    """
    if against is not None:
        with against.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return Reference(against, locked_target(against, target.name), None)
        return Reference(against, describe_artifact(against, actions_of(target, against)), against)
    if target.file is not None:
        path = lock_of(target)
        if path.exists() and (content := read_lock(path).get(target.name)) is not None:
            return Reference(path, content, None)
    target = replace(target, out=behind_link(target.out))
    if not target.out.exists():
        raise UsageError(
            f"{target.name} is neither locked nor built; build it, lock it, or name an artifact with --against"
        )
    return Reference(target.out, describe_artifact(target.out, actions_of(target, target.out)), target.out)


def reproduce(
    target: Target,
    wanted: Reference,
    *,
    device: str | None = None,
    rows_per_chunk: int | None = None,
    jobs: int | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> Reproduction:
    """Build ``target`` in a temporary directory with a cache of its own, and compare.

    Args:
        device, jobs: as for :func:`ninferbuild.build.build`.
        rows_per_chunk: overrides the target's.
        keep: leave the directory where it is, unless the build fails.

    Raises:
        NinferbuildError, ValueError, TypeError, OSError: as :func:`ninferbuild.build.build`.
    """
    began = time.perf_counter()
    directory = Path(tempfile.mkdtemp(prefix="ninferbuild-reproduce-"))
    kept = None
    try:
        out = directory / behind_link(target.out).name
        again = replace(
            target,
            out=out,
            identity=str(out),
            rows_per_chunk=rows_per_chunk or target.rows_per_chunk,
            cache=CacheSettings(
                dir=directory / "cache", before_environment=True, allow_foreign_fs=target.cache.allow_foreign_fs
            ),
        )
        build(again, device=device, jobs=jobs, progress=progress)
        differences, found = _compared(target, wanted, again)
        kept = directory if keep else None
    finally:
        if kept is None:
            shutil.rmtree(directory, ignore_errors=True)
    return Reproduction(
        target,
        wanted.path,
        found.artifact_id,
        found.files,
        len(found.objects),
        tuple(differences),
        time.perf_counter() - began,
        kept,
    )


def _compared(target: Target, wanted: Reference, again: Target) -> tuple[list[Difference], LockedTarget]:
    actions = actions_of(again, again.out)
    found = describe_artifact(again.out, actions)
    with ExitStack() as stack:
        caches = [stack.enter_context(cache) for cache in (cache_of(target), cache_of(again)) if cache is not None]
        differences = compare(wanted.content, found, because=_reasons(wanted.content, found, caches))
    if wanted.entry is not None:
        entry = wanted.entry
        before = [entry.with_name(name) for name in wanted.content.files]
        after = [again.out.with_name(name) for name in found.files]
        differences = [_located(difference, before, after) for difference in differences]
    return differences, found


def _reasons(wanted: LockedTarget, found: LockedTarget, caches: Sequence[Cache]) -> Because:
    def manifest_of(key: bytes) -> str | None:
        return next((text for cache in caches if (text := cache.manifest(key)) is not None), None)

    def made(label: str) -> tuple[str, str, Sequence[str]] | None:
        action: LockedAction | None = found.actions.get(label)
        manifest = manifest_of(bytes.fromhex(action.key)) if action is not None else None
        if action is None or manifest is None:
            return None
        return action.method, manifest, found.objects[label].parameters

    return reasons(wanted.actions, made, manifest_of)


def _located(difference: Difference, before: Sequence[Path], after: Sequence[Path]) -> Difference:
    """The difference between two files with the position of their first differing byte."""
    for ours, theirs in zip(before, after, strict=False):
        if difference.subject == f"file {theirs.name}" and difference.fact == "SHA-256":
            return replace(difference, because=(f"first differing byte: {first_difference(ours, theirs)}",))
    return difference


def first_difference(one: Path, other: Path) -> int | None:
    """The position of the first byte in which two files differ, from 0; None if they are equal."""
    with one.open("rb") as left, other.open("rb") as right:
        position = 0
        while True:
            ours, theirs = left.read(CHUNK_BYTES), right.read(CHUNK_BYTES)
            if ours != theirs:
                common = min(len(ours), len(theirs))
                return position + next((i for i in range(common) if ours[i] != theirs[i]), common)
            if not ours:
                return None
            position += len(ours)
