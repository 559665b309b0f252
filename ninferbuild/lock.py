"""``ninferbuild.lock``: what builds have to give, for review in a diff and for :mod:`ninferbuild.locked`.

One line a fact, grouped by target. An object goes by the parameters bound to it and not by its id, which counts
objects: one more object somewhere would change the lines of all that follow. What ``information`` and ``actions`` hold
explains a difference and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
import tomllib
from typing import Any

import msgspec

from ninferbuild import platform_io
from ninferbuild.errors import UsageError
from ninferbuild.publish import replace_file
from ninferbuild.toml_text import toml_key, toml_value

VERSION = 1

LOCK_NAME = "ninferbuild.lock"
"""The lock of ``ninferbuild.toml``."""

_FIRST_WORDS = "# Written by 'ninferbuild lock'"

HEADER = f"""\
{_FIRST_WORDS}: what builds of these targets have to give. Commit it, and let 'ninferbuild lock' change
# it. 'information' and 'actions' explain a difference and decide nothing.
version = {VERSION}
"""


class DamagedLockError(UsageError):
    """A file that should be a lock is none; its message says why."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of what a lock holds. None stands for what is not known yet; a lock file holds no None."""


class LockedFile(_Table, frozen=True):
    """One file of an artifact.

    Attributes:
        sha256: 64 hexadecimal digits.
    """

    bytes: int
    sha256: str | None


class LockedObject(_Table, frozen=True):
    """One object of an artifact: its payload, how it is encoded, and the parameters bound to it.

    Attributes:
        digest: of the payload, 32 hexadecimal digits, as :mod:`ninferbuild.digest` defines it.
        format, layout, shape, divisors: of a tensor; left out of a resource.
    """

    digest: str | None
    bytes: int
    format: str | None = None
    layout: str | None = None
    shape: tuple[int, ...] | None = None
    divisors: int = 1
    parameters: tuple[str, ...] = ()


class LockedAction(_Table, frozen=True):
    """What made an object: the key of its action, and the method with its version."""

    key: str
    method: str


class Information(_Table, frozen=True):
    """How a target was configured, by names."""

    recipe: str | None = None
    overrides: tuple[str, ...] = ()


class LockedTarget(_Table, frozen=True):
    """What one target gives.

    Attributes:
        artifact_id: 32 hexadecimal digits.
        files: by name, entry first.
        sources: source name → digest of what was consumed of it; None where it is not known.
        directory: member of the directory → digest of its text.
        objects: by label, in file order; see :mod:`ninferbuild.artifact.labels`.
        actions: by label of the object.
    """

    artifact_id: str | None
    files: dict[str, LockedFile]
    sources: dict[str, str | None]
    directory: dict[str, str]
    objects: dict[str, LockedObject]
    information: Information = msgspec.field(default_factory=Information)
    actions: dict[str, LockedAction] = msgspec.field(default_factory=dict)


class _Lock(_Table, frozen=True):
    version: int
    targets: dict[str, LockedTarget] = msgspec.field(default_factory=dict)


def lock_path(target_file: Path) -> Path:
    """Where the lock of the targets of ``target_file`` lies: beside it, under its name with the suffix ``.lock``."""
    return target_file.with_suffix(".lock")


def read_lock(path: Path) -> dict[str, LockedTarget]:
    """The targets of the lock ``path``, by name.

    Raises:
        DamagedLockError: the file is no lock.
        UsageError: only a newer ninferbuild reads it.
        OSError: it cannot be read.
    """
    try:
        content = tomllib.loads(path.read_bytes().decode())
    except ValueError as error:  # of decoding too
        raise DamagedLockError(f"{path}: not a lock: {error}; write it again with 'ninferbuild lock'") from None
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise UsageError(f"{path}: version {version} of the lock is newer than this ninferbuild, which reads {VERSION}")
    try:
        return msgspec.convert(content, _Lock).targets
    except msgspec.ValidationError as error:
        raise DamagedLockError(f"{path}: not a lock: {error}; write it again with 'ninferbuild lock'") from None


def locked_target(path: Path, name: str) -> LockedTarget:
    """What the lock ``path`` holds of the target ``name``.

    Raises:
        UsageError: there is no lock, no such target in it, or it cannot be read as one.
    """
    try:
        targets = read_lock(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no lock; write it with 'ninferbuild lock {name}'") from None
    if name not in targets:
        raise UsageError(f"{path}: the target {name!r} is not locked; add it with 'ninferbuild lock {name}'")
    return targets[name]


def kept_targets(path: Path) -> tuple[dict[str, LockedTarget], bool]:
    """The targets that the lock ``path`` holds when it is written again, and whether a damaged one loses its own.

    Only what is a lock by its name or by its first line is given up so; what else lies there is somebody's file.

    Raises:
        UsageError: the file is no lock and does not look like one that was damaged, or a newer ninferbuild wrote it.
        OSError: it cannot be read.
    """
    try:
        return read_lock(path), False
    except FileNotFoundError:
        return {}, False
    except DamagedLockError as error:
        if path.name != LOCK_NAME and not path.read_bytes().startswith(_FIRST_WORDS.encode()):
            reason = str(error).rpartition(";")[0]
            raise DamagedLockError(f"{reason}; remove it, or give the target file another name") from None
        return {}, True


def update_lock(path: Path, changed: Mapping[str, LockedTarget]) -> bool:
    """Put ``changed`` into the lock ``path`` in one step; other targets stay as they are, those of a damaged lock go.

    Returns:
        whether that changed the file; one that says the same already is left alone.

    Raises:
        UsageError: as :func:`kept_targets`.
        OSError: it cannot be written.
    """
    with platform_io.locked_directory(path.parent):
        targets, _ = kept_targets(path)
        after = lock_text({**targets, **changed}).encode()
        if path.exists() and path.read_bytes() == after:
            return False
        replace_file(path, after)
        return True


def lock_text(targets: Mapping[str, LockedTarget]) -> str:
    """The lock of ``targets``: sorted by name, objects in file order, one line a fact."""
    return HEADER + "".join(line + "\n" for name in sorted(targets) for line in _target_lines(name, targets[name]))


def _target_lines(name: str, target: LockedTarget) -> Iterator[str]:
    header = f"targets.{toml_key(name)}"
    yield from ("", f"[{header}]", f"artifact_id = {toml_value(target.artifact_id)}")
    tables: dict[str, Mapping[str, Any]] = {
        "files": target.files,
        "sources": target.sources,
        "directory": target.directory,
        "objects": target.objects,
        "information": msgspec.structs.asdict(target.information),
        "actions": target.actions,
    }
    for table, facts in tables.items():
        yield from ("", f"[{header}.{table}]", *_fact_lines(facts))


def _fact_lines(facts: Mapping[str, Any]) -> Iterable[str]:
    for name, value in facts.items():
        plain = msgspec.to_builtins(value)
        if plain is not None:
            yield f"{toml_key(name)} = {toml_value(plain)}"


def sums_path(entry: Path) -> Path:
    """Where the SHA-256 sums of the artifact ``entry`` lie."""
    return entry.with_name(entry.name + ".sha256")


def sums_text(files: Mapping[str, LockedFile]) -> str:
    """The files as ``sha256sum -c`` reads them, by names relative to the artifact's directory."""
    return "".join(_sum_line(name, str(file.sha256)) for name, file in files.items())


def _sum_line(name: str, sha256: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    # A name that had to be escaped is announced by a backslash before the sum.
    return f"{'' if escaped == name else chr(92)}{sha256}  {escaped}\n"
