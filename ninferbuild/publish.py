"""Putting a finished file set under its name, so that the name is a complete set or absent at any instant.

A single file takes one atomic rename. A set of several files, or one that replaces such a set, goes through a journal:

1. all temporaries are complete and synced, then the journal is written and synced;
2. the old entry is moved aside (from here the name is absent);
3. parts get their names, then the entry (from here the name is the new set);
4. the old entry and parts that are no longer used are removed, the directory is synced, the journal removed.

Every step can be repeated, so a journal found by a later run is simply carried on to its end; before the journal
exists nothing but temporaries has been made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import os
from pathlib import Path
import secrets

import msgspec

from ninferbuild import platform_io
from ninferbuild.errors import NinferbuildError

SUFFIX = ".ninferbuild-tmp"


class StagedFile:
    """A temporary beside its target, locked as long as its maker lives, so that leftovers can be told from work.

    Raises:
        OSError: the directory is missing or cannot be written.
    """

    def __init__(self, target: Path, length: int | None = None):
        self.target = target
        self.path = target.with_name(f".{target.name}.{secrets.token_hex(6)}{SUFFIX}")
        with _naming(target):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor: int | None = os.open(self.path, flags, 0o666)
        try:
            platform_io.lock_exclusive(self._descriptor)
            if length is not None:
                with _naming(target):
                    os.ftruncate(self._descriptor, length)
        except BaseException:
            self.discard()
            raise

    @property
    def descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def write(self, position: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``position``."""
        view = memoryview(data)
        with _naming(self.target):
            while len(view):
                count = os.pwrite(self.descriptor, view, position)
                position += count
                view = view[count:]

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        with _naming(self.target):
            os.fsync(self.descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def discard(self) -> None:
        """Remove the temporary, unless it has been published."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Let system errors name the file that was to be made, not its temporary, or a descriptor without a name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(target)) from error


class Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a publication has to do, as file names in the entry's directory.

    Attributes:
        entry: the staged entry.
        aside: where the old entry is moved.
        parts: (staged, final) names.
        report: the same of the conversion report.
        surplus: old parts that the new set does not have.
    """

    entry: str
    aside: str
    parts: list[tuple[str, str]]
    report: tuple[str, str] | None
    surplus: list[str]


def journal_of(entry: Path) -> Path:
    """Where the journal of a set lies while the set is being published."""
    return entry.with_name(f".{entry.name}.ninferbuild-journal")


def publish(staged: Sequence[StagedFile], report: StagedFile | None, surplus: Iterable[Path]) -> None:
    """Give staged files their names; the first is the entry.

    Args:
        staged: complete files, entry first.
        report: published after the entry.
        surplus: parts of the set that is replaced which the new set does not have.
    """
    files = [*staged, *([report] if report is not None else [])]
    for file in files:
        file.sync()
    entry = staged[0].target
    with platform_io.locked_directory(entry.parent):
        _publish(entry, staged, report, surplus)
    for file in files:
        file.close()


def _publish(entry: Path, staged: Sequence[StagedFile], report: StagedFile | None, surplus: Iterable[Path]) -> None:
    removed = [path.name for path in surplus]
    if len(staged) == 1 and not removed:
        for file in (*staged, *([report] if report is not None else [])):
            os.replace(file.path, file.target)
        platform_io.sync_directory(entry.parent)
    else:
        steps = Journal(
            entry=staged[0].path.name,
            aside=f".{entry.name}.{secrets.token_hex(6)}.old{SUFFIX}",
            parts=[(file.path.name, file.target.name) for file in staged[1:]],
            report=(report.path.name, report.target.name) if report is not None else None,
            surplus=removed,
        )
        _write_journal(entry, steps)
        _carry_on(entry, steps)


def _write_journal(entry: Path, steps: Journal) -> None:
    journal = journal_of(entry)
    draft = StagedFile(journal)
    try:
        draft.write(0, msgspec.json.encode(steps))
        draft.sync()
        os.replace(draft.path, journal)
    finally:
        draft.discard()
    platform_io.sync_directory(entry.parent)


def _carry_on(entry: Path, steps: Journal) -> None:
    directory = entry.parent
    aside = directory / steps.aside
    if (directory / steps.entry).exists():
        # The entry is still staged, so whatever has its name is the old set.
        if entry.exists():
            os.replace(entry, aside)
            platform_io.sync_directory(directory)
        for source, target in steps.parts:
            _move(directory / source, directory / target)
        platform_io.sync_directory(directory)
        os.replace(directory / steps.entry, entry)
    if steps.report is not None:
        source, target = steps.report
        _move(directory / source, directory / target)
    for name in steps.surplus:
        (directory / name).unlink(missing_ok=True)
    aside.unlink(missing_ok=True)
    platform_io.sync_directory(directory)
    journal_of(entry).unlink(missing_ok=True)
    platform_io.sync_directory(directory)


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` in one step: whoever opens it finds all of the old bytes or all of the new ones.

    Raises:
        OSError: the directory is missing or cannot be written; what was there stays.
    """
    staged = StagedFile(path)
    try:
        staged.write(0, data)
        staged.sync()
        os.replace(staged.path, staged.target)
    finally:
        staged.discard()
    platform_io.sync_directory(path.parent)


def _move(source: Path, target: Path) -> None:
    if source.exists():
        os.replace(source, target)


def recover(entry: Path) -> bool:
    """Finish an interrupted publication of ``entry`` and remove temporaries that nobody works on any more.

    Returns:
        whether a publication was finished.
    """
    if not entry.parent.is_dir():
        return False
    with platform_io.locked_directory(entry.parent):
        return _recover(entry)


def _recover(entry: Path) -> bool:
    journal = journal_of(entry)
    try:
        steps = msgspec.json.decode(journal.read_bytes(), type=Journal)
    except FileNotFoundError:
        steps = None
    except msgspec.MsgspecError as error:
        raise NinferbuildError(
            f"{journal}: the journal of an interrupted publication is damaged; remove it and build again"
        ) from error
    if steps is not None:
        _carry_on(entry, steps)
    prefix = f".{entry.name}."
    for leftover in entry.parent.iterdir():
        if leftover.name.startswith(prefix) and leftover.name.endswith(SUFFIX) and _abandoned(leftover):
            leftover.unlink(missing_ok=True)
    return steps is not None


def _abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return platform_io.try_lock_exclusive(descriptor)
    finally:
        os.close(descriptor)
