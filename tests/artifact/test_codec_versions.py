"""Bytes of each codec for fixed words, pinned beside the codec's version.

A failure means that the same words are placed in other bytes, so that cached results are not what would be written
now. If that is meant, raise ``codec_version`` of the layout and pin the new bytes under it.
"""

from __future__ import annotations

from collections.abc import Callable
import hashlib
from math import prod
import struct

import pytest
import torch

from ninferbuild.artifact.codecs import direct, fp8_row, gguf_blocks, nvfp4, row_split
from ninferbuild.artifact.formats import (
    GGUF_FORMATS,
    NUMERIC_FORMATS,
    DirectFormat,
    Fp8RowFormat,
    GgufFormat,
    Nvfp4Format,
    QuantFormat,
)
from ninferbuild.artifact.layouts import CODEC_VERSIONS, align_up

ROWS, COLUMNS = 256, 320

PINNED = {
    ("contiguous_le_v1", 1): {
        "bf16": "e67ca127618531117340a0f5acd936c9",
        "fp32": "051a57bc6af79bb8c1b13408b5c09cea",
        "int32": "7bc860f9b7eb998793600422ec87e111",
    },
    ("row_split_k128_v1", 1): {
        "q4_g64_fp16": "b071b73f0fc7c6bce8ae9c9178f4fa9c",
        "q5_g64_fp16": "2dcc0d1b6625f8a9f71f82d5b644dd5c",
        "q6_g64_fp16": "760242e917f8ef24897b18e37116c1e3",
        "q8_g32_fp16": "741cfcc2c84357ced663b4dc34c26b14",
        "t2_g128_fp16": "dc3cf6568eeaaad150254f563d2c9a3b",
    },
    ("block_scale_k16_m128x4_v1", 1): {"nvfp4": "1a1d5c682a98c158d268ac33b5097449"},
    ("row_scale_v1", 1): {"fp8_e4m3fn_row_bf16": "b92a7c49e1f6cc2ba2e01386fef093d2"},
    ("gguf_blocks_v1", 1): {
        "gguf_q4_0": "1a3d27030fdb75454b0339492afdffc8",
        "gguf_q5_0": "483414696d1a9d95ba1964b8432864c2",
        "gguf_q8_0": "b026c220cd8c20f38bdc5c250a21511a",
        "gguf_q2_k": "62b00d31516a9c06dde43fa81cfd43dd",
        "gguf_q3_k": "0aebaa4d213ed42e13cc1590d07d7ccc",
        "gguf_q4_k": "6f88530700d9209d7bd76b498a91daf1",
        "gguf_q5_k": "fb565b2dcdb94287c771fbd47d193f7b",
        "gguf_q6_k": "0f99af6843c5531c28c508a6e3aae39b",
        "gguf_iq2_xxs": "fbe724b83119ca82fd859b0ddb0e1e26",
        "gguf_iq2_xs": "b3bd7c5f5955a593568639848df8a454",
        "gguf_iq3_xxs": "759e04eec5dfe0d3d6798212e683de08",
        "gguf_iq1_s": "df508055b703d0118dec1ef1aaefdb21",
        "gguf_iq4_nl": "1a3d27030fdb75454b0339492afdffc8",
        "gguf_iq3_s": "0aebaa4d213ed42e13cc1590d07d7ccc",
        "gguf_iq2_s": "a13d3303c3e8aa76f73bc0d890418824",
        "gguf_iq4_xs": "7b2b97ae94cb6031e6e495ac4f855380",
        "gguf_iq1_m": "dbed819469e18cf6aa90f7dfe7dbe54e",
        "gguf_q2_0": "1a3d27030fdb75454b0339492afdffc8",
    },
}


def noise(*shape: int) -> torch.Tensor:
    """Integers from 0 to 250 without a pattern along rows or columns."""
    i = torch.arange(prod(shape), dtype=torch.int64).reshape(shape)
    return (i * 1103515245 + 12345) // 64 % 251


def direct_bytes(name: str) -> bytes:
    return direct.encode_direct((noise(ROWS, COLUMNS) - 125).to(direct.element_type(name)), name)


def grouped_bytes(name: str) -> bytes:
    format = NUMERIC_FORMATS[name]
    assert isinstance(format, QuantFormat)
    groups = align_up(COLUMNS, 128) // format.group_size
    codes = noise(ROWS, groups, format.group_size) % (format.qmax - format.qmin + 1) + format.qmin
    return row_split.encode_row_split(codes.to(torch.int8), noise(ROWS, groups).half(), name, (ROWS, COLUMNS))


def nvfp4_bytes(name: str) -> bytes:
    codes, scales = noise(ROWS, COLUMNS // 2).to(torch.uint8), (noise(ROWS, COLUMNS // 16) % 127).to(torch.uint8)
    return nvfp4.encode_nvfp4(codes, scales, struct.pack("<2f", 2.5, 0.75), (ROWS, COLUMNS), divisors=2)


def fp8_bytes(name: str) -> bytes:
    codes = (noise(ROWS, COLUMNS) % 127).to(torch.uint8)
    return fp8_row.encode_fp8_row_scaled(codes, (noise(ROWS) + 1).bfloat16(), (ROWS, COLUMNS))


def gguf_bytes(name: str) -> bytes:
    format = GGUF_FORMATS[name]
    rows = noise(ROWS, 3 * format.block_bytes).to(torch.uint8)
    return gguf_blocks.encode_gguf_blocks(rows, name, (ROWS, 3 * format.block_elements))


ENCODERS: dict[type, Callable[[str], bytes]] = {
    DirectFormat: direct_bytes,
    QuantFormat: grouped_bytes,
    Nvfp4Format: nvfp4_bytes,
    Fp8RowFormat: fp8_bytes,
    GgufFormat: gguf_bytes,
}


@pytest.mark.parametrize(
    ("format", "digest"), [(format, digest) for pins in PINNED.values() for format, digest in pins.items()]
)
def test_bytes(format: str, digest: str) -> None:
    data = ENCODERS[type(NUMERIC_FORMATS[format])](format)
    assert hashlib.sha256(data).hexdigest()[:32] == digest


def test_every_codec_is_pinned_under_its_version() -> None:
    assert set(CODEC_VERSIONS.items()) == set(PINNED)


def test_every_format_is_pinned_under_its_layout() -> None:
    assert {name: format.layout for name, format in NUMERIC_FORMATS.items()} == {
        name: layout for (layout, _), pins in PINNED.items() for name in pins
    }
