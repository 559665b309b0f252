"""A tiny Qwen3.5 checkpoint with text, vision and MTP, saved by ``transformers``.

The widths of all matrices are multiples of 256, so that every type of blocks fits all of them. Two key heads share
eight value heads, so that no reordering of heads is its own inverse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import json
from pathlib import Path
import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 256, 512, 512, 4
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 64
KEY_HEADS, VALUE_HEADS, DELTA_DIM, TAPS = 2, 8, 32, 4
QUERY, CACHED = HEADS * HEAD_DIM, KEY_VALUE_HEADS * HEAD_DIM

SEED = 20
SPREAD = 0.05
"""Standard deviation of the weights."""

NORM_STEP = 1 / 128
"""Norms are multiples of it, so that ``1 + w`` is exact in FP32."""

TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HEAD_DIM,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": DELTA_DIM,
    "linear_value_head_dim": DELTA_DIM,
    "linear_conv_kernel_dim": TAPS,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": HIDDEN,
    "deepstack_visual_indexes": [],
}


@dataclass(frozen=True)
class Checkpoint:
    """The saved model: its directory, and its tensors by name, FP32."""

    directory: Path
    tensors: dict[str, torch.Tensor]


def write(directory: Path) -> Checkpoint:
    """Save the model, its MTP block, its tokenizer and the other files that an artifact carries.

    ``transformers`` has no MTP block: those tensors join the file that it wrote.
    """
    from safetensors.torch import load_file, save_file
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)
    weights = directory / "model.safetensors"
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(weights).items()} | dict(_mtp_shapes())
    generator = torch.Generator().manual_seed(SEED)
    tensors = {name: _values(name, shape, generator) for name, shape in sorted(shapes.items())}
    save_file(tensors, weights, metadata={"format": "pt"})
    _write_tokenizer(directory)
    return Checkpoint(directory, {name: tensor.to(torch.float32) for name, tensor in tensors.items()})


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """BF16 weights; F32 for the decay parameters of a delta net, as published checkpoints have them."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith(("A_log", "dt_bias")):
        return values
    if "norm" in name:
        return (values.clamp(-3, 3) * 16).round().mul(NORM_STEP).add(0.0).to(torch.bfloat16)  # no -0: 1 + w has none
    return (values * SPREAD).to(torch.bfloat16)


def _mtp_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mtp.fc.weight", (HIDDEN, 2 * HIDDEN)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (HIDDEN,)
    layer = "mtp.layers.0."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{layer}{norm}.weight", (HIDDEN,)
    attention = layer + "self_attn."
    yield attention + "q_proj.weight", (2 * QUERY, HIDDEN)
    yield attention + "k_proj.weight", (CACHED, HIDDEN)
    yield attention + "v_proj.weight", (CACHED, HIDDEN)
    yield attention + "o_proj.weight", (HIDDEN, QUERY)
    yield attention + "q_norm.weight", (HEAD_DIM,)
    yield attention + "k_norm.weight", (HEAD_DIM,)
    for name, shape in (
        ("gate", (INTERMEDIATE, HIDDEN)),
        ("up", (INTERMEDIATE, HIDDEN)),
        ("down", (HIDDEN, INTERMEDIATE)),
    ):
        yield f"{layer}mlp.{name}_proj.weight", shape


def _write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer with a few merges and one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left in "aeiou" for right in string.ascii_lowercase if right not in "aeiou"]
    end = "<|endoftext|>"
    words = [*alphabet, end, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}\n")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": words.index(end)}))
    processor = {
        "patch_size": VISION["patch_size"],
        "temporal_patch_size": VISION["temporal_patch_size"],
        "merge_size": VISION["spatial_merge_size"],
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (directory / name).write_text(json.dumps(processor))
