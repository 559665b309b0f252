"""Sources over tensors of a GGUF file that are stored as plain numbers: F32, F16 and BF16."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.ggml_types import DIRECT_TYPES
from ninferbuild.sources.logical import LogicalSource
from ninferbuild.sources.stored import StoredReader

if TYPE_CHECKING:
    from ninferbuild.sources.gguf import GGUFFile


def describe_direct(gguf: GGUFFile, tensor: str) -> Description:
    """The words of a tensor as they are stored; their type is the file's.

    Raises:
        KeyError: there is no such tensor.
        ValueError: it is not stored as plain numbers, or the file ends before it does.
    """
    info = gguf.info(tensor)
    if info.type_id not in DIRECT_TYPES:
        raise ValueError(f"{gguf.path}: {tensor}: {info.type_name} is not a direct format")
    columns = info.elements // info.shape[0] if info.shape else 1
    part = Part("values", gguf.region(tensor), columns * info.type.block_bytes, name=tensor)
    return Description(info.shape, info.type_name, "plain", (part,))


def direct_source(
    gguf: GGUFFile,
    tensor: str,
    shape: tuple[int, ...] | None = None,
    change: Callable[[Description], Description] | None = None,
) -> LogicalSource:
    """The values of a tensor, or what ``change`` makes of their description.

    Args:
        shape: of the source; that of the tensor by default.

    Raises:
        KeyError: there is no such tensor. Everything else is found when the source is first looked at.
    """
    if shape is None:
        shape = gguf.info(tensor).shape

    def describe() -> Description:
        description = describe_direct(gguf, tensor)
        return description if change is None else change(description)

    reader = StoredReader(describe, shape=shape, name=tensor)
    return LogicalSource(shape, tensor, reader.read_values)
