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
    ("plain", 1): {"words": "87a20435c190de8c42cea6b4ed3135a0", "turned rows": "9f99a991db962ac958e7184448e0ebaf"},
    ("nvfp4", 1): {"words": "4b05800da8601ae0fb0212f0fdbb6e26"},
    ("fp8_row", 1): {
        "F32": "38674af99ea1666f74fbfa0bea7b0823",
        "BF16": "8150c97b878482013774a7904c4137fa",
        "one scale": "638bde09f3fa9e8ea2f4d20a00f79c10",
    },
    ("fp8_block", 1): {
        "F32": "406345b667b387d3c7c1ef5228dfe962",
        "BF16": "0e8d44fdd3f774dd858eaf66d4073e43",
        "rows": "35918f6134b338c93722e5b24a9c97c2",
    },
    ("pq2_0", 1): {"blocks": "9063e256bff44644b3cd3db9e98f14da"},
    ("ptq1_0", 1): {"blocks": "059cf825f09059cbb819ec8516e18c9d"},
}


def part(data: np.ndarray, row_bytes: int, rows: int = 1) -> Part:
    raw = data.tobytes()
    return Part("data", Region.of([Span(MemoryFile(raw, "fixed"), 0, len(raw))]), row_bytes, rows)


def ternary(size: int, scale: int) -> np.ndarray:
    """260 blocks of ``size`` bytes that hold no pair of set bits; the scale, at byte ``scale``, is finite."""
    blocks = (np.arange(260 * size) * 73 // 3 % 256).astype(np.uint8).reshape(260, size)
    blocks &= ~((blocks & blocks >> 1 & 0x55) * 3)
    blocks[:, scale + 1] = np.arange(260) % 0x7C
    return blocks


def fixed_inputs() -> dict[tuple[str, str], Description]:
    codes = (np.arange(130 * 160) * 37 % 127).astype(np.uint8).reshape(130, 160)
    nibbles = (np.arange(130 * 80) * 73 % 256).astype(np.uint8)
    words = (np.arange(130 * 10) * 11 % 127).astype(np.uint8)
    scales = (1 + np.arange(130) % 50).astype(np.float32) / 77
    short = (scales.view(np.uint32) >> 16).astype(np.uint16)
    divisor = np.float32(1234.5).tobytes()
    f32, bf16 = (("scale_dtype", b"F32"),), (("scale_dtype", b"BF16"),)
    shape = (130, 160)
    plain = Description(shape, "U8", "plain", (part(codes, 160),))
    block = Description(shape, "F32", "fp8_block", (part(codes, 160), part(scales[:4], 8, rows=128)), f32)
    return {
        ("plain", "words"): plain,
        ("plain", "turned rows"): plain.transpose((1, 0), (80, 260)).select_rows([(70, 80), (3, 4)]),
        ("nvfp4", "words"): Description(
            shape, "F32", "nvfp4", (part(nibbles, 80), part(words, 10)), (("weight_divisor", divisor),)
        ),
        ("fp8_row", "F32"): Description(shape, "F32", "fp8_row", (part(codes, 160), part(scales, 4)), f32),
        ("fp8_row", "BF16"): Description(shape, "F32", "fp8_row", (part(codes, 160), part(short, 2)), bf16),
        ("fp8_row", "one scale"): Description(shape, "F32", "fp8_row", (part(codes, 160), part(scales[:1], 0)), f32),
        ("fp8_block", "F32"): block,
        ("fp8_block", "BF16"): Description(
            shape, "F32", "fp8_block", (part(codes, 160), part(short[:4], 4, rows=128)), bf16
        ),
        ("fp8_block", "rows"): block.select_rows([(126, 130), (0, 2)]),
        ("pq2_0", "blocks"): Description((130, 256), "F32", "pq2_0", (part(ternary(34, 0), 68),)),
        ("ptq1_0", "blocks"): Description((130, 256), "F32", "ptq1_0", (part(ternary(28, 26), 56),)),
    }


@pytest.mark.parametrize(
    ("decoder", "case", "digest"),
    [(decoder, case, digest) for (decoder, _), pins in PINNED.items() for case, digest in pins.items()],
)
def test_bits(decoder: str, case: str, digest: str) -> None:
    description = fixed_inputs()[decoder, case]
    values = open_values(description).read(description.elements)
    assert digest_of(values.view(torch.uint8).numpy().tobytes()).hex() == digest


def test_every_decoder_is_pinned_under_its_version() -> None:
    assert set(DECODER_VERSIONS.items()) == set(PINNED)


def test_every_case_is_pinned() -> None:
    assert {(decoder, case) for (decoder, _), pins in PINNED.items() for case in pins} == set(fixed_inputs())
