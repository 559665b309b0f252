"""Lanes: the way of one worker's blocks to the device and of the encoded bytes back.

On the CPU a block is encoded where it was read. On CUDA a lane has a stream of its own and keeps a few blocks in
flight, so that reading, copying, encoding and copying back overlap and the host waits for nothing but finished bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from ninferbuild.artifact.codecs.buffers import host_memory
from ninferbuild.sources.encoded import EncodedRows

Result = TypeVar("Result")

Block = torch.Tensor | EncodedRows
Encode = Callable[[Block], Sequence[torch.Tensor]]
Deliver = Callable[[int, memoryview], None]
"""Takes the next bytes of one plane."""

BLOCKS_IN_FLIGHT = 2
"""Blocks that a CUDA lane has given to the device and not yet taken back."""


BUFFERS = 4
"""Blocks of a host lane that may exist at a time: one read, one encoded, and those waiting between the two."""


class Lane(Protocol):
    """Serves one action at a time, from one thread; may serve many, one after the other."""

    device: torch.device

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


class HostLane:
    """Encodes on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * BUFFERS
        self._next = 0

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        # A block's planes are copied out before its buffer comes round again.
        self._next = (self._next + 1) % BUFFERS
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


class CudaLane:
    """Encodes on one GPU, in a stream of its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._flying: deque[tuple[torch.cuda.Event, list[torch.Tensor], Block]] = deque()

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def run(self, block: Block, encode: Encode, deliver: Deliver) -> None:
        with torch.cuda.stream(self._stream):
            here = block.to(self.device, non_blocking=True) if isinstance(block, torch.Tensor) else block
            landed = []
            for plane in encode(here):
                host = torch.empty(plane.shape, dtype=plane.dtype, pin_memory=True)
                landed.append(host.copy_(plane, non_blocking=True))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # The block is kept until its copy has been made.
        self._flying.append((event, landed, block))
        if len(self._flying) > BLOCKS_IN_FLIGHT:
            self._land(deliver)

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
        self._flying.clear()

    def finish(self, deliver: Deliver) -> None:
        while self._flying:
            self._land(deliver)


def lane_for(device: torch.device) -> Lane:
    """A new lane to ``device``."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
