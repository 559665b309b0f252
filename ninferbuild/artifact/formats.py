"""Numeric formats: what a stored word is and which value it stands for.

A format is a row of a table. Where its words go inside an object is the business of its layout
(:mod:`ninferbuild.artifact.layouts`).
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ninferbuild.struct_fields import with_dataclass_fields


@with_dataclass_fields
class NumericFormat(msgspec.Struct, frozen=True):
    """A registered format. ``layout`` names the one layout that the formats of this class are stored in."""

    name: str
    layout: ClassVar[str]


@with_dataclass_fields
class DirectFormat(NumericFormat, frozen=True):
    """Values stored as they are, ``word_bytes`` bytes each, little-endian."""

    word_bytes: int
    layout: ClassVar[str] = "contiguous_le_v1"


@with_dataclass_fields
class QuantFormat(NumericFormat, frozen=True):
    """Signed integer codes of ``bits`` bits with one binary16 scale for ``group_size`` columns.

    ``value = scale * code``. A code is legal in ``qmin..qmax``; its stored word is the code modulo ``2**bits``.
    """

    bits: int
    group_size: int
    qmin: int
    qmax: int
    layout: ClassVar[str] = "row_split_k128_v1"

    @property
    def base_bytes(self) -> int:
        """Bytes of one group in the base plane: low nibbles, whole bytes or bit pairs."""
        return self.group_size * (4 if self.bits in (4, 5, 6) else self.bits) // 8

    @property
    def high_bytes(self) -> int:
        """Bytes of one group in the high plane: the bits above the nibble of 5 and 6 bit codes."""
        return self.group_size * (self.bits - 4) // 8 if self.bits in (5, 6) else 0


@with_dataclass_fields
class Nvfp4Format(NumericFormat, frozen=True):
    """E2M1 codes, an E4M3FN scale for ``group_size`` columns, a binary32 divisor for each stacked matrix."""

    group_size: int
    layout: ClassVar[str] = "block_scale_k16_m128x4_v1"


@with_dataclass_fields
class Fp8RowFormat(NumericFormat, frozen=True):
    """E4M3FN codes with one bfloat16 scale for each row."""

    layout: ClassVar[str] = "row_scale_v1"


@with_dataclass_fields
class GgufFormat(NumericFormat, frozen=True):
    """A block type of ggml, kept byte for byte: ``block_elements`` values in ``block_bytes`` bytes.

    ``ggml_type`` is the type's number in a GGUF file. Every bit pattern is legal.
    """

    ggml_type: int
    block_elements: int
    block_bytes: int
    layout: ClassVar[str] = "gguf_blocks_v1"


BF16 = DirectFormat("bf16", 2)
FP32 = DirectFormat("fp32", 4)
INT32 = DirectFormat("int32", 4)
Q4_G64_FP16 = QuantFormat("q4_g64_fp16", 4, 64, -8, 7)
Q5_G64_FP16 = QuantFormat("q5_g64_fp16", 5, 64, -16, 15)
Q6_G64_FP16 = QuantFormat("q6_g64_fp16", 6, 64, -32, 31)
Q8_G32_FP16 = QuantFormat("q8_g32_fp16", 8, 32, -127, 127)
T2_G128_FP16 = QuantFormat("t2_g128_fp16", 2, 128, -1, 1)
NVFP4 = Nvfp4Format("nvfp4", 16)
FP8_E4M3FN_ROW_BF16 = Fp8RowFormat("fp8_e4m3fn_row_bf16")

DIRECT_FORMATS: dict[str, DirectFormat] = {f.name: f for f in (BF16, FP32, INT32)}
QUANT_FORMATS: dict[str, QuantFormat] = {
    f.name: f for f in (Q4_G64_FP16, Q5_G64_FP16, Q6_G64_FP16, Q8_G32_FP16, T2_G128_FP16)
}
NVFP4_FORMATS: dict[str, Nvfp4Format] = {NVFP4.name: NVFP4}
FP8_ROW_FORMATS: dict[str, Fp8RowFormat] = {FP8_E4M3FN_ROW_BF16.name: FP8_E4M3FN_ROW_BF16}
GGUF_FORMATS: dict[str, GgufFormat] = {
    f.name: f
    for f in (
        GgufFormat("gguf_q4_0", 2, 32, 18),
        GgufFormat("gguf_q5_0", 6, 32, 22),
        GgufFormat("gguf_q8_0", 8, 32, 34),
        GgufFormat("gguf_q2_k", 10, 256, 84),
        GgufFormat("gguf_q3_k", 11, 256, 110),
        GgufFormat("gguf_q4_k", 12, 256, 144),
        GgufFormat("gguf_q5_k", 13, 256, 176),
        GgufFormat("gguf_q6_k", 14, 256, 210),
        GgufFormat("gguf_iq2_xxs", 16, 256, 66),
        GgufFormat("gguf_iq2_xs", 17, 256, 74),
        GgufFormat("gguf_iq3_xxs", 18, 256, 98),
        GgufFormat("gguf_iq1_s", 19, 256, 50),
        GgufFormat("gguf_iq4_nl", 20, 32, 18),
        GgufFormat("gguf_iq3_s", 21, 256, 110),
        GgufFormat("gguf_iq2_s", 22, 256, 82),
        GgufFormat("gguf_iq4_xs", 23, 256, 136),
        GgufFormat("gguf_iq1_m", 29, 256, 56),
        GgufFormat("gguf_q2_0", 42, 64, 18),
    )
}
GGUF_FORMATS_BY_TYPE: dict[int, GgufFormat] = {f.ggml_type: f for f in GGUF_FORMATS.values()}
"""Number of the type in a GGUF file → format."""

NUMERIC_FORMATS: dict[str, NumericFormat] = {
    **DIRECT_FORMATS,
    **QUANT_FORMATS,
    **NVFP4_FORMATS,
    **FP8_ROW_FORMATS,
    **GGUF_FORMATS,
}


def get_format(name: str) -> NumericFormat:
    """The registered format called ``name``, exactly as written.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in NUMERIC_FORMATS:
        raise ValueError(f"unknown numeric format {name!r}; known: {', '.join(NUMERIC_FORMATS)}")
    return NUMERIC_FORMATS[name]


