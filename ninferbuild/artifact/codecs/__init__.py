"""Codecs: between tensors of words and the bytes of a layout.

Each module packs blocks of rows on whatever device they are on (``pack_rows``, no synchronisation with the host), and
encodes and decodes whole objects. ``word_faults`` says which rules a block breaks as tensors on its device, so that a
caller on an accelerator may look at them later.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ninferbuild.artifact.formats import Fp8RowFormat, GgufFormat, NumericFormat, Nvfp4Format, QuantFormat

if TYPE_CHECKING:
    import torch

    RowEncoder = Callable[[torch.Tensor, torch.Tensor, NumericFormat, int], tuple[torch.Tensor, ...]]

_MODULES: dict[type[NumericFormat], str] = {
    QuantFormat: "row_split",
    Nvfp4Format: "nvfp4",
    Fp8RowFormat: "fp8_row",
    GgufFormat: "gguf_blocks",
}


def row_encoder(format: NumericFormat) -> RowEncoder:
    """``encode_rows(codes, scales, format, columns)`` of the codec of ``format``: checked, then packed to planes.

    Raises:
        TypeError: the format holds values, not codes and scales.
    """
    name = _MODULES.get(type(format))
    if name is None:
        raise TypeError(f"{format.name} holds values, not codes and scales; use write_values")
    return cast("RowEncoder", import_module(f"{__name__}.{name}").encode_rows)
