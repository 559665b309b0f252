"""Lanes: the way of one worker's blocks to the device and of the encoded bytes back.

On the CPU a block is encoded where it was read. On CUDA a lane has a stream of its own and keeps a few blocks in
flight, so that reading, copying, encoding and copying back overlap and the host waits for nothing but finished bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Protocol, TypeVar

import torch

from ninferbuild.artifact.codecs.buffers import host_memory
from ninferbuild.artifact.layouts import align_up
from ninferbuild.page_locked import BufferRing
from ninferbuild.sources.encoded import EncodedRows

Result = TypeVar("Result")

Block = torch.Tensor | EncodedRows
Encode = Callable[[Block], Sequence[torch.Tensor]]
Deliver = Callable[[int, memoryview], None]
"""Takes the next bytes of one plane."""

BLOCKS_AHEAD = 2
"""Blocks of a large parent that are read before they are asked for."""

CUDA_BLOCKS_AHEAD = 1
"""The same on a GPU, whose blocks are larger."""

BLOCKS_IN_FLIGHT = 0
"""Blocks that a CUDA lane leaves to the device while it prepares the next one. Lanes keep the device busy for each
other, so that none here costs little time and saves each lane two buffers."""

LANDING_ALIGNMENT = 256
"""Where planes begin in the memory that they are copied back to, bytes."""

LANDING_STEP = 1 << 20
"""Sizes of that memory are multiples of this, bytes."""


class Lane(Protocol):
    """Serves one action at a time, from one thread; may serve many, one after the other."""

    device: torch.device
    ahead: int
    """Blocks that may be read before they are asked for."""

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D host tensor of ``count`` elements to read the next block into."""

    def run(self, block: Block, encode: Encode, deliver: Deliver) -> None:
        """Encode a block; deliver its planes, or those of an earlier block, in order."""

    def compute(self, work: Callable[[], Result]) -> Result:
        """What ``work`` gives, done on the device after all blocks that were run, and awaited."""

    def reset(self) -> None:
        """Forget what an action that failed left in flight."""

    def finish(self, deliver: Deliver) -> None:
        """Deliver what is still in flight."""

    def close(self) -> None:
        """Let go of the lane's memory; the lane is not used again."""


class HostLane:
    """Encodes on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.ahead = BLOCKS_AHEAD
        # One is read and one is encoded, beside those that wait between the two.
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * (self.ahead + 2)
        self._next = 0

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        # A block's planes are copied out before its buffer comes round again.
        self._next = (self._next + 1) % len(self._buffers)
        size = count * dtype.itemsize
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[self._next][:size].view(dtype)

    def run(self, block: Block, encode: Encode, deliver: Deliver) -> None:
        for index, plane in enumerate(encode(block)):
            if plane.numel():
                deliver(index, host_memory(plane))

    def compute(self, work: Callable[[], Result]) -> Result:
        return work()

    def reset(self) -> None:
        return

    def finish(self, deliver: Deliver) -> None:
        return

    def close(self) -> None:
        self._buffers.clear()


class CudaLane:
    """Encodes on one GPU, in a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.ahead = CUDA_BLOCKS_AHEAD
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # As on the host, and those in flight.
        self._blocks = BufferRing(self.ahead + BLOCKS_IN_FLIGHT + 2, device)
        self._landings = BufferRing(BLOCKS_IN_FLIGHT + 1, device)
        self._flying: deque[tuple[torch.cuda.Event, list[torch.Tensor], Block]] = deque()

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._blocks.take(count * dtype.itemsize).view(dtype)

    def run(self, block: Block, encode: Encode, deliver: Deliver) -> None:
        with torch.cuda.stream(self._stream):
            here = block
            if isinstance(block, torch.Tensor):
                self._blocks.lock(block)
                here = block.to(self.device, non_blocking=True)
            landed = self._land_from(encode(here))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # The block is kept until its copy has been made.
        self._flying.append((event, landed, block))
        if len(self._flying) > BLOCKS_IN_FLIGHT:
            self._land(deliver)

    def _land_from(self, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin to copy planes, 1-D uint8, to the host."""
        ends = list(accumulate(align_up(plane.numel(), LANDING_ALIGNMENT) for plane in planes))
        if not ends or not ends[-1]:
            return [torch.empty(0, dtype=torch.uint8) for _ in planes]
        # Sizes of blocks differ; in large steps few buffers turn out too small.
        room = self._landings.take(align_up(ends[-1], LANDING_STEP), locked=True)
        return [
            room[begin : begin + plane.numel()].copy_(plane, non_blocking=True)
            for plane, begin in zip(planes, [0, *ends], strict=False)
        ]

    def _land(self, deliver: Deliver) -> None:
        event, planes, _ = self._flying.popleft()
        event.synchronize()
        for index, plane in enumerate(planes):
            if plane.numel():
                deliver(index, host_memory(plane))

    def compute(self, work: Callable[[], Result]) -> Result:
        with torch.cuda.stream(self._stream):
            result = work()
        self._stream.synchronize()
        return result

    def reset(self) -> None:
        if self._flying:  # buffers must not be written to behind the back of the next action
            self._stream.synchronize()
            self._flying.clear()

    def finish(self, deliver: Deliver) -> None:
        while self._flying:
            self._land(deliver)

    def close(self) -> None:
        with suppress(RuntimeError):  # what a broken device says was said by what broke it
            self._stream.synchronize()
        self._flying.clear()
        self._blocks.close()
        self._landings.close()


def lane_for(device: torch.device) -> Lane:
    """A new lane to ``device``."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
