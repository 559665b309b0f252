"""The bits that each decoder gives for fixed inputs, by version.

A failure here means that decoded values changed: raise the decoder's entry in ``DECODER_VERSIONS`` and pin the new
digest under the new version, or old cache entries would be taken for the new values.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ninferbuild.artifact.formats import GGUF_FORMATS
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
    ("gguf_q4_0", 1): {"blocks": "6fc940f4e9e65592011d0951ee031bd3"},
    ("gguf_q5_0", 1): {"blocks": "fef97e5a894e4d183870bfd84ccee809"},
    ("gguf_q8_0", 1): {"blocks": "6b0f190ebcede30a5b431c08e99464df"},
    ("gguf_q2_k", 1): {"blocks": "e5057e5b232c67b93751eb99d601d56d"},
    ("gguf_q3_k", 1): {"blocks": "2096ebd0211a95dfd7adb3c4db2938d0"},
    ("gguf_q4_k", 1): {"blocks": "bd4ddc930a4eed983da3fabb605e29b4"},
    ("gguf_q5_k", 1): {"blocks": "03d0b5e5843b241785af6076089145f9"},
    ("gguf_q6_k", 1): {"blocks": "31492e3c647f46e9be23c84bdbd3d9fc"},
    ("gguf_iq2_xxs", 1): {"blocks": "04a6d8ba334dcb47a5db48bb3d964dbf"},
    ("gguf_iq2_xs", 1): {"blocks": "e692414e7305f701d3bde06633fa9898"},
    ("gguf_iq3_xxs", 1): {"blocks": "2b09525662dec2ed1b80686d3626b314"},
    ("gguf_iq1_s", 1): {"blocks": "ff06293f3f6f8f849562cf24f07bc061"},
    ("gguf_iq4_nl", 1): {"blocks": "21f82af3b8a083f63f036a45cee676b4"},
    ("gguf_iq3_s", 1): {"blocks": "af1c4eb361b42376d0b12af6a656ff63"},
    ("gguf_iq2_s", 1): {"blocks": "9e25e2c05d951bfd878975389bba4544"},
    ("gguf_iq4_xs", 1): {"blocks": "6556f23b69b74775fc7abba829290982"},
    ("gguf_iq1_m", 1): {"blocks": "62c12d4684d19db4eaf67c96f0f79b2a"},
    ("gguf_q2_0", 1): {"blocks": "7d3f7fc4a5ea748927c1d3b72da1fc5b"},
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


def ggml_blocks(name: str) -> Description:
    """Sixty rows of two blocks of noise, in which no byte makes a binary16 scale infinite or NaN."""
    record = GGUF_FORMATS[name]
    row_bytes = 2 * record.block_bytes
    noise = (np.arange(60 * row_bytes, dtype=np.int64) * 1103515245 + 12345) // 64 % 251
    blocks = np.where(noise & 0x7C == 0x7C, noise & 0x3F, noise).astype(np.uint8)
    return Description((60, 2 * record.block_elements), "F32", name, (part(blocks, row_bytes),))


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
        **{(name, "blocks"): ggml_blocks(name) for name in GGUF_FORMATS},
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
