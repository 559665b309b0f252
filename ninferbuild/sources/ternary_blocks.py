"""Decoders of ternary GGUF blocks: 128 codes of −1, 0 or +1 under one binary16 scale.

======== ===== ==========================================================================================
type     bytes layout
======== ===== ==========================================================================================
PQ2_0    34    scale, then 32 bytes of four codes each, the first one lowest; stored as code + 1
PTQ1_0   28    24 bytes of five codes each, 2 bytes of four codes each, then the scale; in base 3, see
               :class:`Ptq1`
======== ===== ==========================================================================================

Both decode to the words of ``t2_g128_fp16``: the scale is copied, the codes are written in another way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
import torch

from ninferbuild.sources.description import Description
from ninferbuild.sources.encoded import EncodedRows

FORMAT = "t2_g128_fp16"

GROUP = 128
"""Values of one block, and columns of one scale of :data:`FORMAT`."""

TILE = 2048
"""Blocks whose codes are unpacked at a time; what that computes stays in the second-level cache."""

LOWER = np.uint64(0x5555_5555_5555_5555)
"""The lower bit of each pair of bits."""

Blocks = NDArray[np.uint8]
"""uint8 ``[blocks, bytes of a block]``"""


class _TernaryBlocks:
    """Decodes rows of one block type. Parts: the blocks, a row of them an entry."""

    block_bytes: int
    scale: slice
    """Bytes of the scale in a block."""

    def __init__(self, description: Description):
        (part,) = description.parts
        self._name = part.name
        self._groups = description.stored_shape[-1] // GROUP

    def codes(self, blocks: Blocks) -> NDArray[np.int8]:
        """int8 ``[blocks, 128]``. ``ValueError`` for a word that is no ternary code."""
        raise NotImplementedError

    def _split(self, parts: list[torch.Tensor]) -> tuple[Blocks, NDArray[np.float16]]:
        """The blocks, and their scales ``[blocks]``."""
        blocks = parts[0].numpy().reshape(-1, self.block_bytes)
        return blocks, np.ascontiguousarray(blocks[:, self.scale]).view("<f2").reshape(-1)

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        blocks, scales = self._split(parts)
        values, factors = out.numpy().reshape(-1, GROUP), scales.astype(np.float32)[:, None]
        for first in range(0, len(blocks), TILE):
            tile = slice(first, first + TILE)
            values[tile] = self.codes(blocks[tile])
            values[tile] *= factors[tile]

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        blocks, scales = self._split(parts)
        codes = np.empty((len(blocks), GROUP), np.int8)
        for first in range(0, len(blocks), TILE):
            tile = slice(first, first + TILE)
            codes[tile] = self.codes(blocks[tile])
        return EncodedRows(
            FORMAT,
            torch.from_numpy(codes).view(-1, self._groups, GROUP),
            torch.from_numpy(scales).view(-1, self._groups),
        )


def _table(per_byte: int, code: Callable[[int, int], int]) -> NDArray[np.int8]:
    """int8 ``[256, per_byte]``: what ``code`` gives for each byte and place."""
    return np.array([[code(byte, place) for place in range(per_byte)] for byte in range(256)], dtype=np.int8)


class Pq2(_TernaryBlocks):
    """PQ2_0: element ``j`` is bits ``2 * (j % 4)`` and the next of code byte ``j // 4``, minus 1; 3 is no code."""

    block_bytes = 34
    scale = slice(0, 2)

    def _stored(self, blocks: Blocks) -> Blocks:
        """The code bytes, uint8 ``[blocks, 32]``."""
        stored = np.ascontiguousarray(blocks[:, 2:])
        words = stored.view(np.uint64)
        threes = words >> np.uint64(1)
        threes &= words
        threes &= LOWER
        if threes.any():
            raise ValueError(
                f"{self._name}: PQ2_0 block holds code 3 (+2), which is not ternary; the file is damaged, or of "
                "another type that has the same id"
            )
        return stored

    def codes(self, blocks: Blocks) -> NDArray[np.int8]:
        words = self._stored(blocks).astype("<u4")
        for shift, mask in ((12, 0x000F_000F), (6, 0x0303_0303)):  # bits 2i and 2i + 1 move to bits 8i and 8i + 1
            words |= words << np.uint32(shift)
            words &= np.uint32(mask)
        words |= np.uint32(0x8080_8080)  # keeps the borrow of the subtraction within each byte
        words -= np.uint32(0x0101_0101)
        words ^= np.uint32(0x8080_8080)
        return words.view(np.int8)

    def packed(self, parts: list[torch.Tensor]) -> EncodedRows:
        blocks, scales = self._split(parts)
        stored = self._stored(blocks).view(np.uint64)
        upper = stored >> np.uint64(1)  # code + 1 is (upper bit, lower bit): 0, 1, 2 become 3, 0, 1
        upper |= stored
        np.invert(upper, out=upper)
        upper &= LOWER
        upper <<= np.uint64(1)
        np.invert(stored, out=stored)
        stored &= LOWER
        stored |= upper
        codes = torch.from_numpy(stored.view(np.uint8)).view(-1, self._groups, GROUP // 4)
        return EncodedRows(FORMAT, codes, torch.from_numpy(scales).view(-1, self._groups), packed=True)


class Ptq1(_TernaryBlocks):
    """PTQ1_0: element ``t`` of byte ``b`` is ``((b * 3**t mod 256) * 3 >> 8) - 1``.

    A run of ``w`` bytes gives the element 0 of each byte, then the element 1 of each, and so on. Runs, in order: 16 and
    8 bytes of five elements, 2 bytes of four.
    """

    block_bytes = 28
    scale = slice(26, 28)

    _DIGITS = np.ascontiguousarray(_table(5, lambda byte, place: (byte * 3**place % 256 * 3 >> 8) - 1).T)
    _RUNS = ((0, 16, 5), (16, 24, 5), (24, 26, 4))
    """First byte, last byte + 1, elements of each byte."""

    def codes(self, blocks: Blocks) -> NDArray[np.int8]:
        codes = np.empty((len(blocks), GROUP), np.int8)
        first = 0
        for begin, end, digits in self._RUNS:
            run = np.ascontiguousarray(blocks[:, begin:end])
            for digit in range(digits):
                codes[:, first : first + end - begin] = np.take(self._DIGITS[digit], run, mode="clip")
                first += end - begin
        return codes
