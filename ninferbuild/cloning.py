"""Taking unchanged payloads from the artifact of an earlier build, on file systems where files can share bytes.

What is shared costs neither space nor writing. Nothing is believed about it: whoever clones has to read it back and
compare digests, which :mod:`ninferbuild.payload` does. Whatever is not as expected here only means that less, or
nothing, is cloned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
import os
from typing import TYPE_CHECKING

import msgspec

from ninferbuild import platform_io
from ninferbuild.artifact.framing import HEADER, SegmentMap, entry_header, payload_start
from ninferbuild.artifact.schema import ArtifactError, FileRecord
from ninferbuild.bindings import AUXILIARY

if TYPE_CHECKING:
    from ninferbuild.cache import BuildRecord
    from ninferbuild.publish import StagedFile

SMALLEST = 64 << 10
"""Neighbouring payloads of fewer bytes than this altogether are copied."""

SMALLEST_BLOCK = 4096
"""No file system is asked to share less than this many bytes, or such that do not begin at a multiple of them."""

SMALLEST_SHARE = 0.5
"""If less than this part of what is wanted can be cloned, all of it is copied: a file in many pieces is read slowly."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object of the new artifact, whose action has ``key``, at logical bytes ``[offset, offset + length)``."""

    id: str
    key: bytes
    offset: int
    length: int


class _Object(msgspec.Struct, frozen=True, gc=False):
    id: str
    offset: int
    bytes: int
    kind: str


class _File(msgspec.Struct, frozen=True, gc=False):
    path: str | None
    payload_bytes: int


class _Text(msgspec.Struct, frozen=True, gc=False):
    """What matters here of a directory."""

    objects: list[_Object]
    files: list[_File]


@dataclass(frozen=True, slots=True)
class Previous:
    """An artifact as an earlier build published it, open for reading.

    Attributes:
        descriptors: of its files, entry first.
        by_id: id → key, offset and length of each object that an action made.
        by_key: the same by key.
    """

    descriptors: Sequence[int]
    segments: SegmentMap
    by_id: dict[str, Wanted]
    by_key: dict[bytes, Wanted]

    def find(self, wanted: Wanted) -> Wanted | None:
        """An object whose action had the key of ``wanted``, the one of the same name if possible."""
        found = self.by_id.get(wanted.id)
        if found is None or found.key != wanted.key:
            found = self.by_key.get(wanted.key)
        return found if found is not None and found.length == wanted.length else None


@contextmanager
def opened(build: BuildRecord) -> Iterator[Previous | None]:
    """The artifact that ``build`` published; None if it is gone or anybody has touched it since."""
    with ExitStack() as stack:
        try:
            descriptors = []
            for path, size, modified in build.files:
                descriptor = platform_io.open_for_reading(path)
                stack.callback(os.close, descriptor)
                status = os.fstat(descriptor)
                if (status.st_size, status.st_mtime_ns) != (size, modified):
                    break
                descriptors.append(descriptor)
            complete = 0 < len(descriptors) == len(build.files)
            previous = _previous(build, descriptors) if complete else None
        except (OSError, ArtifactError, msgspec.MsgspecError):
            previous = None
        yield previous


def _previous(build: BuildRecord, descriptors: Sequence[int]) -> Previous | None:
    json_bytes, artifact_id = entry_header(os.pread(descriptors[0], HEADER.size, 0))
    if artifact_id.hex() != build.artifact_id or json_bytes > build.files[0][1]:
        return None
    data = bytearray(json_bytes)
    platform_io.read_into(descriptors[0], HEADER.size, memoryview(data))
    text = msgspec.json.decode(data, type=_Text)
    # Actions made the tensors, in the order of their keys, but for the auxiliary ones.
    weights = [item for item in text.objects if item.kind == "tensor" and not item.id.startswith(AUXILIARY)]
    if len(text.files) != len(descriptors) or len(weights) != len(build.keys):
        return None
    made = [Wanted(item.id, key, item.offset, item.bytes) for item, key in zip(weights, build.keys, strict=True)]
    files = [FileRecord(file.path, file.payload_bytes) for file in text.files]
    return Previous(
        descriptors=descriptors,
        segments=SegmentMap(files, payload_start(json_bytes)),
        by_id={item.id: item for item in made},
        by_key={item.key: item for item in reversed(made)},
    )


