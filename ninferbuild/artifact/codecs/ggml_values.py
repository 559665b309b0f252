"""The FP32 values of ggml blocks, as ggml's ``dequantize_row_*`` computes them.

``q8_0`` and ``q2_0`` are decoded here, everything else by the package ``gguf``, which has the lookup grids; it is
imported when a value is first asked for. What the package gives is held to digests of its values for fixed blocks, so
that another version of it cannot give other values under an unchanged key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
import hashlib

import numpy as np
from numpy.typing import NDArray

from ninferbuild.artifact.formats import GGUF_FORMATS, GgufFormat

Blocks = NDArray[np.uint8]
"""``[blocks, bytes of a block]``"""

Values = NDArray[np.float32]
"""``[blocks, values of a block]``"""

TILE = 1 << 17
"""Values decoded at a time: what is computed on the way stays in the caches."""

PROBE_BLOCKS = 32


class MissingPackageError(ImportError, ValueError):
    """The package ``gguf`` is needed and not installed."""


def decode_rows(rows: Blocks, format: str, out: Values) -> None:
    """Write the values of rows of blocks.

    Args:
        rows: contiguous uint8 ``[rows, row bytes]``.
        format: a ``gguf_*`` format.
        out: contiguous float32 ``[rows, columns]``.

    Raises:
        MissingPackageError: decoding the format needs the package ``gguf``.
        ValueError: the installed version of the package gives other values than this one was made for.
    """
    record = GGUF_FORMATS[format]
    decode = _decoder(format)
    blocks, values = rows.reshape(-1, record.block_bytes), out.reshape(-1, record.block_elements)
    with np.errstate(all="ignore"):  # scales may be infinite or NaN
        step = TILE // record.block_elements
        for first in range(0, len(blocks), step):
            tile = slice(first, first + step)
            values[tile] = decode(blocks[tile])


def _q8_0(blocks: Blocks) -> Values:
    """``d * q``: binary16 ``d``, 32 signed bytes ``q``."""
    return _scales(blocks) * blocks[:, 2:].view(np.int8).astype(np.float32)


_Q2_0_CODES = ((np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3) - 1).astype(np.float32)
"""Byte → the integers ``code - 1`` of its four codes."""


def _q2_0(blocks: Blocks) -> Values:
    """``d * (code - 1)``: binary16 ``d``, four codes a byte, the lowest bits first. Code 3 is legal."""
    values: Values = _Q2_0_CODES.take(blocks[:, 2:], axis=0).reshape(len(blocks), -1)
    values *= _scales(blocks)
    return values


def _scales(blocks: Blocks) -> Values:
    return blocks[:, :2].copy().view("<f2").astype(np.float32)


_OWN: dict[str, Callable[[Blocks], Values]] = {"gguf_q8_0": _q8_0, "gguf_q2_0": _q2_0}

PROBES = {
    "gguf_q4_0": "1fd2f07fc9c3726302f7f9ba181e2dc8",
    "gguf_q5_0": "e15c5a8da2517f1b750af339deaa5e60",
    "gguf_q2_k": "a4a76a83699bab47f41c9408eeedccfa",
    "gguf_q3_k": "2a2ee45b3fd6375ffadfceab34d30041",
    "gguf_q4_k": "1a221b0f8ace529fcf3c9fed80af7515",
    "gguf_q5_k": "4ec454819140d4be92d1681d48021dba",
    "gguf_q6_k": "a0eb9ece1bedb3fb585483fa1d784387",
    "gguf_iq2_xxs": "1bb1677a029d5953b81863e78ef20770",
    "gguf_iq2_xs": "81ec8cec8799b507c186384d026b784a",
    "gguf_iq3_xxs": "a31a1d56d95f800363d0a6305bf069cf",
    "gguf_iq1_s": "3891fa76514992b265e16137b54eca27",
    "gguf_iq4_nl": "dd6276850708cfb707c6ad62df3bd03b",
    "gguf_iq3_s": "364316ee5ead5291b95d926b1410760b",
    "gguf_iq2_s": "48cdca9cbc1bd81183c159ef2dff4067",
    "gguf_iq4_xs": "e4df037d68364f9af00e5d9bb137a594",
    "gguf_iq1_m": "0c3046056375bde7162cc1201c2fe7ae",
}
"""Format → digest of the values of :func:`probe` as this package version expects them from ``gguf``."""


@cache
def _decoder(format: str) -> Callable[[Blocks], Values]:
    own = _OWN.get(format)
    return _package_decoder(GGUF_FORMATS[format]) if own is None else own


def _package_decoder(record: GgufFormat) -> Callable[[Blocks], Values]:
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise MissingPackageError(
            f"reading values of {record.name} blocks needs the package gguf: pip install gguf "
            "(storing the blocks as they are does not need it)"
        ) from error
    kind = GGMLQuantizationType(record.ggml_type)

    def decode(blocks: Blocks) -> Values:
        # One long row, because the package goes through many rows in steps of 16.
        values: Values = dequantize(blocks.reshape(1, -1), kind)
        return values.reshape(len(blocks), -1)

    with np.errstate(all="ignore"):
        found = values_digest(decode(probe(record)))
    if found != PROBES[record.name]:
        raise ValueError(
            f"the installed package gguf decodes {record.name} blocks to values that are not ggml's; "
            "install version 0.19.0 of it"
        )
    return decode


def probe(record: GgufFormat) -> Blocks:
    """Blocks of noise, the same everywhere: uint8 ``[PROBE_BLOCKS, block bytes]``."""
    count = PROBE_BLOCKS * record.block_bytes
    words = np.arange(record.ggml_type, record.ggml_type + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words >> np.uint64(40)).astype(np.uint8).reshape(PROBE_BLOCKS, record.block_bytes)


def values_digest(values: Values) -> str:
    """SHA-256 of little-endian values, 32 hexadecimal digits; which NaN a value is does not count."""
    words = np.where(np.isnan(values), np.float32(np.nan), values).astype("<f4")
    return hashlib.sha256(words.tobytes()).hexdigest()[:32]
