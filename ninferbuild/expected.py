"""What an artifact is meant to be: read from a conversion report, a lock or a ``sha256sum`` file, and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
import hashlib
import json
import os
from pathlib import Path
import re
from typing import Any

from ninferbuild.artifact.findings import Finding, Findings
from ninferbuild.artifact.labels import labels_of
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.shards import Segment
from ninferbuild.errors import UsageError
from ninferbuild.lock import read_lock
from ninferbuild.report import CONVERTER

LARGEST_TEXT = 1 << 30
"""Bytes of the largest file that is read as a report, lock or list of sums."""


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """One file of a set; None where nothing is said."""

    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What one artifact is meant to be. Members that are None or empty say nothing.

    Attributes:
        path: the file that says so.
        artifact_id: 32 hexadecimal digits; given, the artifact must also be one that ninferbuild made, because only
            its ids stand for the content.
        payload_bytes: of the logical payload.
        segments: payload bytes of each file, entry first.
        objects: object id → digest, 32 hexadecimal digits.
        labelled: ``objects`` goes by labels, not ids (:mod:`ninferbuild.artifact.labels`).
        files: file name → size and SHA-256. Every file of the set has to be among them, if there are any.
        complete: ``objects`` and ``files`` name all objects and files of the artifact.
    """

    path: Path
    artifact_id: str | None = None
    payload_bytes: int | None = None
    segments: tuple[int, ...] | None = None
    objects: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = False
    files: Mapping[str, ExpectedFile] = field(default_factory=dict)
    complete: bool = False


def read_expected(path: Path, entry: Path) -> Expected:
    """What the file ``path`` says about the artifact ``entry``; its kind is told by its content.

    Raises:
        ValueError: none of the three kinds, damaged, or without anything about this artifact.
        OSError: it cannot be read.
    """
    if path.stat().st_size > LARGEST_TEXT:
        raise ValueError(f"{path} is too large for a conversion report, a lock or a list of sums")
    text = path.read_text("utf-8", "surrogateescape")
    if text.lstrip().startswith("{"):
        return _from_report(path, text)
    if any(_SUM.fullmatch(line) for line in text.splitlines()):
        return _from_sums(path, text, entry)
    return _from_lock(path, entry)


def _from_report(path: Path, text: str) -> Expected:
    try:
        report = json.loads(text)
        objects = {entry["object"]: _hex(entry["digest"], 32) for entry in report["methods"]}
        segments = tuple(int(entry["payload_bytes"]) for entry in report["files"])
        return Expected(
            path, _hex(report["artifact_id"], 32), int(report["payload_bytes"]), segments=segments, objects=objects
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no conversion report of ninferbuild ({type(error).__name__}: {error}); "
            "give the .conversion.json that was written beside the artifact"
        ) from error


def _from_lock(path: Path, entry: Path) -> Expected:
    try:
        targets = read_lock(path)
    except UsageError as error:
        raise ValueError(f"{path} is no conversion report, lock or sha256sum file ({error})") from error
    writing = [target for target in targets.values() if entry.name in target.files]
    if len(writing) != 1:
        raise ValueError(f"{path}: {'several targets write' if writing else 'no target writes'} {entry.name}")
    (target,) = writing
    return Expected(
        path,
        target.artifact_id,
        objects={label: item.digest for label, item in target.objects.items() if item.digest is not None},
        labelled=True,
        files={name: ExpectedFile(file.bytes, file.sha256) for name, file in target.files.items()},
        complete=True,
    )


_SUM = re.compile(
    r"""(?P<escaped>\\?)(?P<sum>[0-9a-f]{64})\ [ *](?P<name>.+)     # sha256sum
      | SHA256\ \((?P<tagged>.+)\)\ =\ (?P<tagged_sum>[0-9a-f]{64})  # sha256sum --tag, shasum
    """,
    re.VERBOSE | re.IGNORECASE,
)


