"""The tensors of an export under their names in the checkpoint, by the maps that overrides use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama import checkpoint
from ninferbuild.sources.gguf_source import (
    GGUFSource,
    HFAliasSource,
    qwen35_linear_attention_name_map,
    qwen35_mtp_name_map,
    qwen35_vision_name_map,
    standard_dense_name_map,
)

_SHARED = {f"mlp.shared_expert.{name}_proj.weight": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")}
_SCORE = "mlp.shared_expert_gate.weight"


def text_alias(source: GGUFSource, *, mixture: bool) -> HFAliasSource:
    """Text and MTP."""
    names, transforms, shapes = standard_dense_name_map(checkpoint.LAYERS)
    maps = [qwen35_mtp_name_map(checkpoint.LAYERS, norm_offset=True)]
    for layer, kind in enumerate(checkpoint.TEXT["layer_types"]):
        if kind == "linear_attention":
            heads = {"num_k_heads": checkpoint.KEY_HEADS, "num_v_heads": checkpoint.VALUE_HEADS}
            dims = {"head_k_dim": checkpoint.DELTA_DIM, "head_v_dim": checkpoint.DELTA_DIM}
            maps.append(qwen35_linear_attention_name_map(layer, **heads, **dims))
    for more in maps:
        names, transforms, shapes = names | more[0], transforms | more[1], shapes | more[2]
    composites: dict[str, Callable[[Any], Any]] = {}
    if mixture:
        blocks = {f"model.language_model.layers.{layer}.": f"blk.{layer}." for layer in range(checkpoint.LAYERS)}
        for prefix, tensors in (blocks | {"mtp.layers.0.": f"blk.{checkpoint.LAYERS}."}).items():
            names |= {prefix + name: tensors + stored for name, stored in _SHARED.items()}
            names[prefix + "mlp.gate.weight"] = tensors + "ffn_gate_inp.weight"
            names[prefix + "mlp.experts.down_proj"] = tensors + "ffn_down_exps.weight"
            names[prefix + _SCORE] = tensors + "ffn_gate_inp_shexp.weight"
            shapes[prefix + _SCORE] = lambda shape: (
                1,
                shape[-1],
            )  # the exporter keeps the axis of one, the quantiser does not
            composites[prefix + "mlp.experts.gate_up_proj"] = _gates_and_ups(tensors)
    return HFAliasSource(source, names, transforms=transforms, shapes=shapes, composites=composites)


def _gates_and_ups(tensors: str) -> Callable[[Any], Any]:
    """The gate rows of each expert before its up rows; maps for overrides have none for experts."""

    def stack(store: Any) -> Any:
        import torch

        stored = [f"{tensors}ffn_{name}_exps.weight" for name in ("gate", "up")]
        values = torch.cat([store.read_flat(name).reshape(store.describe(name).shape) for name in stored], dim=1)
        return values.reshape(-1), tuple(values.shape)

    return stack


def vision_alias(source: GGUFSource) -> HFAliasSource:
    """The vision tower of an mmproj file."""
    names, transforms, shapes, composites = qwen35_vision_name_map(
        checkpoint.VISION["depth"],
        hidden_size=checkpoint.VISION["hidden_size"],
        patch_size=checkpoint.VISION["patch_size"],
    )
    return HFAliasSource(source, names, transforms=transforms, shapes=shapes, composites=composites)
