"""Host memory that GPUs copy from and to by themselves, while the host does other things.

The driver is slow at making such memory: it takes pages, fills them with zeros and locks them, for one caller at a
time. Locking pages that are there already takes a tenth of that. So buffers begin as ordinary memory and are locked
once they have been written to; where that is refused, copies merely wait.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ninferbuild.private_memory import private_memory

_PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all GPUs


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Buffer:
    """Pages of its own, since locked ranges must not share one."""

    def __init__(self, size: int):
        memory = private_memory(size)
        self.size = len(memory)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._tried = False
        self._locked = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.bytes.data_ptr() < self.size

    def lock(self, device: torch.device) -> None:
        if self._tried:
            return
        self._tried = True
        with torch.cuda.device(device):
            result = _runtime().cudaHostRegister(self.bytes.data_ptr(), self.size, _PORTABLE)
            self._locked = int(result) == 0
            if not self._locked:
                with suppress(RuntimeError):  # the refusal would be reported by the next thing that is launched
                    torch.zeros(1, device=device)

    def unlock(self) -> None:
        if self._locked:
            _runtime().cudaHostUnregister(self.bytes.data_ptr())
            self._locked = False


class BufferRing:
    """Buffers that are used in turn, each again once the turn comes round to it.

    Args:
        count: how many; what was taken so many turns ago must not be in use any more.
        device: the GPU that copies.
    """

    def __init__(self, count: int, device: torch.device):
        self._device = device
        self._buffers: list[_Buffer | None] = [None] * count
        self._turn = 0

    def take(self, size: int, *, locked: bool = False) -> torch.Tensor:
        """The next buffer's first ``size`` bytes: uint8 ``[size]``.

        Args:
            locked: lock it now; otherwise :meth:`lock` does once something has been written to it.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.size < size:
            if buffer is not None:
                buffer.unlock()
            buffer = self._buffers[self._turn] = _Buffer(size)
            if locked:
                buffer.bytes.fill_(1)  # pages exist from their first write on
                buffer.lock(self._device)
        return buffer.bytes[:size]

    def lock(self, tensor: torch.Tensor) -> None:
        """Lock the buffer that ``tensor`` lies in, if it lies in one of these."""
        for buffer in self._buffers:
            if buffer is not None and buffer.holds(tensor):
                buffer.lock(self._device)

    def close(self) -> None:
        """Let go of all memory. The GPU must not be using it."""
        for buffer in self._buffers:
            if buffer is not None:
                buffer.unlock()
        self._buffers = [None] * len(self._buffers)
