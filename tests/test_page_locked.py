"""Buffers that a GPU copies from and to: turns, sizes, and when they are locked."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ninferbuild import page_locked
from ninferbuild.page_locked import BufferRing

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Runtime:
    """Remembers what is locked, and refuses everything if told to."""

    def __init__(self, refuse: bool = False):
        self.locked: dict[int, int] = {}
        self.asked = 0
        self.refuse = refuse

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.locked
        self.asked += 1
        if self.refuse:
            return 1
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(page_locked, "_runtime", lambda: made)
    # Stands for CUDA, which does not have to be there.
    stand_in = SimpleNamespace(
        cuda=SimpleNamespace(device=lambda device: nullcontext()),
        frombuffer=torch.frombuffer,
        uint8=torch.uint8,
        zeros=torch.zeros,
    )
    monkeypatch.setattr(page_locked, "torch", stand_in)
    return made


def ring(count: int) -> BufferRing:
    return BufferRing(count, torch.device("cpu"))


def test_buffers_come_round_in_turn(runtime: Runtime) -> None:
    buffers = ring(3)
    first = [buffers.take(100).data_ptr() for _ in range(3)]
    assert len(set(first)) == 3
    assert [buffers.take(50).data_ptr() for _ in range(3)] == first


def test_what_was_written_is_locked_once_and_let_go_of(runtime: Runtime) -> None:
    buffers = ring(2)
    block = buffers.take(10_000)
    assert not runtime.locked
    buffers.lock(block[5:10].view(torch.uint8))
    buffers.lock(block)
    assert list(runtime.locked) == [block.data_ptr()]
    assert runtime.asked == 1
    buffers.lock(torch.zeros(7, dtype=torch.uint8))  # not one of these
    assert runtime.asked == 1
    buffers.close()
    assert not runtime.locked


def test_a_larger_buffer_takes_the_place_of_a_smaller_one(runtime: Runtime) -> None:
    buffers = ring(1)
    small = buffers.take(4096, locked=True)
    assert list(runtime.locked.values()) == [4096]
    large = buffers.take(8192, locked=True)
    assert list(runtime.locked.values()) == [8192]
    large.fill_(7)
    small.fill_(3)  # whoever still has the old one does no harm
    assert (large == 7).all()
    buffers.close()
    assert not runtime.locked


def test_a_refusal_is_taken_once(runtime: Runtime) -> None:
    runtime.refuse = True
    buffers = ring(1)
    block = buffers.take(4096)
    buffers.lock(block)
    buffers.lock(block)
    assert runtime.asked == 1
    buffers.close()


@cuda
def test_locked_memory_is_pinned_until_it_is_let_go_of() -> None:
    buffers = BufferRing(2, torch.device("cuda"))
    block = buffers.take(1 << 20)
    block.fill_(5)
    assert not block.is_pinned()
    buffers.lock(block)
    assert block.is_pinned()
    back = buffers.take(1 << 20, locked=True)
    assert back.is_pinned()
    back.copy_(block.to("cuda", non_blocking=True) + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert (back == 6).all()
    buffers.close()
    assert not block.is_pinned()
