"""The decoder of ggml blocks that artifacts keep; its name in a description is the format's."""

from __future__ import annotations

import torch

from ninferbuild.artifact.codecs.ggml_values import decode_rows
from ninferbuild.sources.description import Description
from ninferbuild.sources.encoded import EncodedRows


class GgufBlocks:
    """Values in FP32, or the blocks themselves. Part: rows of blocks."""

    def __init__(self, description: Description):
        self._format = description.decoder

    def decode(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        decode_rows(parts[0].numpy(), self._format, out.numpy())

    def encoded(self, parts: list[torch.Tensor]) -> EncodedRows:
        return EncodedRows(self._format, parts[0], torch.empty(0, dtype=torch.float16))