def _from_sums(path: Path, text: str, entry: Path) -> Expected:
    listed = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _SUM.fullmatch(line)
        if match is None:
            raise ValueError(f"{path}:{number}: expected a SHA-256 and a file name, as sha256sum writes them")
        name = match["name"] or match["tagged"]
        if match["escaped"]:
            name = re.sub(r"\\(.)", lambda escape: {"n": "\n", "r": "\r"}.get(escape[1], escape[1]), name)
        listed.append((name, ExpectedFile(sha256=(match["sum"] or match["tagged_sum"]).lower())))
    files = _beside(listed, path, entry)
    if entry.name not in files:
        raise ValueError(f"{path} does not list {entry.name}")
    return Expected(path, files=files)


def _beside(listed: Sequence[tuple[str, ExpectedFile]], path: Path, entry: Path) -> dict[str, ExpectedFile]:
    """The listed files that lie beside ``entry``, by name; if it is not among them, the listed files by name alone.

    Names are relative to the file that lists them. Going by name alone finds an artifact that was moved.
    """
    folder = entry.parent.resolve()
    exact = {Path(name).name: facts for name, facts in listed if (path.parent / name).parent.resolve() == folder}
    if entry.name in exact:
        return exact
    by_name: dict[str, ExpectedFile] = {}
    for name, facts in listed:
        if by_name.setdefault(Path(name).name, facts) != facts:
            raise ValueError(f"{path} lists several files called {Path(name).name}; none of them is {entry}")
    return by_name


def _hex(value: Any, digits: int) -> str:
    if not isinstance(value, str) or re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is None:
        raise ValueError(f"{value!r} is not {digits} hexadecimal digits")
    return value


def compare(
    expected: Expected,
    artifact: Artifact,
    segments: Sequence[Segment],
    digests: Mapping[str, bytes],
    findings: Findings,
) -> None:
    """Report every difference between an artifact and what it is meant to be.

    Args:
        segments: the artifact's files.
        digests: object id → digest, of the objects that could be read.

    Raises:
        OSError: a file cannot be read.
    """

    def differs(problem: str, *, object: str | None = None, file: str | None = None) -> None:
        findings.add(Finding(problem, file=file, object=object, differs=True))

    if expected.artifact_id is not None:
        if artifact.artifact_id.hex() != expected.artifact_id:
            differs(f"artifact id {artifact.artifact_id.hex()}, expected {expected.artifact_id}")
        if artifact.directory.provenance.get("converter") != CONVERTER:
            differs("the artifact was not made by ninferbuild, expected one that was")
    if expected.payload_bytes is not None and artifact.payload_bytes != expected.payload_bytes:
        differs(f"{artifact.payload_bytes} payload bytes, expected {expected.payload_bytes}")
    sizes = tuple(segment.end - segment.begin for segment in segments)
    if expected.segments is not None and sizes != expected.segments:
        differs(f"files with {list(sizes)} payload bytes, expected {list(expected.segments)}")
    objects = expected.objects
    if expected.labelled:
        ids = {label: identifier for identifier, (label, _) in labels_of(artifact.directory).items()}
        objects = {ids.get(label, label): digest for label, digest in objects.items()}
    for identifier, digest in objects.items():
        found = digests.get(identifier)
        if identifier not in artifact.by_id:
            differs("the object is missing", object=identifier)
        elif found is not None and found.hex() != digest:
            differs(f"digest {found.hex()}, expected {digest}", object=identifier)
    if expected.complete:
        for identifier in artifact.by_id:
            if identifier not in objects:
                differs("the object is not expected", object=identifier)
    if expected.files:
        for segment in segments:
            _compare_file(expected.files.get(segment.path.name), segment.path, differs)
        if expected.complete:
            for name in expected.files.keys() - {segment.path.name for segment in segments}:
                differs("the artifact has no such file", file=name)


def _compare_file(expected: ExpectedFile | None, path: Path, differs: Callable[..., None]) -> None:
    if expected is None:
        differs("the file is not listed", file=path.name)
        return
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if expected.bytes is not None and size != expected.bytes:
                differs(f"{size} bytes, expected {expected.bytes}", file=path.name)
            elif expected.sha256 is not None:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != expected.sha256:
                    differs(f"SHA-256 {found}, expected {expected.sha256}", file=path.name)
    except FileNotFoundError:  # reported with the files of the set
        return
