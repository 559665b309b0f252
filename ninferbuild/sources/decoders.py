"""Decoders of stored rows: registry and implementations. A change of decoded bits needs a new version in
:data:`ninferbuild.sources.description.DECODER_VERSIONS`.

The arithmetic is numpy's, on one thread: actions already run side by side, and tiles are too small to share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ninferbuild.artifact.formats import GGUF_FORMATS
from ninferbuild.sources.description import Description
from ninferbuild.sources.dtypes import torch_dtype
from ninferbuild.sources.encoded import EncodedRows
from ninferbuild.sources.gguf_decoder import GgufBlocks
from ninferbuild.sources.ternary_blocks import Pq2, Ptq1

TILE = 1 << 18
"""Elements decoded at a time: a tile of FP32 and its codes stay in the second-level cache."""

GROUP = 16
"""Columns of one NVFP4 scale."""

BLOCK = 128
"""Rows and columns of one scale of block FP8."""


class Decoder(Protocol):
    """Decodes the row blocks of one description, in order.

    ``parts`` holds for each part uint8 ``[rows, row bytes]``, or the whole region 1-D where it is a table.
    """

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values of the rows to ``out``, ``[rows, columns]``. ``ValueError`` on invalid words."""

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        """The rows as they are stored. ``ValueError`` on invalid words."""


@runtime_checkable
class PackingDecoder(Decoder, Protocol):
    """A decoder that gets from the stored bits to those of the target layout without unpacking the codes."""

    def packed(self, parts: list[torch.Tensor]) -> EncodedRows:
        """What ``encoded`` gives, with packed codes."""


def _e4m3fn_table() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    words = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return words.to(torch.float32).numpy()


def _e2m1_pair_table() -> np.ndarray[tuple[int], np.dtype[np.complex64]]:
    """For each byte its two values, the low nibble's first: 8 bytes that need the alignment of FP32 only."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = np.array([*magnitudes, *(-value for value in magnitudes)], dtype="<f4")
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).reshape(-1).view("<c8")


E4M3FN = _e4m3fn_table()
E2M1_PAIRS = _e2m1_pair_table()


def _has_nan_word(codes: torch.Tensor) -> bool:
    """Whether E4M3FN words contain 0x7F or 0xFF."""
    return bool(codes.numel()) and bool((codes.numpy() & 0x7F).max() == 0x7F)


def _tiles(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, TILE // max(1, columns))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def _look_up(table: np.ndarray[Any, Any], words: torch.Tensor, out: np.ndarray[Any, Any]) -> None:
    # mode: uint8 indices are always inside, and "clip" lets numpy write to `out` without a buffer
    np.take(table, words.numpy(), out=out, mode="clip")


class Plain:
    """Stored words are the values."""

    def __init__(self, description: Description):
        self._dtype = torch_dtype(description.dtype)

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(parts[0].view(self._dtype).view(out.shape))

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        raise ValueError("plain values have no encoded rows")


class Nvfp4:
    """``RN32(e2m1(code) * e4m3fn(scale) / divisor)``; the product is exact. Parts: codes, scales."""

    def __init__(self, description: Description):
        divisor = description.word("weight_divisor")
        assert divisor is not None
        self._word = divisor
        self._divisor = np.frombuffer(divisor, dtype="<f4")[0]
        self._scales_name = description.parts[1].name

    def _check(self, scales: torch.Tensor) -> None:
        if scales.numel() and scales.numpy().max() > 0x7E:
            raise ValueError(f"{self._scales_name}: expected nonnegative finite E4M3FN scales")

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        self._check(scales)
        rows, columns = out.shape
        groups = np.empty(scales.shape, dtype=np.float32)
        _look_up(E4M3FN, scales, groups)
        for tile in _tiles(rows, columns):
            values = out[tile].numpy()
            _look_up(E2M1_PAIRS, codes[tile], values.view(np.complex64))
            by_group = values.reshape(-1, GROUP)
            np.multiply(by_group, groups[tile].reshape(-1, 1), out=by_group)
            with np.errstate(over="ignore"):  # a tiny divisor makes infinities, which the encoder refuses
                np.divide(values, self._divisor, out=values)

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        codes, scales = parts
        self._check(scales)
        return EncodedRows("nvfp4", codes, scales, self._word)


def _scale_dtype(description: Description) -> torch.dtype:
    """The stored element type of FP8 scales."""
    word = description.word("scale_dtype")
    assert word is not None
    return torch_dtype(word.decode())


class Fp8Row:
    """``e4m3fn(code) * scale``, exact in FP32; FP32 scales are rounded to bfloat16 first.

    Parts: codes, scales. Scales are one word a row, or a table of one word for all rows.
    """

    def __init__(self, description: Description):
        codes, scales = description.parts
        self._codes_name, self._scales_name = codes.name, scales.name
        self._scale_dtype = _scale_dtype(description)

    def _scales(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Bfloat16 ``[rows]``, after the checks of the row-scaled FP8 words."""
        codes, stored = parts
        scales = stored.view(self._scale_dtype).reshape(-1).to(torch.bfloat16)
        if stored.dim() == 1:
            scales = scales.expand(codes.shape[0])
        words = scales.view(torch.int16)  # the sign bit makes a word negative; 0x7F80 is infinity
        if words.numel() and not bool(((words >= 0) & (words < 0x7F80)).all()):
            raise ValueError(f"{self._scales_name}: expected nonnegative finite BF16 row scales")
        if _has_nan_word(codes):
            raise ValueError(f"{self._codes_name}: expected finite E4M3FN codes")
        zero = words == 0
        if bool(zero.any()) and bool(codes[zero].bitwise_and(0x7F).any()):
            raise ValueError(f"{self._scales_name}: a zero row scale requires zero codes")
        return scales

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        scales = self._scales(parts).to(torch.float32).unsqueeze(1).numpy()
        for tile in _tiles(*out.shape):
            values = out[tile].numpy()
            _look_up(E4M3FN, parts[0][tile], values)
            np.multiply(values, scales[tile], out=values)

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        return EncodedRows("fp8_e4m3fn_row_bf16", parts[0], self._scales(parts).contiguous())


