"""The linker: from a plan, auxiliaries and cached payloads to the files of an artifact.

The result is a function of its inputs alone: no software versions, recipe text, paths, times or machine facts enter
the files, and the artifact id is computed from the directory. Two builds of one target are the same bytes anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.artifact_id import artifact_id_of
from ninferbuild.artifact.framing import (
    HEADER,
    MAGIC,
    PART_MAGIC,
    SegmentMap,
)
from ninferbuild.artifact.json_text import encode_json, encode_records
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import (
    ArtifactError,
    Directory,
    FileRecord,
    ResourceSpec,
    TensorSpec,
    decode_directory,
    plan_objects,
)
from ninferbuild.artifact.sizing import divide
from ninferbuild.digest import combine, digest_of
from ninferbuild.errors import NinferbuildError
from ninferbuild.publish import StagedFile, publish
from ninferbuild.report import CONVERTER, report_path
from ninferbuild.standing import FileState, first_bytes, refuse_foreign, state_of, surplus_of
from ninferbuild.target_schema import OptionError
from ninferbuild.writeback import WriteBehind, stays_cached

if TYPE_CHECKING:
    from ninferbuild.auxiliaries import AuxiliaryObject
    from ninferbuild.cache import ActionRecord, BuildRecord, Cache
    from ninferbuild.cloning import Cloned
    from ninferbuild.staging import Staging

FREE_SPACE_MARGIN = 16 << 20
"""Bytes that an output leaves free on its disk."""


class FileSizeError(OptionError, ArtifactError):
    """The bound on the size of a file leaves no room for an artifact."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that decides an artifact's bytes, payloads aside.

    Attributes:
        components: component records of the directory.
        resources: object id → bytes, in order.
        weights: specs of the parents, in order.
        auxiliaries: auxiliary objects, in order.
        grafted: specs of objects from other artifacts, in order.
        recipe: reference of the recipe: official name or ``file.py:function``.
        overrides: references of the overrides.
        name: ``metadata.name``.
    """

    components: Mapping[str, Any]
    resources: Mapping[str, bytes]
    weights: Sequence[TensorSpec]
    auxiliaries: Sequence[AuxiliaryObject]
    bindings: Mapping[str, Any]
    uses: Sequence[Mapping[str, Any]]
    recipe: str
    overrides: Sequence[str]
    name: str | None
    max_file_bytes: int | None
    grafted: Sequence[TensorSpec] = ()

    def specs(self) -> list[ResourceSpec | TensorSpec]:
        """Specs of all objects in file order."""
        return [
            *(ResourceSpec(name, len(data)) for name, data in self.resources.items()),
            *self.weights,
            *(item.spec for item in self.auxiliaries),
            *self.grafted,
        ]

    def encoded(self) -> list[int]:
        """Places among all objects of those that actions make, in the order of the actions."""
        first, behind = len(self.resources), len(self.resources) + len(self.weights) + len(self.auxiliaries)
        return [*range(first, first + len(self.weights)), *range(behind, behind + len(self.grafted))]


@dataclass(frozen=True, slots=True)
class Layout:
    """An artifact's files as they will be written, payload aside."""

    directory: Directory
    text: bytes
    payload_offset: int
    artifact_id: bytes

    def lengths(self) -> list[int]:
        """Bytes of each file, entry first."""
        segments = SegmentMap(self.directory.files, self.payload_offset)
        return [segments.file_length(index) for index in range(len(self.directory.files))]

    def paths(self, entry: Path) -> list[Path]:
        """The files of the set, entry first."""
        return [entry, *(entry.with_name(str(record.path)) for record in self.directory.files[1:])]


def lay_out(
    contents: Contents,
    entry_name: str,
    *,
    payload_digests: Sequence[bytes] | None,
    source_digests: Mapping[str, bytes],
) -> Layout:
    """Plan objects, write the directory and compute the artifact id.

    Args:
        payload_digests: of every object in file order; None while they are not known, which gives the right sizes
            and a provenance without meaning.
        source_digests: source name → digest of what was consumed of it.

    Raises:
        FileSizeError: ``max_file_bytes`` is too small.
        ArtifactError: the directory cannot be written as JSON.
    """
    objects = plan_objects(contents.specs())
    payload_bytes = objects[-1].offset + objects[-1].bytes
    root = combine(payload_digests) if payload_digests is not None else bytes(16)
    provenance: dict[str, Any] = {"converter": CONVERTER, "recipe": contents.recipe}
    if contents.overrides:
        provenance["overrides"] = list(contents.overrides)
    provenance["sources"] = {name: {"digest": digest.hex()} for name, digest in source_digests.items()}
    provenance["payload"] = root.hex()
    directory = Directory(
        dict(contents.components),
        tuple(objects),
        dict(contents.bindings),
        list(contents.uses),
        (FileRecord(None, payload_bytes),),
        {} if contents.name is None else {"name": contents.name},
        provenance,
    )
    return layout_of(directory, entry_name, contents.max_file_bytes)


