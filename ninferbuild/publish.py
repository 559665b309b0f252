"""Putting a finished file set under its name, so that the name is a complete set or absent at any instant.

1. all temporaries are complete and synced, then the journal is written and synced;
2. where the old or the new set has parts, the old entry is moved aside (from here the name is absent) and the new
   parts get their names; a single file replaces a single file in one rename, and its name is never absent;
3. the entry gets its name (from here the name is the new set), then the report;
4. the old entry and parts that are no longer used are removed, the directory is synced, the journal removed.

Every step can be repeated, so a journal found by a later run is simply carried on to its end; before the journal
exists nothing but temporaries has been made. From then on the temporaries belong to the journal: whatever goes wrong,
they stay for the run that carries it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import errno
import json
import os
from pathlib import Path
import re
import secrets
import stat

import msgspec

from ninferbuild import platform_io
from ninferbuild.errors import NinferbuildError

SUFFIX = ".ninferbuild-tmp"


def require_regular(path: Path) -> None:
    """Raises ``FileExistsError`` when what has this name, behind symbolic links, is no regular file.

    A rename would put a file in the place of a device, and opening a named pipe waits for whoever writes to it: an
    output is looked at so before anything else is done with it.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return  # nothing is there; a name that cannot be is refused by whoever uses it
    if stat.S_ISDIR(mode):
        raise FileExistsError(f"{path} is a directory; choose another output")
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is not a regular file; choose another output")


class StagedFile:
    """A temporary beside its target, locked as long as its maker lives, so that leftovers can be told from work.

    Raises:
        FileExistsError: what has the target's name is no regular file.
        OSError: the directory is missing or cannot be written.
    """

    def __init__(self, target: Path, length: int | None = None):
        require_regular(target)
        self.target = target
        self._handed_over = False
        self._descriptor: int | None = None
        try:
            self._create()
            if length is not None:
                with _naming(target):
                    os.ftruncate(self.descriptor, length)
        except BaseException:
            self.discard()
            raise

    def _create(self) -> None:
        """Make the temporary and lock it. A run that cleans up may come between the two, and takes it for a leftover:
        then another one is made.
        """
        while True:
            self.path = self.target.with_name(f".{self.target.name}.{secrets.token_hex(6)}{SUFFIX}")
            with _naming(self.target):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            platform_io.lock_exclusive(self._descriptor, wait=True)
            if os.fstat(self._descriptor).st_nlink:
                return
            self.close()

    @property
    def descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def write(self, position: int, data: memoryview | bytes | bytearray) -> None:
        """Write all of ``data`` at ``position``."""
        view = memoryview(data)
        with _naming(self.target):
            while len(view):
                count = os.pwrite(self.descriptor, view, position)
                position += count
                view = view[count:]

    def start_writeback(self, position: int, length: int) -> None:
        """Have the system begin to store ``length`` bytes at ``position``."""
        with _naming(self.target):
            platform_io.start_writeback(self.descriptor, position, length)

    def finish_writeback(self, position: int, length: int) -> None:
        """Wait for what :meth:`start_writeback` began; :meth:`sync` is still needed."""
        with _naming(self.target):
            platform_io.finish_writeback(self.descriptor, position, length)

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        with _naming(self.target):
            os.fsync(self.descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def hand_over(self) -> None:
        """Leave the temporary to a journal that names it."""
        self._handed_over = True

    def discard(self) -> None:
        """Remove the temporary, unless it has been published or belongs to a journal."""
        self.close()
        if not self._handed_over:
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


def behind_link(path: Path) -> Path:
    """``path``, or where it leads if it is a symbolic link, whether that exists or not.

    Raises:
        OSError: the link leads round in circles.
    """
    if not path.is_symlink():
        return path
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise OSError(
            errno.ELOOP, "is a symbolic link that leads nowhere; remove it or choose another output", str(path)
        )
    return real


def journal_of(entry: Path) -> Path:
    """Where the journal of a set lies while the set is being published."""
    return entry.with_name(f".{entry.name}.ninferbuild-journal")


def publish(
    staged: Sequence[StagedFile], report: StagedFile | None, surplus: Callable[[], Iterable[Path]] = tuple
) -> None:
    """Give staged files their names; the first is the entry. Interrupts wait until that is done.

    Args:
        staged: complete files, entry first.
        report: published after the entry.
        surplus: called once nobody else can publish here: what of the set that is replaced the new set does not have.
            When it raises, nothing is published.

    Raises:
        OSError: a file cannot get its name. If the journal was written by then, the next run carries it on.
    """
    files = [*staged, *([report] if report is not None else [])]
    for file in files:
        file.sync()
    entry = staged[0].target
    with platform_io.locked_directory(entry.parent):
        steps = Journal(
            entry=staged[0].path.name,
            aside=f".{entry.name}.{secrets.token_hex(6)}.old{SUFFIX}",
            parts=[(file.path.name, file.target.name) for file in staged[1:]],
            report=(report.path.name, report.target.name) if report is not None else None,
            surplus=[path.name for path in surplus()],
        )
        with platform_io.interrupts_held():
            _write_journal(entry, steps)
            for file in files:
                file.hand_over()
            _carry_on(entry, steps)
    for file in files:
        file.close()


def _write_journal(entry: Path, steps: Journal) -> None:
    journal = journal_of(entry)
    draft = StagedFile(journal)
    try:
        # Names need not be Unicode; unlike msgspec, json keeps those that are not.
        draft.write(0, json.dumps(msgspec.to_builtins(steps)).encode())
        draft.sync()
        os.replace(draft.path, journal)
    except BaseException:
        draft.discard()
        raise
    draft.close()
    platform_io.sync_directory(entry.parent)


def _carry_on(entry: Path, steps: Journal) -> None:
    with _naming(entry):
        _take_steps(entry, steps)


def _take_steps(entry: Path, steps: Journal) -> None:
    directory = entry.parent
    aside = directory / steps.aside
    if (directory / steps.entry).exists():
        # The entry is still staged, so whatever has its name is the old set.
        if os.path.lexists(entry) and (steps.parts or steps.surplus):
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
        steps = msgspec.convert(json.loads(journal.read_bytes()), Journal)
    except FileNotFoundError:
        steps = None
    except (ValueError, msgspec.ValidationError) as error:
        raise NinferbuildError(
            f"{journal}: the journal of an interrupted publication is damaged; remove it and build again"
        ) from error
    if steps is not None:
        _carry_on(entry, steps)
    # Exactly the names that this entry's files give: the temporaries of a set with a longer name are not ours.
    files = f"{re.escape(entry.name)}(\\.part-\\d+|\\.conversion\\.json|\\.sha256)?|{re.escape(journal.name)}"
    temporary = re.compile(f"\\.({files})\\.[0-9a-f]{{12}}(\\.old)?{re.escape(SUFFIX)}")
    for leftover in entry.parent.iterdir():
        if temporary.fullmatch(leftover.name):
            _remove_abandoned(leftover)
    return steps is not None


def _remove_abandoned(path: Path) -> None:
    """Remove a temporary unless its maker lives. It is removed under its lock: nobody can lock it and go on with it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if platform_io.try_lock_exclusive(descriptor):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
