"""``config.json`` of a Qwen3.5 checkpoint → the component configurations that an artifact stores.

The returned dicts are written verbatim, so their key order is part of the format. All checks raise
:class:`ValueError` naming the field.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from ninferbuild.models.fields import (
    Config,
    binary32,
    boolean,
    positive,
    positives,
    require_fixed,
    require_object,
    unscaled_rope,
)

DENSE_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE_ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")

ROPE_THETA = 10_000_000
RMS_NORM_EPS = 1e-6

_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim")
_LINEAR_ATTENTION = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_VISION = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "num_position_embeddings",
)
_DRAFT = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "max_position_embeddings",
)
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def is_moe(text: Config) -> bool:
    """Whether a text configuration made here describes a mixture of experts."""
    return "num_experts" in text


def raw_text(source: Config) -> Config:
    """The object of ``source`` that describes the text model."""
    if "text_config" not in source:
        return source
    return require_object(source["text_config"], "text_config")


def text_config(source: Config, *, mtp: bool) -> dict[str, Any]:
    """The ``text`` component of a base checkpoint.

    Args:
        source: the checkpoint's whole ``config.json``.
        mtp: whether the MTP block is selected too; it is a full-attention block whatever the text layers are.
    """
    raw = raw_text(source)
    architectures = source.get("architectures")
    if not isinstance(architectures, list) or architectures not in [
        [name] for name in DENSE_ARCHITECTURES + MOE_ARCHITECTURES
    ]:
        raise ValueError(f"unsupported Qwen text architecture {architectures!r}")
    moe = architectures[0] in MOE_ARCHITECTURES
    require_fixed(raw, "text", hidden_act="silu", attention_bias=False, attn_output_gate=True)
    result: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        **positives(raw, _SIZES, "text"),
        "tie_word_embeddings": boolean(
            raw.get("tie_word_embeddings", source.get("tie_word_embeddings", False)), "text.tie_word_embeddings"
        ),
        "rms_norm_eps": binary32(raw.get("rms_norm_eps", RMS_NORM_EPS), "text.rms_norm_eps"),
    }
    result["layer_types"] = layer_types = text_layer_types(raw, result["num_hidden_layers"])
    if mtp or "full_attention" in layer_types:
        result |= _full_attention(raw)
    if "linear_attention" in layer_types:
        require_fixed(raw, "text", mamba_ssm_dtype="float32")
        result |= positives(raw, _LINEAR_ATTENTION, "text")
        if result["linear_num_value_heads"] % result["linear_num_key_heads"]:
            raise ValueError("text.linear_num_value_heads: must be divisible by key heads")
    if moe:
        result |= positives(raw, _MOE, "text")
        if result["num_experts_per_tok"] > result["num_experts"]:
            raise ValueError("text.num_experts_per_tok: active experts exceed expert count")
    else:
        result |= positives(raw, ("intermediate_size",), "text")
    if mtp:
        require_fixed(raw, "text", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    return result


def text_layer_types(raw: Config, layers: int) -> list[str]:
    """The kind of each layer of a text model; without ``layer_types``, of one with full attention at an interval.

    Raises:
        ValueError: the kinds or the interval are none.
    """
    types = raw.get("layer_types")
    if types is None:
        interval = positive(raw.get("full_attention_interval", 4), "text.full_attention_interval")
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    known = ("full_attention", "linear_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(f"text.layer_types: must describe every block as one of {', '.join(known)}")
    return list(types)


def _full_attention(raw: Config) -> dict[str, Any]:
    heads = positives(raw, _ATTENTION, "text")
    if heads["num_attention_heads"] % heads["num_key_value_heads"]:
        raise ValueError("text.num_attention_heads: must be divisible by KV heads")
    rope = unscaled_rope(raw, "text")
    require_fixed(rope, "text.rope_parameters", mrope_interleaved=True)
    factor = binary32(
        rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25)), "text.partial_rotary_factor"
    )
    theta = binary32(rope.get("rope_theta", raw.get("rope_theta", ROPE_THETA)), "text.rope_theta")
    sections = _rope_sections(rope.get("mrope_section"), heads["head_dim"], factor)
    parameters = {"rope_theta": theta, "partial_rotary_factor": factor, "mrope_section": sections}
    return {**heads, "rope_parameters": parameters}


def _rope_sections(sections: object, head_dim: int, factor: float) -> list[int]:
    """The rotary pairs of time, height and width.

    Interleaved M-RoPE hands out pairs to the three axes in turn as far as the sections of height and width reach;
    time takes the rest. Sections that this cannot produce are refused.
    """
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or any(type(size) is not int or size < 0 for size in sections)
    ):
        raise ValueError(f"text.mrope_section: expected three nonnegative integers, got {sections!r}")
    width = int(head_dim * factor)
    if factor > 1 or width <= 0 or width % 2 or sum(sections) != width // 2:
        raise ValueError(
            f"text.mrope_section: sections {sections} and rotary width disagree: "
            f"head_dim {head_dim} × {factor} is {width}, {width // 2} pairs"
        )
    counts = [0, 0, 0]
    for pair in range(width // 2):
        axis = pair % 3
        counts[axis if axis and pair < 3 * sections[axis] else 0] += 1
    if counts != sections:
        raise ValueError(f"text.mrope_section: sections {sections} exceed the interleaved axis ranges")
    return list(sections)


def vision_config(source: Config, text: Config) -> dict[str, Any]:
    """The ``vision`` component of a base checkpoint, for the text configuration ``text``."""
    raw = source.get("vision_config")
    if raw is None:
        raise ValueError("Vision requires vision_config in the checkpoint's config.json")
    raw = require_object(raw, "Vision requires vision_config")
    require_fixed(
        raw,
        "vision",
        in_channels=3,
        hidden_act="gelu_pytorch_tanh",
        deepstack_visual_indexes=[],
        out_hidden_size=text["hidden_size"],
    )
    result: dict[str, Any] = {
        "model_type": "qwen3_5_moe_vision" if is_moe(text) else "qwen3_5_vision",
        **positives(raw, _VISION, "vision"),
    }
    hidden, heads, positions = result["hidden_size"], result["num_heads"], result["num_position_embeddings"]
    if hidden % heads or hidden // heads % 4 or isqrt(positions) ** 2 != positions:
        raise ValueError(
            f"vision: head or position geometry is invalid: hidden_size {hidden}, num_heads {heads}, "
            f"num_position_embeddings {positions}"
        )
    return result


def draft_config(raw: Config, target: Config, backend: str) -> dict[str, Any]:
    """The ``dflash`` or ``dflash2`` component.

    Args:
        raw: the draft checkpoint's whole ``config.json``.
        target: the text configuration it drafts for.
        backend: ``"dflash"`` or ``"dflash2"``.
    """
    architecture = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[backend]
    require_fixed(
        raw,
        backend,
        architectures=[architecture],
        model_type="qwen3",
        hidden_act="silu",
        attention_bias=False,
        is_causal=False,
        hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        num_target_layers=target["num_hidden_layers"],
    )
    sizes = positives(raw, _DRAFT, backend)
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
        raise ValueError(f"{backend}: invalid attention geometry: {sizes}")
    epsilon = binary32(raw.get("rms_norm_eps", RMS_NORM_EPS), f"{backend}.rms_norm_eps")
    rope = unscaled_rope(raw, backend)
    theta = binary32(rope.get("rope_theta", raw.get("rope_theta", ROPE_THETA)), f"{backend}.rope_theta")
    layer_types = _draft_layer_types(raw, sizes["num_hidden_layers"], backend)
    result: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3",
        **sizes,
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_theta": theta},
        "layer_types": layer_types,
    }
    if "sliding_attention" in layer_types:
        result |= positives(raw, ("sliding_window",), backend)
    result["dflash_config"] = _dflash_config(raw, target, backend)
    return result


def _draft_layer_types(raw: Config, layers: int, backend: str) -> list[str]:
    types = raw.get("layer_types")
    if types is None:
        enabled = boolean(raw.get("use_sliding_window", False), f"{backend}.use_sliding_window")
        threshold = raw.get("max_window_layers", 28)
        if type(threshold) is not int or threshold < 0:
            raise ValueError(f"{backend}.max_window_layers: must be nonnegative, got {threshold!r}")
        return ["sliding_attention" if enabled and i >= threshold else "full_attention" for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(f"{backend}: invalid layer_types: expected {layers} of {', '.join(known)}")
    return list(types)


def _dflash_config(raw: Config, target: Config, backend: str) -> dict[str, Any]:
    label = f"{backend}.dflash_config"
    config = require_object(raw.get("dflash_config", {}), label)
    ids, layers = config.get("target_layer_ids"), target["num_hidden_layers"]
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(i) is not int or not 0 <= i < layers for i in ids)
        or len(set(ids)) != len(ids)
    ):
        raise ValueError(f"{label}: invalid target_layer_ids {ids!r}: expected distinct layers below {layers}")
    mask = config.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < target["vocab_size"]:
        raise ValueError(f"{label}.mask_token_id: mask token outside the vocabulary: {mask!r}")
    result: dict[str, Any] = {"target_layer_ids": list(ids), "mask_token_id": mask}
    if backend == "dflash2":
        result |= positives(config, _DFLASH2, label)
        if target["hidden_size"] % result["conv_group_size"]:
            raise ValueError(f"{label}: hidden_size must be divisible by conv_group_size")
        for fields, name in ((raw, backend), (config, label)):
            require_fixed(fields, name, sample_from_anchor=False, input_embedding_scale=1.0, output_multiplier=1.0)
            if fields.get("final_logit_softcapping") not in (None, 0):
                raise ValueError(f"{name}.final_logit_softcapping: must be disabled")
    return result
