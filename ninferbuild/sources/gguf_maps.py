"""Which tensors of a GGUF hold the tensors of a Qwen3.5-family checkpoint, and what its exporter did to them.

Each function returns the arguments of :class:`~ninferbuild.sources.gguf_source.HFAliasSource` for one part of a model:
``(name_map, transforms, shapes)``, for vision also ``composites``. They are plain dictionaries; those of several parts
are merged with ``|``.

Exporters store norms of the text model as ``1 + w``, and move value heads of a linear-attention layer: head ``h = k*R +
r``, the ``r``-th of ``R`` value heads of key head ``k``, goes to position ``r*Hk + k``. Transforms undo both.
"""

from __future__ import annotations

from collections.abc import Callable

from ninferbuild.sources.alias_transforms import InOrder, LogNegative, Offset, Stack, SwapGroups, Transform

NameMap = dict[str, str]
"""Name in the checkpoint → name in the GGUF."""

Transforms = dict[str, Transform]

Shapes = dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]]
"""Name in the checkpoint → its shape there, made of the shape in the GGUF."""

Composites = dict[str, Stack]

MINUS_ONE = Offset(-1.0)

_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""A block with full attention and a dense feed-forward."""

_MTP_STEM = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}

_VISION = {
    "patch_embed.proj.bias": "v.patch_embd.bias",
    "pos_embed.weight": "v.position_embd.weight",
    **{f"merger.norm.{kind}": f"v.post_ln.{kind}" for kind in ("weight", "bias")},
    **{f"merger.linear_fc1.{kind}": f"mm.0.{kind}" for kind in ("weight", "bias")},
    **{f"merger.linear_fc2.{kind}": f"mm.2.{kind}" for kind in ("weight", "bias")},
}

_VISION_BLOCK = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
"""Each with a weight and a bias."""


def _below(hf_prefix: str, gguf_prefix: str, names: NameMap) -> NameMap:
    return {hf_prefix + hf: gguf_prefix + gguf for hf, gguf in names.items()}


def _norms(names: NameMap) -> Transforms:
    """The offset for each name that is a norm's."""
    return {name: MINUS_ONE for name in names if "norm" in name.removesuffix(".weight").rpartition(".")[2]}


def standard_dense_name_map(
    num_hidden_layers: int, *, tie_word_embeddings: bool = False, text_prefix: str = "model.language_model."
) -> tuple[NameMap, Transforms, Shapes]:
    """The text model but for its linear-attention layers: embedding, head, norms, full attention, dense feed-forward.

    All layers get all rows; a linear-attention layer never asks for those of full attention.

    Args:
        tie_word_embeddings: the head is the embedding, and not mapped.
        text_prefix: what text tensors begin with: ``model.language_model.`` when the checkpoint's ``config.json`` has a
            ``text_config``, else ``model.``.
    """
    names = _below(text_prefix, "", {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"})
    if not tie_word_embeddings:
        names["lm_head.weight"] = "output.weight"
    for layer in range(num_hidden_layers):
        names |= _below(f"{text_prefix}layers.{layer}.", f"blk.{layer}.", _BLOCK)
    return names, _norms(names), {}


def qwen35_linear_attention_name_map(
    layer_index: int,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    text_prefix: str = "model.language_model.",
) -> tuple[NameMap, Transforms, Shapes]:
    """One linear-attention layer, to be merged with :func:`standard_dense_name_map`.

    Value heads go back to where the checkpoint has them, also along the columns of the output projection.

    Raises:
        ValueError: ``num_v_heads`` is not a multiple of ``num_k_heads``.
    """
    if num_k_heads <= 0 or num_v_heads % num_k_heads:
        raise ValueError(f"num_v_heads {num_v_heads} is not a multiple of num_k_heads {num_k_heads}")
    hf, gguf = f"{text_prefix}layers.{layer_index}.linear_attn.", f"blk.{layer_index}."
    names = _below(
        hf,
        gguf,
        {
            "in_proj_qkv.weight": "attn_qkv.weight",
            "in_proj_z.weight": "attn_gate.weight",
            "in_proj_a.weight": "ssm_alpha.weight",
            "in_proj_b.weight": "ssm_beta.weight",
            "conv1d.weight": "ssm_conv1d.weight",
            "A_log": "ssm_a",
            "dt_bias": "ssm_dt.bias",
            "norm.weight": "ssm_norm.weight",
            "out_proj.weight": "ssm_out.weight",
        },
    )
    transforms: Transforms = {f"{hf}A_log": LogNegative()}
    ratio = num_v_heads // num_k_heads
    if ratio > 1:
        query_key = 2 * head_k_dim * num_k_heads
        rows, heads = (SwapGroups(0, ratio, num_k_heads, width) for width in (head_v_dim, 1))
        values = SwapGroups(0, ratio, num_k_heads, head_v_dim, first=query_key)
        transforms = {
            f"{hf}in_proj_qkv.weight": values,
            f"{hf}in_proj_z.weight": rows,
            f"{hf}in_proj_a.weight": heads,
            f"{hf}in_proj_b.weight": heads,
            f"{hf}conv1d.weight": values,
            f"{hf}A_log": InOrder((heads, LogNegative())),
            f"{hf}dt_bias": heads,
            f"{hf}out_proj.weight": SwapGroups(1, ratio, num_k_heads, head_v_dim),
        }
    return names, transforms, {f"{hf}conv1d.weight": _with_axis}


def _with_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``(channels, taps)`` → ``(channels, 1, taps)``, the shape of a depthwise convolution's kernel."""
    channels, taps = shape
    return channels, 1, taps


def qwen35_mtp_name_map(
    gguf_layer_index: int, *, hf_prefix: str = "mtp.", norm_offset: bool = False
) -> tuple[NameMap, Transforms, Shapes]:
    """The multi-token-prediction block: its stem and one layer of full attention.

    Args:
        gguf_layer_index: the block's number in the GGUF, one after the last layer's: 64 for a model of 64 layers.
        hf_prefix: ``""`` for the names of a stand-alone MTP checkpoint.
        norm_offset: the exporter stored the seven norms as ``1 + w``, as it does those of the text model.
    """
    names = _below(hf_prefix, f"blk.{gguf_layer_index}.", _MTP_STEM | _below("layers.0.", "", _BLOCK))
    return names, _norms(names) if norm_offset else {}, {}


def qwen35_vision_name_map(
    num_blocks: int,
    *,
    hidden_size: int,
    in_channels: int = 3,
    temporal_patch_size: int = 2,
    patch_size: int,
    hf_prefix: str = "model.visual.",
) -> tuple[NameMap, Transforms, Shapes, Composites]:
    """The vision tower of an mmproj file. Its layer norms are stored as they are.

    The patch embedding is stored as one kernel a frame, and stacked again to ``(hidden_size, in_channels, 2,
    patch_size, patch_size)``.

    Raises:
        ValueError: ``temporal_patch_size`` is not 2.
    """
    if temporal_patch_size != 2:
        raise ValueError(
            f"temporal_patch_size must be 2, the frames that a GGUF has kernels of, not {temporal_patch_size}"
        )
    names = _below(hf_prefix, "", _VISION)
    for block in range(num_blocks):
        for hf, gguf in _VISION_BLOCK.items():
            for kind in ("weight", "bias"):
                names[f"{hf_prefix}blocks.{block}.{hf}.{kind}"] = f"v.blk.{block}.{gguf}.{kind}"
    frames = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    kernel = (hidden_size, in_channels, patch_size, patch_size)
    return names, {}, {}, {f"{hf_prefix}patch_embed.proj.weight": Stack(frames, 2, kernel)}