@dataclass(slots=True)
class _Run:
    """Bytes that lie together in one file of either artifact.

    Attributes:
        source, target: numbers of the files.
        position: in the new file.
        shift: what has to be added to it for the position in the old one.
        last: index of the last object in it.
        ids: its objects, one with several pieces several times.
    """

    source: int
    target: int
    position: int
    length: int
    shift: int
    last: int
    ids: list[str] = field(default_factory=list)

    def take(self, piece: _Piece, index: int) -> bool:
        """Add a piece of object ``index`` that follows, in both artifacts; False if it lies elsewhere."""
        end = self.position + self.length
        if (piece.source, piece.target, piece.shift) != (self.source, self.target, self.shift):
            return False
        if index - self.last > 1 or piece.position < end:
            return False
        self.length = piece.position + piece.length - self.position
        self.last = index
        return True

    def worthwhile(self, block: int) -> bool:
        """Whether enough of it can be shared."""
        return self.shift % block == 0 and self.inner(block)[1] >= SMALLEST

    def inner(self, block: int) -> tuple[int, int]:
        """The whole blocks in it: position in the new file, and bytes."""
        begin = -(-self.position // block) * block
        return begin, max(0, (self.position + self.length) // block * block - begin)


@dataclass(frozen=True, slots=True)
class Cloned:
    """What was taken from an earlier artifact, on trust so far.

    Attributes:
        whole: ids of the objects all of whose bytes are in place.
        touched: ids of those that have any; padding behind them may have come along.
    """

    whole: frozenset[str] = frozenset()
    touched: frozenset[str] = frozenset()


def clone_unchanged(
    build: BuildRecord, wanted: Sequence[tuple[int, Wanted]], segments: SegmentMap, staged: Sequence[StagedFile]
) -> Cloned:
    """Share with the artifact of ``build`` what its actions made and the new artifact wants again.

    Args:
        wanted: index among all objects, and the object, in file order. Bytes of other objects are left alone.
        segments: where logical bytes lie in ``staged``.

    Returns:
        the objects that still have to be checked, and the padding that has.
    """
    with opened(build) as previous:
        if previous is None:
            return Cloned()
        device = os.fstat(staged[0].descriptor).st_dev
        if any(os.fstat(descriptor).st_dev != device for descriptor in previous.descriptors):
            return Cloned()
        block = max(os.fstatvfs(staged[0].descriptor).f_frsize, SMALLEST_BLOCK)
        pieces = {item.id: _pieces(previous, item, segments) for _, item in wanted}
        runs = [run for run in _runs(wanted, pieces) if run.worthwhile(block)]
        if sum(run.length for run in runs) < SMALLEST_SHARE * sum(item.length for _, item in wanted):
            return Cloned()
        in_place: Counter[str] = Counter()
        touched: set[str] = set()
        for run in runs:
            touched.update(run.ids)
            try:
                _clone(run, previous.descriptors[run.source], staged[run.target], block)
            except OSError:
                break
            in_place.update(run.ids)
        whole = frozenset(identifier for identifier, count in in_place.items() if count == len(pieces[identifier]))
        return Cloned(whole, frozenset(touched))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one object that lie in one file of either artifact: numbers of the files, position in the new one."""

    source: int
    target: int
    position: int
    length: int
    shift: int


def _pieces(previous: Previous, new: Wanted, segments: SegmentMap) -> list[_Piece]:
    """All bytes of an object; nothing if the previous artifact does not have it."""
    old = previous.find(new)
    found: list[_Piece] = []
    begin, end = 0, new.length
    while old is not None and begin < end:
        source = next(previous.segments.spans(old.offset + begin, old.offset + end))
        target = next(segments.spans(new.offset + begin, new.offset + end))
        length = min(source.length, target.length)
        found.append(_Piece(source.file, target.file, target.position, length, source.position - target.position))
        begin += length
    return found


def _runs(wanted: Iterable[tuple[int, Wanted]], pieces: Mapping[str, Sequence[_Piece]]) -> list[_Run]:
    """Everything that could be cloned, neighbours joined with the padding between them."""
    runs: list[_Run] = []
    for index, item in wanted:
        for piece in pieces[item.id]:
            if not runs or not runs[-1].take(piece, index):
                runs.append(_Run(piece.source, piece.target, piece.position, piece.length, piece.shift, index))
            runs[-1].ids.append(item.id)
    return runs


def _clone(run: _Run, source: int, target: StagedFile, block: int) -> None:
    """Share whole blocks; copy the ends that fill none."""
    begin, length = run.inner(block)
    platform_io.clone_range(source, begin + run.shift, length, target.descriptor, begin)
    for first, last in ((run.position, begin), (begin + length, run.position + run.length)):
        data = bytearray(last - first)
        if platform_io.read_into(source, first + run.shift, memoryview(data)) < len(data):
            raise OSError(f"{target.target}: the earlier artifact is shorter than it was")
        target.write(first, data)
