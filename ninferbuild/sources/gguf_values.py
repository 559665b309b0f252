"""FP32 values of the tensors of a GGUF file, described."""

from __future__ import annotations

from math import prod

from ninferbuild.sources.description import DECODER_VERSIONS, Description, Part
from ninferbuild.sources.dtypes import WORD_BYTES
from ninferbuild.sources.ggml_types import DIRECT_TYPES
from ninferbuild.sources.gguf import GGUFFile


def describe_values(file: GGUFFile, name: str) -> Description:
    """The tensor ``name`` in its own shape, widened or decoded to FP32.

    Raises:
        KeyError: there is no such tensor.
        ValueError: its type has no decoder, its rows are not whole blocks, or the file ends before it does.
    """
    info = file.info(name)
    shape = tuple(info.shape)
    if info.type_id in DIRECT_TYPES:
        dtype = info.type_name
        part = Part("values", file.region(name), prod(shape[1:]) * WORD_BYTES[dtype], name=name)
        return Description(shape, dtype, "plain", (part,)).to_float32()
    info, decoder = file.block_rows(name)
    if decoder not in DECODER_VERSIONS:
        raise ValueError(f"{file.path}: {name}: values of type {info.type_name} cannot be decoded")
    stored = shape if len(shape) > 1 else (1, *shape)  # rows of a vector would end within its blocks
    part = Part("blocks", file.region(name), prod(stored[1:-1]) * info.row_bytes, name=name)
    return Description(stored, "F32", decoder, (part,)).reshape(shape)
