"""Verifying an artifact without its checkpoint: files, directory, every word, padding, digests.

Everything is read once, in blocks of 8 MiB. What a digest covers and what is checked are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ninferbuild.artifact.artifact_id import artifact_id_of
from ninferbuild.artifact.findings import DEFAULT_LIMIT, Finding, Findings
from ninferbuild.artifact.framing import HEADER, entry_header
from ninferbuild.artifact.layouts import align_up, get_layout, planes
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.roles import check_auxiliaries
from ninferbuild.artifact.schema import ArtifactError, ArtifactObject, TensorObject
from ninferbuild.artifact.shards import Segment, check_files
from ninferbuild.artifact.validity import WordRules, rules_of
from ninferbuild.digest import BLOCK_BYTES, block_digest, combine
from ninferbuild.expected import Expected, compare
from ninferbuild.report import CONVERTER

TILE_BYTES = 256 << 10
"""Bytes of a plane that are checked at a time; the masks that the checks compute then stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What verifying an artifact found.

    Attributes:
        artifact_id: None if the entry cannot be opened.
        files: names of the files of the set, entry first.
        objects, payload_bytes: as the directory declares them.
        unchecked: objects that could not be read whole, because a file is missing or their encoding is unusable.
        against: the file it was compared with.
        findings: what is wrong, at most a given number for each object or file.
        more: object id or file name → findings that are not among them.
        invalid, different: number of all findings of either sort.
    """

    path: Path
    artifact_id: bytes | None
    files: tuple[str, ...]
    objects: int
    payload_bytes: int
    unchecked: int
    against: Path | None
    findings: tuple[Finding, ...]
    more: dict[str, int]
    invalid: int
    different: int

    @property
    def exit_code(self) -> int:
        """1 if the artifact is invalid, else 3 if it differs from what it was compared with, else 0."""
        return 1 if self.invalid else 3 if self.different else 0

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON object."""
        return {
            "artifact": str(self.path),
            "artifact_id": None if self.artifact_id is None else self.artifact_id.hex(),
            "files": list(self.files),
            "objects": self.objects,
            "payload_bytes": self.payload_bytes,
            "unchecked": self.unchecked,
            "against": None if self.against is None else str(self.against),
            "valid": not self.invalid,
            "equal": None if self.against is None else not self.different,
            "invalid": self.invalid,
            "different": self.different,
            "findings": [finding.to_json() for finding in self.findings],
            "more": self.more,
        }


