"""Shapes of the models that the benchmark builds: tensor names, element types and ``config.json``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

WORD_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
LAYERS = "model.language_model.layers."


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor.

    Attributes:
        dtype: its Safetensors name.
        parts: first row of each logical parameter that is stored in it.
        begins: its first bytes; what follows is up to the writer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    parts: tuple[int, ...] = (0,)
    begins: bytes = b""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * WORD_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A Qwen3.5 text model. ``experts`` 0 is a dense one, with ``intermediate`` columns in its feed-forward.

    Every fourth layer is full attention, the others are gated delta nets. In a model of two or three layers the last
    one is full attention, so that both kinds are there.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    vocabulary: int
    layers: int
    experts: int = 0
    shared_intermediate: int = 0
    taps: int = 4

    def scaled(self, factor: int) -> Geometry:
        """The same kind of model with every size divided by about ``factor``; for tests. 1 changes nothing."""
        if factor == 1:
            return self

        def smaller(size: int, least: int) -> int:
            return max(least, size // factor // least * least) if size else 0

        return Geometry(
            hidden=smaller(self.hidden, 128),
            intermediate=smaller(self.intermediate, 64),
            heads=2,
            kv_heads=1,
            head_dim=64,
            key_heads=2,
            key_dim=32,
            value_heads=4,
            value_dim=32,
            vocabulary=smaller(self.vocabulary, 128),
            layers=smaller(self.layers, 4),
            experts=smaller(self.experts, 4),
            shared_intermediate=smaller(self.shared_intermediate, 64),
        )

    def fitted(self, size: int) -> Geometry:
        """As many of the layers, and then as many rows of the vocabulary, as ``size`` bytes of checkpoint hold.

        The vocabulary of a whole model is a tenth of it; it gets about that much of a small one too.
        """
        layers = max(1, min(self.layers, int(0.9 * size / self._layer_bytes(self.layers))))
        rows = (size - layers * self._layer_bytes(layers)) // (2 * 2 * self.hidden)
        return replace(self, layers=layers, vocabulary=int(min(self.vocabulary, max(256, rows // 128 * 128))))

    def _layer_bytes(self, layers: int) -> float:
        """Bytes of one layer, on average over a model of ``layers``."""
        of_layers = replace(self, layers=layers).tensors()
        return sum(tensor.bytes for tensor in of_layers if tensor.name.startswith(LAYERS)) / layers

    def layer_types(self) -> list[str]:
        full = {layer for layer in range(self.layers) if layer % 4 == 3} or ({self.layers - 1} - {0})
        return ["full_attention" if layer in full else "linear_attention" for layer in range(self.layers)]

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        text: dict[str, Any] = {
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "max_position_embeddings": 262144,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "layer_types": self.layer_types(),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": self._rope(),
            "linear_num_key_heads": self.key_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.taps,
            "mamba_ssm_dtype": "float32",
        }
        if self.experts:
            text["num_experts"] = self.experts
            text["num_experts_per_tok"] = min(8, self.experts)
            text["moe_intermediate_size"] = self.intermediate
            text["shared_expert_intermediate_size"] = self.shared_intermediate
        else:
            text["intermediate_size"] = self.intermediate
        kind = "Qwen3_5MoeForConditionalGeneration" if self.experts else "Qwen3_5ForConditionalGeneration"
        return {"architectures": [kind], "text_config": text}

    def _rope(self) -> dict[str, Any]:
        pairs = self.head_dim // 8
        section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        return {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": section,
        }

    def tensors(self) -> Iterator[Tensor]:
        """Every stored tensor, in file order."""
        yield Tensor("model.language_model.embed_tokens.weight", (self.vocabulary, self.hidden))
        yield Tensor("lm_head.weight", (self.vocabulary, self.hidden))
        yield Tensor("model.language_model.norm.weight", (self.hidden,))
        for layer, kind in enumerate(self.layer_types()):
            prefix = f"{LAYERS}{layer}."
            yield Tensor(f"{prefix}input_layernorm.weight", (self.hidden,))
            yield Tensor(f"{prefix}post_attention_layernorm.weight", (self.hidden,))
            yield from (self._attention if kind == "full_attention" else self._delta_net)(prefix)
            yield from (self._mixture if self.experts else self._feed_forward)(f"{prefix}mlp.")

    def _attention(self, prefix: str) -> Iterator[Tensor]:
        prefix += "self_attn."
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield Tensor(f"{prefix}q_proj.weight", (2 * queries, self.hidden), parts=(0, self.head_dim))
        yield Tensor(f"{prefix}k_proj.weight", (keys, self.hidden))
        yield Tensor(f"{prefix}v_proj.weight", (keys, self.hidden))
        yield Tensor(f"{prefix}o_proj.weight", (self.hidden, queries))
        yield Tensor(f"{prefix}q_norm.weight", (self.head_dim,))
        yield Tensor(f"{prefix}k_norm.weight", (self.head_dim,))

    def _delta_net(self, prefix: str) -> Iterator[Tensor]:
        prefix += "linear_attn."
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        yield Tensor(f"{prefix}A_log", (self.value_heads,), "F32")
        yield Tensor(f"{prefix}dt_bias", (self.value_heads,))
        yield Tensor(f"{prefix}conv1d.weight", (2 * keys + values, 1, self.taps))
        yield Tensor(f"{prefix}in_proj_qkv.weight", (2 * keys + values, self.hidden), parts=(0, keys, 2 * keys))
        yield Tensor(f"{prefix}in_proj_z.weight", (values, self.hidden))
        yield Tensor(f"{prefix}in_proj_a.weight", (self.value_heads, self.hidden))
        yield Tensor(f"{prefix}in_proj_b.weight", (self.value_heads, self.hidden))
        yield Tensor(f"{prefix}norm.weight", (self.value_dim,))
        yield Tensor(f"{prefix}out_proj.weight", (self.hidden, values))

    def _feed_forward(self, prefix: str, columns: int = 0) -> Iterator[Tensor]:
        columns = columns or self.intermediate
        yield Tensor(f"{prefix}gate_proj.weight", (columns, self.hidden))
        yield Tensor(f"{prefix}up_proj.weight", (columns, self.hidden))
        yield Tensor(f"{prefix}down_proj.weight", (self.hidden, columns))

    def _mixture(self, prefix: str) -> Iterator[Tensor]:
        yield Tensor(f"{prefix}gate.weight", (self.experts, self.hidden))
        yield Tensor(f"{prefix}experts.gate_up_proj", (self.experts, 2 * self.intermediate, self.hidden))
        yield Tensor(f"{prefix}experts.down_proj", (self.experts, self.hidden, self.intermediate))
        yield Tensor(f"{prefix}shared_expert_gate.weight", (1, self.hidden))
        yield from self._feed_forward(f"{prefix}shared_expert.", self.shared_intermediate)


DENSE = Geometry(
    hidden=5120,
    intermediate=17408,
    heads=24,
    kv_heads=4,
    head_dim=256,
    key_heads=16,
    key_dim=128,
    value_heads=48,
    value_dim=128,
    vocabulary=248320,
    layers=64,
)
"""The dense 27B model."""

EXPERTS = Geometry(
    hidden=2048,
    intermediate=512,
    heads=16,
    kv_heads=2,
    head_dim=256,
    key_heads=16,
    key_dim=128,
    value_heads=32,
    value_dim=128,
    vocabulary=248320,
    layers=40,
    experts=256,
    shared_intermediate=512,
)
"""A mixture of 256 experts in 40 layers: about 31,000 logical parameters."""

MANY = replace(EXPERTS, layers=96)
"""The same with so many layers that it has 75,000 logical parameters."""
