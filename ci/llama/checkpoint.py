"""Tiny Qwen3.5 checkpoints with text, vision and MTP, saved by ``transformers``.

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
EXPERTS, EXPERT_WIDTH = 4, 256
QUERY, CACHED = HEADS * HEAD_DIM, KEY_VALUE_HEADS * HEAD_DIM

SEED = 20
SPREAD = 0.05
"""Standard deviation of the weights."""

NORM_STEP = 1 / 128
"""Norms are multiples of it, so that ``1 + w`` is exact in FP32."""

TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
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
DENSE = {"intermediate_size": INTERMEDIATE}
MIXTURE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": EXPERT_WIDTH,
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
    """The saved model: its directory, its tensors by name, FP32, and whether it is a mixture of experts."""

    directory: Path
    tensors: dict[str, torch.Tensor]
    mixture: bool


def write(directory: Path, *, mixture: bool = False) -> Checkpoint:
    """Save a model, its MTP block, its tokenizer and the other files that an artifact carries.

    Names and shapes are those of ``transformers``; the tensors are written here, because it has no MTP block, and
    saves experts one by one where published checkpoints have them in banks.
    """
    from safetensors.torch import save_file
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    family = "Qwen3_5Moe" if mixture else "Qwen3_5"
    text = TEXT | (MIXTURE if mixture else DENSE)
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    weights = directory / "model.safetensors"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} | dict(_mtp_shapes(mixture))
    generator = torch.Generator().manual_seed(SEED)
    tensors = {name: _values(name, shape, generator) for name, shape in sorted(shapes.items())}
    save_file(tensors, weights, metadata={"format": "pt"})
    _write_tokenizer(directory)
    return Checkpoint(directory, {name: tensor.to(torch.float32) for name, tensor in tensors.items()}, mixture)


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """BF16 weights; F32 for the decay parameters of a delta net, as published checkpoints have them."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith(("A_log", "dt_bias")):
        return values
    if "norm" in name:
        return (values.clamp(-3, 3) * 16).round().mul(NORM_STEP).add(0.0).to(torch.bfloat16)  # no -0: 1 + w has none
    return (values * SPREAD).to(torch.bfloat16)


def _mtp_shapes(mixture: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
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
    if mixture:
        yield layer + "mlp.gate.weight", (EXPERTS, HIDDEN)
        yield layer + "mlp.shared_expert_gate.weight", (1, HIDDEN)
        yield layer + "mlp.experts.gate_up_proj", (EXPERTS, 2 * EXPERT_WIDTH, HIDDEN)
        yield layer + "mlp.experts.down_proj", (EXPERTS, HIDDEN, EXPERT_WIDTH)
    width, feed = (EXPERT_WIDTH, "mlp.shared_expert") if mixture else (INTERMEDIATE, "mlp")
    for name in ("gate", "up"):
        yield f"{layer}{feed}.{name}_proj.weight", (width, HIDDEN)
    yield f"{layer}{feed}.down_proj.weight", (HIDDEN, width)


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
