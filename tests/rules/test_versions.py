"""Bytes of each rule on fixed inputs, pinned beside the rule's version.

A failure means that cached results would no longer be what the rule makes. If the new bytes are intended, raise the
rule's ``version`` and pin them under it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import save_file
import torch

from ninferbuild.artifact.formats import GGUF_FORMATS, NUMERIC_FORMATS
from ninferbuild.rules import BUILT_IN, METHODS
from ninferbuild.sources.logical import EncodedRows, LogicalSource

PINNED = {
    ("cast_direct", 1): {
        "bf16": "e26d47f6e918e529ded2d5a0a1213b47",
        "fp32": "de753d18d33565598d253e4a1727306a",
        "int32": "35faa1274fbe3bef52fb200a5e49592c",
    },
    ("grouped_absmax", 1): {
        "q4_g64_fp16": "59b4e448f3f787550e60cbf08ad1cc7b",
        "q5_g64_fp16": "345cf5610f07e4090cfde7b09fab369d",
        "q6_g64_fp16": "2e9b79835d0552ee572897059e2f27da",
        "q8_g32_fp16": "6e8b4f792b283764daafb308da84c055",
        "t2_g128_fp16": "8e12511c99f89cc169636f14d278ebc8",
    },
    ("grouped_search", 1): {
        "q4_g64_fp16": "3ea8c416433bef57e13e87955868b5dc",
        "q5_g64_fp16": "80a00f4963037a52122ffb14a7a28ea0",
        "q6_g64_fp16": "9b679d1dfbe021438ed32a4588fa26aa",
        "q8_g32_fp16": "fd4764b4e811da63d691dad0178dc29b",
    },
    ("fp8_row_maxabs", 1): {"fp8_e4m3fn_row_bf16": "441c3e222dd9eb41393680ee891ed0cd"},
    ("import_encoded", 1): {
        "nvfp4": "4083a27bbcbdc8dc6fd3cd97d9a38806",
        "fp8_e4m3fn_row_bf16": "497c10ecd6f6bb49c0df21910ff22315",
        "t2_g128_fp16": "3f172216b7610e1b3e6785d323d5e72f",
        "gguf_q4_0": "cdec685a23487159ff0f3880d22689a2",
        "gguf_q5_0": "77ae8a0cd1a8a84f3de0c7d918d90000",
        "gguf_q8_0": "a97b98663e5dafff22fd62c7419ebd31",
        "gguf_q2_k": "33ead244adb065b95fb7993885b5a104",
        "gguf_q3_k": "6f469ca9927c5675611c64d2aff50683",
        "gguf_q4_k": "28d8bd8f49ee7320dddd835a6bb29bc6",
        "gguf_q5_k": "84054b59fda6049279fc04b2ea3516dc",
        "gguf_q6_k": "282ee3a03390bb69d7520f8e929d0817",
        "gguf_iq2_xxs": "d559c0d771cbe375ab6e0528f88f2803",
        "gguf_iq2_xs": "9fc3b1daa6fc357c97506511b0b1f7e5",
        "gguf_iq3_xxs": "fa804b10ed6217e5308964c3aabad11e",
        "gguf_iq1_s": "ec8b8941c5bfe3eff7ca3d3c0e8fc579",
        "gguf_iq4_nl": "cdec685a23487159ff0f3880d22689a2",
        "gguf_iq3_s": "6f469ca9927c5675611c64d2aff50683",
        "gguf_iq2_s": "d7a322680e38f13b17edfe8492d33437",
        "gguf_iq4_xs": "d938eaafcc1b51f09bbb18ba4c682cf4",
        "gguf_iq1_m": "72696e273c7fa7b334ae0def57de5e77",
        "gguf_q2_0": "cdec685a23487159ff0f3880d22689a2",
    },
    ("nvfp4_maxabs", 1): {"nvfp4": "ff8a00b4c7df5ecddcda1ac44071da15"},
}


def weight() -> torch.Tensor:
    """Multiples of 2⁻⁷ up to 8, scaled by row from 2⁻¹⁴⁰ to 2⁴⁰, exact in binary32."""
    i = torch.arange(19 * 333, dtype=torch.int64).reshape(19, 333)
    units = ((i * 1103515245 + 12345) % 2048 - 1024).double() / 128
    exponents = torch.tensor([-140.0, -120.0, *range(-28, 24, 4), 0.0, 30.0, 40.0, 0.0]).double()
    return (units * 2.0 ** exponents[:, None]).float()


def values(rule: str, format: str) -> torch.Tensor:
    if rule == "nvfp4_maxabs":
        return weight().repeat(7, 1)[2:130, :320]
    if format in ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "t2_g128_fp16"):
        return weight()[:13]  # larger rows have no binary16 scale
    if rule == "fp8_row_maxabs":
        return weight()[2:]  # smaller rows have no finite reciprocal
    return weight()[:13] if format == "int32" else weight()


def encoded(format: str) -> LogicalSource:
    i = torch.arange(128 * 192, dtype=torch.int64).reshape(128, 192)
    noise = (i * 1103515245 + 12345) // 64 % 251
    divisor = None
    if format in GGUF_FORMATS:
        return blocks(format, noise)
    if format == "nvfp4":
        codes, scales, divisor = noise[:, :96].to(torch.uint8), (noise[:, :12] % 127).to(torch.uint8), b"\0\0\x20\x40"
    elif format == "fp8_e4m3fn_row_bf16":
        codes, scales = (noise % 127).to(torch.uint8), (noise[:, 0] + 1).bfloat16()
    else:
        codes = torch.nn.functional.pad(noise % 3 - 1, (0, 64)).to(torch.int8).reshape(128, 2, 128)
        scales = (noise[:, :2] + 1).half()
    return LogicalSource(
        (128, 192),
        "encoded",
        lambda begin, end: torch.zeros(end - begin),
        lambda begin, end: EncodedRows(format, codes[begin:end], scales[begin:end], divisor),
    )


def blocks(format: str, noise: torch.Tensor) -> LogicalSource:
    """64 rows of one block."""
    record = GGUF_FORMATS[format]
    codes, scales = noise.reshape(-1)[: 64 * record.block_bytes].to(torch.uint8).reshape(64, -1), torch.empty(0).half()
    return LogicalSource(
        (64, record.block_elements),
        "encoded",
        lambda begin, end: torch.zeros(end - begin),
        lambda begin, end: EncodedRows(format, codes[begin:end], scales),
    )


@pytest.fixture
def parameters(tmp_path: Path) -> dict[str, object]:
    """Everything that ``grouped_search`` can be told."""
    importance = torch.arange(333, dtype=torch.float32) * 37 % 101 / 8
    save_file({"p0": importance}, tmp_path / "importance.safetensors")
    return {"imatrix": str(tmp_path / "importance.safetensors"), "negative_scales": True}


@pytest.mark.parametrize(
    ("rule", "format", "digest"),
    [(name, format, digest) for (name, _), pins in PINNED.items() for format, digest in pins.items()],
)
def test_bytes(harness, device, parameters, rule, format, digest) -> None:
    source = encoded(format) if rule == "import_encoded" else values(rule, format)
    request = harness.request(
        source, format, rows_per_chunk=7, device=device, parameters=parameters if rule == "grouped_search" else {}
    )
    payload = harness.payload(METHODS[rule], request)
    assert hashlib.sha256(payload).hexdigest()[:32] == digest


def test_every_rule_is_pinned_under_its_version() -> None:
    assert {(rule.name, rule.version) for rule in BUILT_IN} == set(PINNED)


def test_every_format_is_pinned() -> None:
    assert {format for pins in PINNED.values() for format in pins} == set(NUMERIC_FORMATS)
