"""Memory of blocks: unshared while anybody looks at a block, and used again afterwards."""

from __future__ import annotations

import random

import numpy as np

from ninferbuild.block_memory import SMALLEST, BlockMemory
from ninferbuild.digest import BLOCK_BYTES


def test_memory_is_used_again() -> None:
    memory = BlockMemory()
    first = memory.take(BLOCK_BYTES)
    address = first.ctypes.data
    del first
    assert memory.take(SMALLEST).ctypes.data == address


def test_a_view_keeps_its_block() -> None:
    memory = BlockMemory()
    block = memory.take(2 * SMALLEST)
    address = block.ctypes.data
    piece = block.data.toreadonly().cast("B")[100:200]
    del block
    assert memory.take(BLOCK_BYTES).ctypes.data != address
    del piece
    assert memory.take(BLOCK_BYTES).ctypes.data == address


def test_blocks_in_use_never_overlap() -> None:
    memory, choose = BlockMemory(), random.Random(5)
    held: list[tuple[memoryview, int]] = []
    for number in range(300):
        block = memory.take(choose.choice((1, SMALLEST - 1, SMALLEST, 3 * SMALLEST + 7)))
        block[:] = number % 251
        held.append((block.data.toreadonly(), number % 251))
        if len(held) > 5:
            held.pop(choose.randrange(len(held)))
        for view, value in held:
            assert (np.frombuffer(view, np.uint8) == value).all()
