"""The bits that each decoder gives for fixed inputs, by version.

A failure here means that decoded values changed: raise the decoder's entry in ``DECODER_VERSIONS`` and pin the new
digest under the new version, or old cache entries would be taken for the new values.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ninferbuild.digest import digest_of
from ninferbuild.sources.decoding import open_values
from ninferbuild.sources.description import DECODER_VERSIONS, Description, Part
from ninferbuild.sources.files import MemoryFile
from ninferbuild.sources.regions import Region, Span

PINNED = {
    ("plain", 1): "87a20435c190de8c42cea6b4ed3135a0",
    ("nvfp4", 1): "4b05800da8601ae0fb0212f0fdbb6e26",
    ("fp8_row", 1): "38674af99ea1666f74fbfa0bea7b0823",
    ("fp8_block", 1): "406345b667b387d3c7c1ef5228dfe962",
}


def part(data: np.ndarray, row_bytes: int, rows: int = 1) -> Part:
    raw = data.tobytes()
    return Part("data", Region.of([Span(MemoryFile(raw, "fixed"), 0, len(raw))]), row_bytes, rows)


def fixed_inputs() -> dict[str, Description]:
    codes = (np.arange(130 * 160) * 37 % 127).astype(np.uint8).reshape(130, 160)
    nibbles = (np.arange(130 * 80) * 73 % 256).astype(np.uint8)
    words = (np.arange(130 * 10) * 11 % 127).astype(np.uint8)
    scales = (1 + np.arange(130) % 50).astype(np.float32) / 77
    divisor = np.float32(1234.5).tobytes()
    f32 = (("scale_dtype", b"F32"),)
    shape = (130, 160)
    return {
        "plain": Description(shape, "U8", "plain", (part(codes, 160),)),
        "nvfp4": Description(
            shape, "F32", "nvfp4", (part(nibbles, 80), part(words, 10)), (("weight_divisor", divisor),)
        ),
        "fp8_row": Description(shape, "F32", "fp8_row", (part(codes, 160), part(scales, 4)), f32),
        "fp8_block": Description(shape, "F32", "fp8_block", (part(codes, 160), part(scales[:4], 8, rows=128)), f32),
    }


@pytest.mark.parametrize("decoder", DECODER_VERSIONS)
def test_pinned(decoder):
    description = fixed_inputs()[decoder]
    values = open_values(description).read(description.elements)
    digest = digest_of(values.view(torch.uint8).numpy().tobytes()).hex()
    assert digest == PINNED[decoder, DECODER_VERSIONS[decoder]]
