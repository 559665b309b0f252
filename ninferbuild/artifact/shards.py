"""Checks of the files of a set: parts that are there and belong to the entry, padding that is zero."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ninferbuild.artifact.findings import Finding, Findings
from ninferbuild.artifact.framing import HEADER, PAYLOAD_ALIGNMENT, entry_header
from ninferbuild.artifact.primitives import ArtifactError
from ninferbuild.artifact.reader import Artifact


@dataclass(frozen=True, slots=True)
class Segment:
    """The logical payload bytes ``[begin, end)`` that one file holds."""

    path: Path
    begin: int
    end: int
    readable: bool


def check_files(artifact: Artifact, findings: Findings) -> tuple[Segment, ...]:
    """Open every file of the set and check its framing; the segments, entry first.

    A part that is missing or does not belong to the entry is a finding, and its segment is not readable.

    Raises:
        OSError: a file that is there cannot be read.
    """
    files = artifact.directory.files
    ends = list(accumulate(record.payload_bytes for record in files))
    segments = []
    for record, begin, end in zip(files, [0, *ends], ends, strict=False):
        path = artifact.path if record.path is None else artifact.path.with_name(record.path)
        readable = True
        try:
            artifact.read_range(begin, 1)
        except FileNotFoundError:
            findings.add(Finding("the part is missing", file=path.name))
            readable = False
        except ArtifactError as error:
            findings.add(Finding(str(error).removeprefix(f"{path}: "), file=path.name))
            readable = False
        else:
            _check_padding(path, None if record.path else artifact.payload_offset, findings)
        segments.append(Segment(path, begin, end, readable))
    return tuple(segments)


def _check_padding(path: Path, entry_payload: int | None, findings: Findings) -> None:
    """Check that the bytes between header and payload, the directory aside, are zero.

    Args:
        entry_payload: where the payload starts in the entry; None for a part.
    """
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        begin, end = HEADER.size, PAYLOAD_ALIGNMENT
        if entry_payload is not None:
            begin, end = begin + entry_header(header)[0], entry_payload
        file.seek(begin)
        padding = file.read(end - begin)
    used = len(padding.lstrip(b"\0"))
    if used:
        place = begin + len(padding) - used
        findings.add(Finding("padding before the payload is not zero", file=path.name, offset=place))
