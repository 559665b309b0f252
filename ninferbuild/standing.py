"""What stands where an output goes: whether ninferbuild made it, what is left of it, and whether it may be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
import json
import os
from pathlib import Path
import struct
from typing import TYPE_CHECKING

from ninferbuild.artifact.artifact_id import artifact_id_of
from ninferbuild.artifact.framing import ARTIFACT_ID_BYTES, HEADER, MAGIC, PART_MAGIC, entry_header, part_name
from ninferbuild.artifact.schema import ArtifactError, FileRecord
from ninferbuild.errors import UsageError
from ninferbuild.publish import require_regular
from ninferbuild.report import CONVERTER, is_report, report_path, reported_set

if TYPE_CHECKING:
    from ninferbuild.cache import BuildRecord


def made_here(entry: Path) -> tuple[Path, ...] | None:
    """The files of the set at ``entry``, entry first, if ninferbuild made it; None otherwise.

    A set is ours if its directory names ninferbuild and its id recomputes. Nobody else's writer computes the id from
    the text, so a text that passes is one that was written here, and need not be examined further.
    """
    try:
        with entry.open("rb") as file:
            json_bytes, artifact_id = entry_header(file.read(HEADER.size))
            if json_bytes > os.fstat(file.fileno()).st_size:
                return None
            text = file.read(json_bytes)
        _, found, tail = text.rstrip(b" ").rpartition(b',"files":')
        if not found or b'"provenance":{"converter":"%s"' % CONVERTER.encode() not in text:
            return None
        files = [FileRecord(record["path"], record["payload_bytes"]) for record in json.loads(tail[:-1])]
    except (ArtifactError, OSError, ValueError, TypeError, KeyError):
        return None
    if artifact_id_of(text, files) != artifact_id:
        return None
    return (entry, *(entry.with_name(str(record.path)) for record in files[1:]))


@dataclass(frozen=True, slots=True)
class Published:
    """A set that was published here.

    Attributes:
        artifact_id: its id, hexadecimal.
        files: its files, entry first.
    """

    artifact_id: str
    files: tuple[Path, ...]


def published_at(entry: Path, previous: BuildRecord | None) -> Iterator[Published]:
    """What is known to have been published as ``entry``: by the last build of the target, and by the report there."""
    if previous is not None and previous.files and previous.out == os.path.realpath(entry):
        yield _published(entry, previous.artifact_id, len(previous.files))
    reported = reported_set(entry)
    if reported is not None:
        yield _published(entry, *reported)


def _published(entry: Path, artifact_id: str, files: int) -> Published:
    parts = [entry.with_name(part_name(entry.name, index)) for index in range(1, files)]
    return Published(artifact_id, (entry, *parts))


def remains_of(entry: Path, candidates: Iterable[Published]) -> tuple[Path, ...] | None:
    """The files of the published set whose damaged or truncated entry lies at ``entry``; None if there is none.

    That something was published under this name says nothing about what has the name now. What is left has to be of
    it: nothing at all, a beginning of its header, or a header with its id, whatever became of the rest.
    """
    try:
        if not entry.is_file():
            return None
        head = first_bytes(entry, HEADER.size)
    except OSError:
        return None
    for candidate in candidates:
        artifact_id = head[HEADER.size - ARTIFACT_ID_BYTES :].hex()
        if len(head) == HEADER.size:
            ours = artifact_id == candidate.artifact_id
        else:
            ours = MAGIC.startswith(head[: len(MAGIC)]) and candidate.artifact_id.startswith(artifact_id)
        if ours:
            return candidate.files
    return None


def remaining_parts(candidates: Iterable[Published]) -> Iterator[Path]:
    """Parts of published sets that still lie where they were published, whatever has the name of their entry.

    As with entries, what lies there has to be of the set: a header with its id, or a beginning of that.
    """
    for candidate in candidates:
        for index, path in enumerate(candidate.files[1:], 1):
            try:
                ours = path.is_file() and HEADER.pack(
                    PART_MAGIC, index, bytes.fromhex(candidate.artifact_id)
                ).startswith(first_bytes(path, HEADER.size))
            except (OSError, ValueError, struct.error):
                continue
            if ours:
                yield path


def first_bytes(entry: Path, length: int) -> bytes:
    """The first ``length`` bytes of a file, or as many as it has."""
    with entry.open("rb") as file:
        return file.read(length)


def refuse_foreign(layout_paths: Sequence[Path], *, overwrite: bool, previous: BuildRecord | None = None) -> list[Path]:
    """Check that only files made here would be replaced.

    Args:
        layout_paths: files of the new set, entry first.
        overwrite: replace foreign files too.
        previous: the last build of the target, which tells what is left of its output from a foreign file.

    Returns:
        parts of the set that is replaced.

    Raises:
        FileExistsError: a file in the way was not made by ninferbuild, as far as can be told, or is no regular file.
    """
    entry, report = layout_paths[0], report_path(layout_paths[0])
    for path in (*layout_paths, report):
        require_regular(path)
    old = None
    if os.path.lexists(entry):
        old = made_here(entry) or remains_of(entry, published_at(entry, previous))
    if old is not None:
        old_parts = list(old[1:])
    else:
        old_parts = list(dict.fromkeys(remaining_parts(published_at(entry, previous))))
    if old is None and not overwrite:
        if os.path.lexists(entry):
            raise FileExistsError(
                f"{entry} exists and is not an artifact made by ninferbuild (or is damaged); choose another output or "
                "give --overwrite"
            )
        if os.path.lexists(report) and not is_report(report):
            raise FileExistsError(
                f"{report} exists and is no report of ninferbuild; choose another output or give --overwrite"
            )
    for path in layout_paths[1:]:
        if os.path.lexists(path) and path not in old_parts and not overwrite:
            raise FileExistsError(f"{path} exists and belongs to no artifact made here; give --overwrite to replace it")
    return [path for path in old_parts if os.path.lexists(path)]


def surplus_of(layout_paths: Sequence[Path], *, overwrite: bool, previous: BuildRecord | None = None) -> list[Path]:
    """Parts of the set that is replaced which the new set does not have; arguments as :func:`refuse_foreign`."""
    replaced = refuse_foreign(layout_paths, overwrite=overwrite, previous=previous)
    return [path for path in replaced if path not in layout_paths]


def refuse_other(path: Path, what: str, is_own: Callable[[Path], bool], *, overwrite: bool) -> None:
    """Check that a command replaces only a file of the kind that it writes.

    Args:
        path: the output.
        what: that kind, for the message.
        is_own: whether an existing file is of that kind.
        overwrite: replace any other file too, artifacts excepted.

    Raises:
        UsageError: it would replace another file, or what is there is no regular file.
        OSError: what is there cannot be read.
    """
    try:
        require_regular(path)
    except FileExistsError as error:
        raise UsageError(f"--out: {error}") from None
    if not path.exists():
        return
    if first_bytes(path, len(MAGIC)) in (MAGIC, PART_MAGIC):
        raise UsageError(f"--out: {path} is an artifact; choose another output")
    if not overwrite and not is_own(path):
        raise UsageError(f"--out: {path} exists and is not {what}; choose another output or give --overwrite")


FileState = tuple[int, int, int, int]
"""(device, inode, bytes, mtime in nanoseconds): differs after whoever writes a file anew."""


def state_of(path: Path) -> FileState | None:
    """The state of a file; None when there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def require_writable(entry: Path) -> None:
    """Raises ``OSError`` when the output's directory cannot take files, nor be made."""
    from ninferbuild.cache.filesystem import existing_parent

    directory = existing_parent(entry.parent)
    if not directory.is_dir():
        raise NotADirectoryError(f"{entry}: {directory} is not a directory; choose another output")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{entry}: {directory} cannot be written; choose another output")