class Fp8Block:
    """``e4m3fn(code) * scale`` of the 128 × 128 block. Parts: codes; the table of scales, an entry for 128 rows."""

    def __init__(self, description: Description):
        codes, scales = description.parts
        self._codes_name, self._scales_name = codes.name, scales.name
        self._scale_dtype = _scale_dtype(description)
        self._blocks = -(-description.shape[1] // BLOCK)
        self._entries = np.concatenate(
            [np.arange(begin, end) // BLOCK for begin, end in description.positions] or [np.empty(0, np.int64)]
        )
        self._row = 0

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        codes, stored = parts
        rows, columns = out.shape
        table = stored.view(self._scale_dtype).view(-1, self._blocks).to(torch.float32).numpy()
        if not (np.isfinite(table) & (table >= 0)).all():
            raise ValueError(f"{self._scales_name}: block scales must be finite and nonnegative")
        if _has_nan_word(codes):
            raise ValueError(f"{self._codes_name}: block FP8 weight codes must be finite")
        entries = self._entries[self._row : self._row + rows]
        self._row += rows
        full = columns // BLOCK * BLOCK
        for tile in _tiles(rows, columns):
            values = out[tile].numpy()
            _look_up(E4M3FN, codes[tile], values)
            scales = table[entries[tile]]
            with np.errstate(over="ignore"):
                for first in range(0, full, BLOCK):
                    block = values[:, first : first + BLOCK]
                    np.multiply(block, scales[:, first // BLOCK, None], out=block)
                if full < columns:
                    np.multiply(values[:, full:], scales[:, -1:], out=values[:, full:])
            if not np.isfinite(values).all():
                raise ValueError(f"{self._codes_name}: decoded FP8 values overflow FP32")

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        raise ValueError(f"{self._codes_name}: block FP8 supports decoded values, not encoded row import")


DECODERS: dict[str, Callable[[Description], Decoder]] = {
    "plain": Plain,
    "nvfp4": Nvfp4,
    "fp8_row": Fp8Row,
    "fp8_block": Fp8Block,
    "pq2_0": Pq2,
    "ptq1_0": Ptq1,
    **dict.fromkeys(GGUF_FORMATS, GgufBlocks),
}
"""Decoder name → implementation; the names are those of ``DECODER_VERSIONS``."""
