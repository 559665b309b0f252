"""FP32 values of the tensors of a GGUF file, described."""

from __future__ import annotations

from math import prod

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.ggml_types import DIRECT_TYPES, GGML_TYPES, ggml_name
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_direct import describe_direct


def describe_values(file: GGUFFile, name: str) -> Description:
    """The tensor ``name`` in its own shape, widened or decoded to FP32.

    Raises:
        KeyError: there is no such tensor.
        ValueError: its type has no decoder, its rows are not whole blocks, or the file ends before it does.
    """
    info = file.info(name)
    if info.type_id in DIRECT_TYPES:
        return describe_direct(file, name).to_float32()
    found = GGML_TYPES.get(info.type_id)
    if found is None or found.format is None:
        raise ValueError(
            f"{file.path}: {name}: values of type {ggml_name(info.type_id)} cannot be decoded; "
            "take a file with F32, F16, BF16 or one of the block types that `ninferbuild list formats` calls gguf_*"
        )
    info, decoder = file.block_rows(name)
    shape = tuple(info.shape)
    stored = shape if len(shape) > 1 else (1, *shape)  # rows of a vector would end within its blocks
    part = Part("blocks", file.region(name), prod(stored[1:-1]) * info.row_bytes, name=name)
    return Description(stored, "F32", decoder, (part,)).reshape(shape)
