"""Is a GGUF file the export of the model that a recipe expects? Everything is asked before anything is encoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
import math
import struct
from typing import TYPE_CHECKING, Any

from ninferbuild.recipes.gguf_geometry import Experts, Geometry
from ninferbuild.recipes.gguf_tensors import Kind, Tensor
from ninferbuild.sources.ggml_types import type_label

if TYPE_CHECKING:
    from ninferbuild.sources.gguf import GGUFFile

Types = Mapping[Kind, Collection[int]]
"""The ggml types that a recipe takes for each kind of tensor."""

_LISTED = 5
"""Names that a message lists before it breaks off."""


def header_of(geometry: Geometry) -> dict[str, Any]:
    """Keys of the header and the values that they must have, apart from the number of blocks."""
    feed_forward = geometry.feed_forward
    mixture = isinstance(feed_forward, Experts)
    architecture = "qwen35moe" if mixture else "qwen35"
    sizes: dict[str, int] = {
        "embedding_length": geometry.hidden,
        "attention.head_count": geometry.attention_heads,
        "attention.head_count_kv": geometry.key_value_heads,
        "attention.key_length": geometry.attention_dim,
        "attention.value_length": geometry.attention_dim,
        "ssm.conv_kernel": geometry.taps,
        "ssm.state_size": geometry.gdn_dim,
        "ssm.group_count": geometry.key_heads,
        "ssm.time_step_rank": geometry.value_heads,
        "ssm.inner_size": geometry.value_dim,
        "full_attention_interval": geometry.interval,
    }
    if isinstance(feed_forward, Experts):
        sizes["expert_count"] = feed_forward.count
        sizes["expert_feed_forward_length"] = feed_forward.width
        sizes["expert_shared_feed_forward_length"] = feed_forward.shared_width
    else:
        sizes["feed_forward_length"] = feed_forward
    return {"general.architecture": architecture, **{f"{architecture}.{key}": size for key, size in sizes.items()}}


def require_header(gguf: GGUFFile, expected: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless each key of ``expected`` has exactly its value."""
    for key, value in expected.items():
        found = gguf.kv.get(key)
        if found != value:
            shown = f"an array of {len(found)}" if isinstance(found, list) else repr(found)
            raise ValueError(f"{gguf.path}: {key} = {shown}, expected {value!r}")


def require_tensors(gguf: GGUFFile, expected: Mapping[str, Tensor], types: Types) -> None:
    """Hold the tensors of a file to their names, shapes and types, and the file to their bytes.

    Raises:
        ValueError: a name is missing or not expected, a tensor has another shape or a type that ``types`` does not
            have for its kind, or the data section is truncated.
    """
    _require_names(gguf, expected)
    for name, (shape, kind) in expected.items():
        info = gguf.tensors[name]
        if _without_units(info.shape, len(shape)) != shape:
            raise ValueError(f"{gguf.path}: {name} is {info.type_name} {info.shape}, expected shape {shape}")
        if info.type_id not in types[kind]:
            raise ValueError(
                f"{gguf.path}: {name} is {info.type_name} {info.shape}; {type_label(info.type_id)} is none "
                f"that this recipe takes for a {kind.value}"
            )
    end = max(gguf.tensors[name].offset + gguf.tensors[name].nbytes for name in expected)
    if gguf.data_bytes_available < end:
        raise ValueError(
            f"{gguf.path}: the data section is truncated: the tensors need {end} bytes and the file has "
            f"{gguf.data_bytes_available}; download it again"
        )


def _without_units(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """``shape`` without leading axes of one, as far as it has more than ``rank`` axes.

    To ggml such axes are no part of a shape: exporters write the scores of the shared expert as ``(1, K)``, and the
    quantiser makes ``(K)`` of it.
    """
    extra = max(0, len(shape) - rank)
    return shape if any(extent != 1 for extent in shape[:extra]) else shape[extra:]


def _require_names(gguf: GGUFFile, expected: Mapping[str, Tensor]) -> None:
    missing, extra = expected.keys() - gguf.tensors.keys(), gguf.tensors.keys() - expected.keys()
    if missing or extra:
        raise ValueError(
            f"{gguf.path}: tensor set mismatch (missing {_listed(missing)}, extra {_listed(extra)}); "
            "the recipe takes a whole export of this model"
        )


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_LISTED]
    return "[" + ", ".join(shown) + (", …" if len(names) > _LISTED else "") + "]"


def require_negative(gguf: GGUFFile, name: str) -> None:
    """Read the F32 tensor ``name``, which holds ``-exp(A_log)``.

    Raises:
        ValueError: a value is not negative, as NaN is not, or has no finite logarithm.
    """
    data = bytes(gguf.tensor_bytes(name))
    for index, (value,) in enumerate(struct.iter_unpack("<f", data)):
        if not -math.inf < value < 0:
            raise ValueError(
                f"{gguf.path}: {name} must be strictly negative (-exp(A_log)) and finite; element {index} is {value}"
            )