def default_layout(format: str) -> str:
    """The layout that ``format`` is stored in.

    Raises:
        ValueError: unknown numeric format.
    """
    return get_format(format).layout


# Scalar words. Tensor forms of the same rules are in ninferbuild.artifact.codecs.

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _is_word(word: object, bits: int) -> bool:
    return isinstance(word, int) and not isinstance(word, bool) and 0 <= word < 1 << bits


def decode_e2m1_word(word: int) -> float:
    """Value of a 4-bit E2M1 word: bit 3 is the sign, bits 2..0 index the magnitude.

    Raises:
        ValueError: not an integer in 0..15.
    """
    if not _is_word(word, 4):
        raise ValueError(f"an E2M1 word is an integer in 0..15, not {word!r}")
    magnitude = _E2M1_MAGNITUDES[word & 7]
    return -magnitude if word & 8 else magnitude


def decode_e4m3fn_word(word: int) -> float:
    """Value of an 8-bit E4M3FN word (OCP FP8, bias 7, no infinities); ``0x7f`` and ``0xff`` are NaN with that sign.

    Raises:
        ValueError: not an integer in 0..255.
    """
    if not _is_word(word, 8):
        raise ValueError(f"an E4M3FN word is an integer in 0..255, not {word!r}")
    exponent, fraction = word >> 3 & 15, word & 7
    if exponent == 15 and fraction == 7:
        magnitude = float("nan")
    elif exponent == 0:
        magnitude = fraction * 2.0**-9
    else:
        magnitude = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -magnitude if word & 0x80 else magnitude


def valid_nvfp4_scale_word(word: int) -> bool:
    """Whether an 8-bit word is a nonnegative finite E4M3FN number, ``0x00..0x7e``."""
    return _is_word(word, 8) and word < 0x7F


def valid_fp8_weight_word(word: int) -> bool:
    """Whether an 8-bit word is a finite E4M3FN number."""
    return _is_word(word, 8) and word & 0x7F != 0x7F


def valid_fp8_row_scale_word(word: int) -> bool:
    """Whether a 16-bit word is a nonnegative finite bfloat16 number with the sign bit clear."""
    return _is_word(word, 16) and word < 0x7F80


def valid_positive_fp32_word(word: int) -> bool:
    """Whether a 32-bit word is a finite positive binary32 number; subnormals count."""
    return _is_word(word, 32) and 0 < word < 0x7F800000