def verify(
    path: Path,
    *,
    against: Expected | None = None,
    limit: int = DEFAULT_LIMIT,
    observe: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check every rule that an artifact can be held to without its checkpoint.

    Args:
        path: the entry.
        against: what the artifact is meant to be.
        limit: findings that are kept for one object or file.
        observe: called with (payload bytes done, payload bytes in all).

    Raises:
        OSError: a file cannot be opened or read; a part that is missing is a finding.
    """
    findings = Findings(limit)
    source = None if against is None else against.path
    try:
        artifact = Artifact(path)
    except ArtifactError as error:
        findings.add(Finding(str(error).removeprefix(f"{path}: "), file=path.name))
        return Verification(path, None, (path.name,), 0, 0, 0, source, findings.kept(), {}, 1, 0)
    with artifact:
        segments = check_files(artifact, findings)
        digests = _check_payload(artifact, segments, findings, observe)
        check_auxiliaries(artifact, findings, lambda begin, end: _readable(segments, begin, end))
        _check_identity(artifact, digests, findings)
        if against is not None:
            compare(against, artifact, segments, digests, findings)
        return Verification(
            path,
            artifact.artifact_id,
            tuple(segment.path.name for segment in segments),
            len(artifact.objects),
            artifact.payload_bytes,
            len(artifact.objects) - len(digests),
            source,
            findings.kept(),
            findings.more(),
            findings.invalid,
            findings.different,
        )


def object_digest(artifact: Artifact, object_id: str) -> bytes:
    """The digest of one object's bytes, over the same blocks as a payload in the cache.

    Blocks end at plane boundaries and every 8 MiB within a plane.

    Raises:
        ArtifactError: the object's encoding is unknown or inconsistent, or a part does not belong to the artifact.
        OSError: a part is missing or unreadable.
    """
    return combine(digest for _, digest in object_blocks(artifact, object_id))


def object_blocks(artifact: Artifact, object_id: str) -> Iterator[tuple[bytes, bytes]]:
    """The bytes of one object from the first to the last in those blocks, each with its digest.

    Raises:
        as :func:`object_digest`.
    """
    item = artifact.object(object_id)
    for block in _blocks(artifact, item, range(len(_extents(item)))):
        yield block.data, block.digest


def copy_object(artifact: Artifact, object_id: str, put: Callable[[int, bytes], None]) -> bytes:
    """Read an object whole and pass its bytes on, as :func:`copy_sound` does; its digest. Nothing is checked."""
    offset, digests = 0, []
    for data, digest in object_blocks(artifact, object_id):
        put(offset, data)
        offset += len(data)
        digests.append(digest)
    return combine(digests)


def copy_sound(artifact: Artifact, object_id: str, put: Callable[[int, bytes], None]) -> bytes:
    """Read an object whole, check its words and padding, and pass its bytes on.

    Args:
        put: called with (offset in the object, bytes), once for each byte; planes come in the order in which they can
            be checked.

    Returns:
        the object's digest, as :func:`object_digest`.

    Raises:
        ArtifactError: a word is not legal in the object's format, or padding is not zero; all bytes were passed on.
        as :func:`object_digest`.
    """
    item, findings = artifact.object(object_id), Findings(1)
    digest = _check_object(artifact, item, findings, None, put)
    if findings.invalid:
        (first,) = findings.kept()
        raise ArtifactError(
            f"{artifact.path}: {first}: the artifact is damaged; get it again (`ninferbuild verify` shows all that is "
            "wrong with it)"
        )
    return digest


@dataclass(frozen=True, slots=True)
class _Block:
    """One digest block: ``data`` starts at byte ``begin`` of plane number ``plane``."""

    plane: int
    begin: int
    data: bytes
    digest: bytes


def _extents(item: ArtifactObject) -> list[int]:
    """Bytes of each plane with the padding behind it."""
    if isinstance(item, TensorObject):
        return [plane.extent for plane in planes(item.layout, item.format, item.shape, item.divisors)]
    return [item.bytes]


def _blocks(artifact: Artifact, item: ArtifactObject, order: Sequence[int]) -> Iterator[_Block]:
    extents = _extents(item)
    for plane in order:
        start = item.offset + sum(extents[:plane])
        for begin in range(0, extents[plane], BLOCK_BYTES):
            length = min(BLOCK_BYTES, extents[plane] - begin)
            data = artifact.read_range(start + begin, length)
            yield _Block(plane, begin, data, block_digest(data))


def _ahead(blocks: Iterator[_Block], reader: ThreadPoolExecutor) -> Iterator[_Block]:
    """The blocks, each read and hashed by ``reader`` while the one before it is checked."""
    coming = reader.submit(next, blocks, None)
    while (block := coming.result()) is not None:
        coming = reader.submit(next, blocks, None)
        yield block


def _check_payload(
    artifact: Artifact, segments: Sequence[Segment], findings: Findings, observe: Callable[[int, int], None] | None
) -> dict[str, bytes]:
    """Check all objects and what lies between them; the digests of the objects that could be read whole."""
    digests = {}
    made_here = artifact.directory.provenance.get("converter") == CONVERTER
    end = 0
    with ThreadPoolExecutor(1, "verify-read") as reader:
        for item in artifact.objects:
            if item.offset > end and (made_here or item.offset == align_up(end, _alignment(item))):
                _check_gap(artifact, segments, end, item.offset, findings)
            end = item.offset + item.bytes
            try:
                artifact.object(item.id)
                if _readable(segments, item.offset, end):
                    digests[item.id] = _check_object(artifact, item, findings, reader)
            except ArtifactError as error:
                problem = str(error).removeprefix(f"object {item.id!r}: ")
                findings.add(Finding(problem, object=item.id))
            if observe is not None:
                observe(end, artifact.payload_bytes)
    if made_here and end < artifact.payload_bytes:
        _check_gap(artifact, segments, end, artifact.payload_bytes, findings)
    return digests


def _alignment(item: ArtifactObject) -> int:
    if not isinstance(item, TensorObject):
        return 1
    try:
        return get_layout(item.layout).alignment
    except ValueError:  # an unknown layout; reported with the object
        return 1


def _readable(segments: Sequence[Segment], begin: int, end: int) -> bool:
    return all(segment.readable for segment in segments if segment.begin < end and begin < segment.end)


def _check_object(
    artifact: Artifact,
    item: ArtifactObject,
    findings: Findings,
    reader: ThreadPoolExecutor | None,
    put: Callable[[int, bytes], None] | None = None,
) -> bytes:
    """Check the words and padding of one object; its digest.

    Args:
        reader: reads ahead.
        put: see :func:`copy_sound`.
    """
    starts = list(accumulate(_extents(item), initial=0))
    rules = rules_of(item, findings) if isinstance(item, TensorObject) else None
    digests: list[list[bytes]] = [[] for _ in _extents(item)]
    blocks = _blocks(artifact, item, range(1) if rules is None else rules.reading_order)
    for block in _ahead(blocks, reader) if reader is not None and item.bytes > BLOCK_BYTES else blocks:
        digests[block.plane].append(block.digest)
        if put is not None:
            put(starts[block.plane] + block.begin, block.data)
        if rules is not None:
            _check_block(rules, block, findings)
    return combine(digest for plane in digests for digest in plane)


def _check_block(rules: WordRules, block: _Block, findings: Findings) -> None:
    plane = rules.planes[block.plane]
    data = np.frombuffer(block.data, np.uint8)
    words, padding = np.split(data, [plane.bytes - block.begin])
    for begin in range(0, len(words), TILE_BYTES):
        rules.check(block.plane, block.begin + begin, words[begin : begin + TILE_BYTES])
    if padding.any():
        place = plane.offset + plane.bytes + int(np.flatnonzero(padding)[0])
        problem = f"padding after plane {rules.names[block.plane]} is not zero"
        findings.add(Finding(problem, object=rules.item.id, offset=place))


def _check_gap(artifact: Artifact, segments: Sequence[Segment], begin: int, end: int, findings: Findings) -> None:
    """Check that the payload bytes ``[begin, end)``, which belong to no object, are zero."""
    if not _readable(segments, begin, end):
        return
    place = begin
    for data in artifact.iter_range(begin, end - begin):
        used = data.lstrip(b"\0")
        if used:
            place += len(data) - len(used)
            findings.add(Finding("payload between objects is not zero", offset=place))
            return
        place += len(data)


def _check_identity(artifact: Artifact, digests: Mapping[str, bytes], findings: Findings) -> None:
    """Check what an artifact made by ninferbuild says about itself: its id and the root digest of its payloads."""
    provenance = artifact.directory.provenance
    if provenance.get("converter") != CONVERTER:
        return
    computed = artifact_id_of(_directory_text(artifact), artifact.directory.files).hex()
    if computed != artifact.artifact_id.hex():
        findings.add(Finding(f"artifact id {artifact.artifact_id.hex()}, but the directory gives {computed}"))
    if len(digests) == len(artifact.objects):
        root = combine(digests[item.id] for item in artifact.objects).hex()
        if root != provenance.get("payload"):
            findings.add(Finding(f"provenance.payload is {provenance.get('payload')!r}, but the payloads give {root}"))


def _directory_text(artifact: Artifact) -> bytes:
    """The directory as it stands in the entry, with the white space around it."""
    with artifact.path.open("rb") as entry:
        json_bytes, _ = entry_header(entry.read(HEADER.size))
        return entry.read(json_bytes)
