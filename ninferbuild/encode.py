"""Encoding one parent with a built-in method: read, hash, encode, hand over the bytes of each plane.

Every byte of the source is read once, in order, and hashed before the rule sees it: what the key says was encoded is
what was encoded. A rule that surveys its parent is shown it twice, and each time every byte is hashed: the parent's
whole values must not be kept, and a second read of what was read a moment ago costs less than writing it elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from functools import partial
from math import prod
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ninferbuild.ahead import ahead
from ninferbuild.artifact.codecs.buffers import host_memory
from ninferbuild.artifact.formats import DIRECT_FORMATS
from ninferbuild.block_memory import BlockMemory
from ninferbuild.digest import BLOCK_BYTES, BlockHasher, block_digest, combine
from ninferbuild.errors import Cancelled, SourceChangedError
from ninferbuild.lanes import Block, Encode, HostLane, Lane
from ninferbuild.manifest import declares_content
from ninferbuild.rules.rule import ErrorFlags, Rule
from ninferbuild.sources.decoding import EncodedStream, ValueStream, open_encoded, open_values
from ninferbuild.sources.logical import EncodedRows, concatenate_encoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ninferbuild.artifact.layouts import Plane
    from ninferbuild.method import MethodInput
    from ninferbuild.plan import Parent

CHUNK_BYTES = 4 << 20
"""Source bytes of one chunk on the CPU: small enough to stay in the caches between reading and encoding."""

CUDA_CHUNK_BYTES = 24 << 20
"""Source bytes of one chunk on a GPU: large enough that launching kernels costs little beside the copies."""

LARGE_BYTES = 32 << 20
"""Parents of so many source bytes are read ahead."""

BLOCKS_UNDER_WAY = 3
"""Blocks of a payload that are being stored while the next ones are encoded."""

TILE_ROWS = 128
"""Rows of one scale tile of ``block_scale_k16_m128x4_v1``; its chunks are whole tiles."""


class PayloadSink:
    """Cuts the planes of one payload into blocks: at plane boundaries, and every 8 MiB within a plane.

    One block a plane is open and a few are on their way, so memory does not grow with the payload.

    Args:
        planes: geometry of the payload, in file order.
        put: stores one full block, given its offset in the payload, and returns its digest.
        pool: calls ``put``; blocks of one payload may be stored in any order.
        memory: where blocks are made; payloads may share it.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        put: Callable[[int, memoryview], bytes],
        pool: Executor,
        memory: BlockMemory | None = None,
    ):
        self._planes = planes
        self._put = put
        self._pool = pool
        self._memory = memory or BlockMemory()
        self._open: list[NDArray[np.uint8] | None] = [None] * len(planes)
        self._filled = [0] * len(planes)
        self._done = [0] * len(planes)
        self._blocks: list[list[tuple[Future[bytes], int]]] = [[] for _ in planes]
        self._under_way: deque[Future[bytes]] = deque()

    def append(self, plane: int, data: memoryview) -> None:
        """The next bytes of one plane.

        Raises:
            ValueError: the plane holds fewer.
            whatever ``put`` raised for an earlier block.
        """
        extent = self._planes[plane].extent
        if self._done[plane] + self._filled[plane] + len(data) > extent:
            raise ValueError(f"plane {plane} holds {extent} bytes, more were written")
        while len(data):
            block = self._open[plane]
            if block is None:
                block = self._open[plane] = self._memory.take(min(BLOCK_BYTES, extent - self._done[plane]))
            filled = self._filled[plane]
            piece = data[: len(block) - filled]
            # numpy copies without holding the interpreter lock, which other workers need meanwhile.
            block[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            data = data[len(piece) :]
            self._filled[plane] = filled + len(piece)
            if self._filled[plane] == len(block):
                self._close(plane)

    def _close(self, plane: int) -> None:
        block = self._open[plane]
        assert block is not None
        offset = self._planes[plane].offset + self._done[plane]
        stored = self._pool.submit(self._put, offset, block.data.toreadonly())
        self._blocks[plane].append((stored, len(block)))
        self._done[plane] += len(block)
        self._open[plane], self._filled[plane] = None, 0
        self._under_way.append(stored)
        if len(self._under_way) > BLOCKS_UNDER_WAY:
            self._under_way.popleft().result()

    def finish(self) -> tuple[tuple[tuple[bytes, int], ...], bytes]:
        """Zero the gaps behind the planes; the blocks in payload order and the digest of the payload.

        Raises:
            ValueError: a plane did not receive all its bytes.
            whatever ``put`` raised.
        """
        for index, plane in enumerate(self._planes):
            written = self._done[index] + self._filled[index]
            if written not in (plane.bytes, plane.extent):
                raise ValueError(f"plane {index} holds {plane.bytes} bytes, {written} were written")
            if plane.extent > written:
                self.append(index, memoryview(bytes(plane.extent - written)))
        blocks = tuple((stored.result(), length) for plane_blocks in self._blocks for stored, length in plane_blocks)
        return blocks, combine(digest for digest, _ in blocks)

    def abandon(self) -> None:
        """Wait for blocks on their way of a payload that will not be finished."""
        wait(self._under_way)


class _OpaqueValues:
    """Values of a user's reader as a stream, hashed like a region: element type and bytes."""

    def __init__(self, item: MethodInput, count: Callable[[int], None]):
        self._source = item.source
        self._count = count
        self._hasher = BlockHasher()
        self._next = 0
        self._dtype: torch.dtype | None = None

    def read(self, count: int) -> torch.Tensor:
        values = self._source.values(self._next, self._next + count).detach().cpu().contiguous()
        if self._dtype is None:
            self._dtype = values.dtype
            self._hasher.update(str(values.dtype).encode())
        elif values.dtype != self._dtype:
            raise ValueError(f"{self._source.label}: values are {values.dtype} after {self._dtype}")
        self._next += count
        data = host_memory(values.view(torch.uint8))
        self._hasher.update(data)
        self._count(data.nbytes)
        return values

    def digest(self) -> bytes:
        return self._hasher.digest()


class _OpaqueRows:
    """Encoded rows of a user's reader as a stream, hashed word for word: codes and scales each for themselves, so that
    the digest does not depend on how the rows are cut into blocks."""

    def __init__(self, item: MethodInput, count: Callable[[int], None]):
        self._source = item.source
        self._count = count
        self._hashers = (BlockHasher(), BlockHasher())
        self._next = 0
        self._kind: str | None = None

    def read(self, rows: int) -> EncodedRows:
        assert self._source.read_encoded is not None
        block = self._source.read_encoded(self._next, self._next + rows)
        self._next += rows
        kind = f"{block.format} {(block.weight_divisor or b'').hex()}{' packed' if block.packed else ''}"
        if self._kind is None:
            self._kind = kind
        elif kind != self._kind:
            raise ValueError(f"{self._source.label}: encoded rows are {kind} after {self._kind}")
        for hasher, words in zip(self._hashers, (block.codes, block.scales), strict=True):
            data = host_memory(words.detach().contiguous().view(torch.uint8).reshape(-1))
            hasher.update(data)
            self._count(data.nbytes)
        return block

    def digest(self) -> bytes:
        return combine([block_digest((self._kind or "").encode()), *(hasher.digest() for hasher in self._hashers)])


class InputReader:
    """The inputs of one parent as one stream, with a digest for each slot of the parent's manifest."""

    def __init__(self, parent: Parent):
        rule = parent.rule
        self.encoded = rule is not None and rule.reads == "encoded"
        self.source_bytes = 0
        self._hashers: list[BlockHasher | _OpaqueValues | _OpaqueRows] = []
        self._slots: list[int] = []
        self._streams: list[ValueStream | EncodedStream | _OpaqueValues | _OpaqueRows] = []
        self._left: list[int] = []
        for item in parent.request.inputs:
            described = item.source.description
            if described is None:
                reader = (_OpaqueRows if self.encoded else _OpaqueValues)(item, self._count)
                self._streams.append(reader)
                if not declares_content(item.source):
                    self._hashers.append(reader)
            else:
                hashers = [BlockHasher() for _ in described.parts]
                opened = partial(open_encoded, packed=True) if self.encoded else open_values
                self._streams.append(opened(described, self._part_observer(hashers)))
                self._hashers += hashers
            self._left.append(item.source.shape[0] if self.encoded else prod(item.source.shape))
        self._current = 0

    def _count(self, data_bytes: int) -> None:
        self.source_bytes += data_bytes

    def _part_observer(self, hashers: list[BlockHasher]) -> Callable[[int, memoryview], None]:
        def observe(part: int, data: memoryview) -> None:
            self.source_bytes += data.nbytes
            hashers[part].update(data)

        return observe

    def element_bytes(self) -> int:
        """Bytes of one element of the values as they are read: the most of any input, two where that is not known."""
        types = [getattr(stream, "dtype", None) for stream in self._streams]
        return max(dtype.itemsize if dtype is not None else 2 for dtype in types)

    def remaining_in_input(self) -> int:
        """Units (elements, or rows when encoded) left in the input that is read next."""
        while self._current < len(self._left) - 1 and not self._left[self._current]:
            self._current += 1
        return self._left[self._current]

    def values(self, count: int, room: Callable[[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
        """The next ``count`` elements, 1-D, on the host. Inputs of several types promote as ``torch.cat`` does.

        ``room`` gives the memory to read into when all of them come from one stored tensor.
        """
        pieces = list(self._take(count))
        if len(pieces) == 1:
            ((stream, taken),) = pieces
            dtype = getattr(stream, "dtype", None)
            return stream.read(taken) if dtype is None else stream.read(taken, room(taken, dtype))  # type: ignore[call-arg,return-value]
        return torch.cat([stream.read(taken) for stream, taken in pieces])  # type: ignore[misc]

    def rows(self, count: int) -> EncodedRows:
        """The next ``count`` encoded rows."""
        pieces = [stream.read(taken) for stream, taken in self._take(count)]
        if len(pieces) == 1:
            return pieces[0]  # type: ignore[return-value]
        return concatenate_encoded(pieces, "encoded inputs cannot share one parent format/divisor")  # type: ignore[arg-type]

    def _take(self, count: int) -> Iterator[tuple[ValueStream | EncodedStream | _OpaqueValues | _OpaqueRows, int]]:
        while count:
            left = self.remaining_in_input()
            if not left:
                raise ValueError("the inputs hold fewer elements than the parent")
            taken = min(left, count)
            self._left[self._current] -= taken
            yield self._streams[self._current], taken
            count -= taken

    def digests(self) -> list[bytes]:
        """One digest for each slot, valid once everything was read."""
        return [hasher.digest() for hasher in self._hashers]


def hash_values(item: MethodInput, *, encoded: bool, cancel: threading.Event) -> tuple[bytes, int]:
    """The digest of what a user's reader gives, and the bytes it gave."""
    total = 0

    def count_bytes(data_bytes: int) -> None:
        nonlocal total
        total += data_bytes

    stream = (_OpaqueRows if encoded else _OpaqueValues)(item, count_bytes)
    left = item.source.shape[0] if encoded else prod(item.source.shape)
    while left:
        if cancel.is_set():
            raise Cancelled
        count = min(left, 4096 if encoded else CHUNK_BYTES // 2)
        stream.read(count)
        left -= count
    return stream.digest(), total


def encode(
    parent: Parent,
    sink: PayloadSink,
    lane: Lane,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    cancel: threading.Event,
    advance: Callable[[int], None],
) -> tuple[list[bytes], int]:
    """Run a built-in method on its parent.

    Args:
        sink: receives the bytes of each plane.
        lane: takes blocks to where the arithmetic is done. The result does not depend on it.
        chunk_bytes: decoded source bytes of one chunk. The result does not depend on it.
        cancel: checked between chunks.
        advance: told the source bytes of each chunk.

    Returns:
        the digests of the slots of the parent's manifest, and the source bytes read: twice those of the parent for a
        rule that surveys it.

    Raises:
        ValueError: the source holds values that the method refuses.
        SourceChangedError: the source gave something else when it was read a second time.
        Cancelled: ``cancel`` was set.
    """
    rule, checked, target = parent.rule, parent.checked, parent.request.target
    assert rule is not None
    assert checked is not None
    if rule.reads != "values":  # rows are rearranged, not computed with: that is not worth the way to a GPU
        lane = HostLane()
    errors = ErrorFlags(lane.device)

    def each_block(work: Callable[[int], Encode]) -> InputReader:
        reader, told = InputReader(parent), 0
        blocks = _blocks(parent, reader, lane, _chunks(rule, parent, reader, chunk_bytes))
        with closing(ahead(blocks, lane.ahead) if _is_large(parent) else blocks) as coming:
            for first, block in coming:
                if cancel.is_set():
                    raise Cancelled
                lane.run(block, work(first), sink.append)
                advance(reader.source_bytes - told)
                told = reader.source_bytes
        lane.finish(sink.append)
        return reader

    surveyed = None
    if rule.surveys:
        survey = _Survey(rule, lane.device)
        surveyed = each_block(lambda first: survey)
        checked = lane.compute(partial(rule.surveyed, checked, survey.seen, errors))
        errors.raise_if_any()
    reader = each_block(
        lambda first: partial(
            rule.encode, target=target, checked=checked, first_row=first, device=lane.device, errors=errors
        )
    )
    errors.raise_if_any()
    digests, source_bytes = reader.digests(), reader.source_bytes
    if surveyed is not None:
        source_bytes += surveyed.source_bytes
        if surveyed.digests() != digests:
            raise SourceChangedError(
                f"{', '.join(parent.names[:4])}: its source changed while it was read; build again"
            )
    return digests, source_bytes


class _Survey:
    """Shows blocks to a surveying rule; they give no planes."""

    def __init__(self, rule: Rule, device: torch.device):
        self._rule = rule
        self._device = device
        self.seen: Any = None

    def __call__(self, block: Block) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            self.seen = self._rule.survey_block(block, self.seen, self._device)
        return ()


def _is_flat(parent: Parent) -> bool:
    """Whether the inputs are read as elements, or as bytes, and not by rows."""
    assert parent.rule is not None
    return parent.request.target.format in DIRECT_FORMATS or parent.rule.reads == "payload"


def _is_large(parent: Parent) -> bool:
    """Whether reading ahead is worth a thread. What a user's reader does belongs in the thread that is watched."""
    if any(item.source.description is None for item in parent.request.inputs):
        return False
    return 2 * prod(parent.request.target.shape) >= LARGE_BYTES


def _blocks(
    parent: Parent, reader: InputReader, lane: Lane, chunks: Iterator[tuple[int, int]]
) -> Generator[tuple[int, torch.Tensor | EncodedRows]]:
    """The parent's inputs block by block, each with its first row (direct formats: element)."""
    target = parent.request.target
    for first, count in chunks:
        if reader.encoded:
            yield first, reader.rows(count)
        elif _is_flat(parent):
            yield first, reader.values(count, lane.room)
        else:
            yield first, reader.values(count * target.shape[1], lane.room).view(count, target.shape[1])


def _chunks(rule: Rule, parent: Parent, reader: InputReader, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each chunk: elements for direct formats, bytes of a payload, rows for the others."""
    target = parent.request.target
    width = 1 if _is_flat(parent) else target.shape[1]
    total = parent.request.source_offsets[-1] // width
    size = max(1, chunk_bytes // (reader.element_bytes() * width))
    tile = TILE_ROWS if target.layout == "block_scale_k16_m128x4_v1" else 1
    size = max(tile, size // tile * tile)
    first = 0
    while first < total:
        count = min(size, total - first)
        # Chunks end with an input where they can, so that no chunk has to be glued together; stacked NVFP4 requires it.
        left = reader.remaining_in_input() // (1 if reader.encoded else width)
        if left >= tile and left % tile == 0:
            count = min(count, left)
        yield first, count
        first += count
