"""Headers of the files of a set and the arithmetic of their payload segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
import struct

from ninferbuild.artifact.directory import FileRecord
from ninferbuild.artifact.layouts import align_up
from ninferbuild.artifact.primitives import ArtifactError

MAGIC = b"NINFER\x00\x03"
PART_MAGIC = b"NINPRT\x00\x03"

HEADER = struct.Struct("<8sQ16s")
"""Magic, then JSON bytes (entry) or index in ``files`` (part), then the artifact id."""

ARTIFACT_ID_BYTES = 16
PAYLOAD_ALIGNMENT = 4096
IO_CHUNK_BYTES = 8 << 20


def entry_header(data: bytes) -> tuple[int, bytes]:
    """The JSON length and the artifact id of an entry's first 32 bytes.

    Raises:
        ArtifactError: too short, another magic, or no JSON.
    """
    if len(data) < HEADER.size:
        raise ArtifactError(f"the file ends inside the {HEADER.size}-byte header")
    magic, json_bytes, artifact_id = HEADER.unpack(data[: HEADER.size])
    if magic != MAGIC:
        raise ArtifactError(f"no v3 .ninfer entry: {_foreign_magic(magic)}")
    if json_bytes == 0:
        raise ArtifactError("the header declares an empty directory")
    return json_bytes, artifact_id


def _foreign_magic(magic: bytes) -> str:
    if magic == PART_MAGIC:
        return "this is a continuation; open the entry it belongs to"
    if magic[:-1] == MAGIC[:-1]:
        return f"container version {magic[-1]}" + (" is obsolete; upgrade the file" if magic[-1] < 3 else " is unknown")
    return f"the v3 magic is missing (found {magic.hex(' ')})"


def payload_start(json_bytes: int) -> int:
    """Offset of the payload segment in the entry."""
    return align_up(HEADER.size + json_bytes, PAYLOAD_ALIGNMENT)


def part_name(entry_name: str, index: int) -> str:
    """The generated name of part ``index`` (the first is 1)."""
    return f"{entry_name}.part-{index:04d}"


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes at ``position`` of file number ``file``."""

    file: int
    position: int
    length: int


class SegmentMap:
    """From logical payload ranges to file ranges."""

    def __init__(self, files: Sequence[FileRecord], entry_payload_start: int):
        self._ends = tuple(accumulate(record.payload_bytes for record in files))
        self._starts = (entry_payload_start, *([PAYLOAD_ALIGNMENT] * (len(files) - 1)))

    @property
    def payload_bytes(self) -> int:
        return self._ends[-1]

    def file_length(self, index: int) -> int:
        """Bytes of file ``index``, framing included."""
        return self._starts[index] + self._ends[index] - (self._ends[index - 1] if index else 0)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """The pieces of logical bytes ``[begin, end)``, in order, each inside one file."""
        index = bisect_right(self._ends, begin)
        while begin < end:
            first = self._ends[index - 1] if index else 0
            stop = min(end, self._ends[index])
            yield Span(index, self._starts[index] + begin - first, stop - begin)
            begin = stop
            index += 1