def layout_of(directory: Directory, entry_name: str, max_file_bytes: int | None) -> Layout:
    """The files that ``directory`` needs, whatever files it names itself, and the id that follows from it.

    Raises:
        FileSizeError: ``max_file_bytes`` is too small.
        ArtifactError: the directory cannot be written as JSON.
    """
    head = [
        b'{"components":',
        encode_json(directory.components),
        b',"objects":',
        encode_records([item.to_json() for item in directory.objects]),
        b',"bindings":',
        encode_records(directory.bindings),
        b',"uses":',
        encode_records(directory.uses),
        b',"metadata":',
        encode_json(directory.metadata),
        b',"provenance":',
        encode_json(directory.provenance),
    ]
    try:
        records, text, offset = divide(entry_name, head, directory.payload_bytes, max_file_bytes)
    except ArtifactError as error:
        raise FileSizeError(f"--max-file-bytes, or max_file_bytes of a target: {error}") from None
    files = tuple(FileRecord(record["path"], record["payload_bytes"]) for record in records)
    return Layout(replace(directory, files=files), text, offset, artifact_id_of(text, files))


FileStat = tuple[str, int, int]
"""(path, bytes, mtime in nanoseconds) of a published file."""


def stats_of(paths: Iterable[Path]) -> tuple[FileStat, ...]:
    """What the cache remembers of published files."""
    return tuple((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths)


def up_to_date(layout: Layout, entry: Path, published: Sequence[FileStat], payload_digests: Sequence[bytes]) -> bool:
    """Whether the files at ``entry`` are already what linking would write.

    Unchanged file times since publication settle it; otherwise every byte is read and compared or digested.
    """
    wanted = _header(layout) + layout.text
    paths = layout.paths(entry)
    try:
        if first_bytes(entry, len(wanted)) != wanted or [path.stat().st_size for path in paths] != layout.lengths():
            return False
        return stats_of(paths) == tuple(map(tuple, published)) or _same_payload(entry, payload_digests)
    except OSError:
        return False


def _same_payload(entry: Path, payload_digests: Sequence[bytes]) -> bool:
    """Whether every byte behind the directory is what it should be: the objects, and the zeros around them."""
    from ninferbuild.artifact.findings import Findings
    from ninferbuild.artifact.shards import check_files
    from ninferbuild.verify import object_digest

    findings, end = Findings(), 0
    try:
        with Artifact(entry) as artifact:
            check_files(artifact, findings)
            for item, digest in zip(artifact.objects, payload_digests, strict=True):
                if any(artifact.read_range(end, item.offset - end)) or object_digest(artifact, item.id) != digest:
                    return False
                end = item.offset + item.bytes
            return not findings.invalid and not any(artifact.read_range(end, artifact.payload_bytes - end))
    except (ArtifactError, OSError):
        return False


def payload_digests(contents: Contents, records: Sequence[ActionRecord]) -> list[bytes]:
    """Digests of every object in file order."""
    weights = len(contents.weights)
    return [
        *(digest_of(data) for data in contents.resources.values()),
        *(record.digest for record in records[:weights]),
        *(digest_of(item.data) for item in contents.auxiliaries),
        *(record.digest for record in records[weights:]),
    ]


@dataclass(frozen=True, slots=True)
class Written:
    """How the payloads of a published artifact got there.

    Attributes:
        cloned: payloads shared with the previous artifact.
        refused: blocks of the previous artifact that were not what it was published with, and were not used.
        meanwhile: the entry that was replaced is not the one that was there at first: another process wrote it.
    """

    cloned: int
    refused: int
    meanwhile: bool = False


def write(
    layout: Layout,
    contents: Contents,
    records: Sequence[ActionRecord],
    cache: Cache,
    entry: Path,
    report: bytes | None,
    *,
    overwrite: bool,
    accept: Callable[[Sequence[Path], Sequence[Path]], None] | None = None,
    staging: Staging | None = None,
    previous: BuildRecord | None = None,
    seen: FileState | None = None,
) -> Written:
    """Write and publish the file set.

    Args:
        records: of the weights and the grafted objects, in order.
        staging: temporaries that hold payloads already.
        report: the conversion report, published beside the entry.
        accept: called with the complete temporaries and the names they are about to get; when it raises, nothing is
            published.
        previous: a build whose artifact may have the same payloads; they are cloned where the file system can. What
            is left of it if it was damaged may be replaced.
        seen: state of the entry at first, None if there was none.

    Raises:
        FileExistsError: a foreign file is in the way.
        PayloadLostError: a cached payload is damaged; nothing was published.
        NinferbuildError: the disk is too small.
        OSError: a file cannot be written; nothing was published.
    """
    decode_directory(layout.text, entry_name=entry.name)  # what a reader would refuse must not be written
    paths, lengths = layout.paths(entry), layout.lengths()
    refuse_foreign(paths, overwrite=overwrite, previous=previous)
    entry.parent.mkdir(parents=True, exist_ok=True)
    taken = staging.take(layout, entry) if staging is not None else None
    staged, complete = taken if taken is not None else ([], frozenset())
    reuse = staging.behind if staging is not None and taken is not None else None
    behind = reuse or WriteBehind(keep=stays_cached(sum(lengths)))
    staged_report: StagedFile | None = None
    found: FileState | None = None

    def surplus() -> list[Path]:
        nonlocal found
        found = state_of(entry)
        return surplus_of(paths, overwrite=overwrite, previous=previous)

    try:
        if taken is None:
            require_space(entry.parent, sum(lengths) + len(report or b""))
        if report is not None:
            staged_report = StagedFile(report_path(entry))
            staged_report.write(0, report)
        if taken is None:
            staged.extend(StagedFile(path, length) for path, length in zip(paths, lengths, strict=True))
        cloned = _clone(layout, contents, records, staged, complete, previous)
        write_framing(layout, staged)
        refused = _write_payload(layout, contents, records, cache, staged, complete, cloned, behind)
        if accept is not None:
            accept([file.path for file in staged], paths)
        publish(staged, staged_report, surplus)
        return Written(len(cloned.whole), refused, found not in (None, seen))
    finally:
        for file in (*staged, *([staged_report] if staged_report is not None else [])):
            file.discard()


def require_space(directory: Path, needed: int) -> None:
    """Raises ``NinferbuildError`` when the file system of ``directory`` has not ``needed`` bytes and a reserve free."""
    from ninferbuild.cache.filesystem import free_bytes

    free = free_bytes(directory)
    if free < needed + FREE_SPACE_MARGIN:
        raise NinferbuildError(
            f"{directory}: {needed} bytes have to be written and {FREE_SPACE_MARGIN} kept in reserve, {free} are free; "
            "make room or choose another place"
        )


def _header(layout: Layout) -> bytes:
    return HEADER.pack(MAGIC, len(layout.text), layout.artifact_id)


def write_framing(layout: Layout, staged: Sequence[StagedFile]) -> None:
    """Write headers and directory into the temporaries, entry first."""
    staged[0].write(0, _header(layout) + layout.text)
    for index, file in enumerate(staged[1:], 1):
        file.write(0, HEADER.pack(PART_MAGIC, index, layout.artifact_id))


def _clone(
    layout: Layout,
    contents: Contents,
    records: Sequence[ActionRecord],
    staged: Sequence[StagedFile],
    complete: frozenset[str],
    previous: BuildRecord | None,
) -> Cloned:
    from ninferbuild.cloning import Cloned, Wanted, clone_unchanged  # only what links writes payloads

    objects = layout.directory.objects
    wanted = [
        (index, Wanted(item.id, record.key, item.offset, item.bytes))
        for index, record in zip(contents.encoded(), records, strict=True)
        if (item := objects[index]).id not in complete
    ]
    if previous is None or not wanted:
        return Cloned()
    return clone_unchanged(previous, wanted, SegmentMap(layout.directory.files, layout.payload_offset), staged)


def _write_payload(
    layout: Layout,
    contents: Contents,
    records: Sequence[ActionRecord],
    cache: Cache,
    staged: Sequence[StagedFile],
    complete: frozenset[str],
    cloned: Cloned,
    behind: WriteBehind,
) -> int:
    """Put every object that is not ``complete`` in its place; how many of the cloned blocks were not as expected."""
    from ninferbuild.payload import PayloadWriter, Placed

    segments = SegmentMap(layout.directory.files, layout.payload_offset)
    writer = PayloadWriter(segments, staged, behind)
    objects = layout.directory.objects
    for item, data in zip(objects, contents.resources.values(), strict=False):
        writer.put(item.offset, data)
    ends = [*(item.offset for item in objects[1:]), segments.payload_bytes]
    writer.write(
        (
            Placed(record, item.offset, item.id in cloned.whole, padding if item.id in cloned.touched else 0)
            for index, record in zip(contents.encoded(), records, strict=True)
            for item, padding in [(objects[index], ends[index] - objects[index].offset - objects[index].bytes)]
            if item.id not in complete
        ),
        cache,
    )
    behind_weights = len(contents.resources) + len(contents.weights)
    for item, auxiliary in zip(objects[behind_weights:], contents.auxiliaries, strict=False):
        writer.put(item.offset, auxiliary.data)
    behind.finish()
    return writer.refused
