"""Logical parameters of the text model and of the MTP block, in the order that decides object ids.

Shapes are ``(rows, columns)`` of a matrix that multiplies a column vector: ``(outputs, inputs)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ninferbuild.models.fields import Config
from ninferbuild.models.model import Model, Parameter, Store
from ninferbuild.models.qwen3_5.config import is_moe
from ninferbuild.models.qwen3_5.sources import Placement, StoreMapping
from ninferbuild.sources.compressed_tensors import has_matrix
from ninferbuild.sources.safetensors import TensorViews

if TYPE_CHECKING:
    from ninferbuild.models.qwen3_5.compatibility import Compatibility

Ranges = tuple[tuple[int, int], ...]


class ComponentBuilder:
    """Adds the parameters of one component, all of them stored in one checkpoint.

    ``prefix`` and ``tensors`` go before every logical name and every tensor name; :meth:`at` moves them on.
    """

    def __init__(self, model: Model, store: Store, compatibility: Compatibility, prefix: str, tensors: str):
        self.model = model
        self.prefix = prefix
        self._store = store
        self._compatibility = compatibility
        self._tensors = tensors
        self._residency = prefix.split("/", 1)[0]

    def at(self, prefix: str, tensors: str) -> ComponentBuilder:
        """A builder for names below ``prefix`` and tensors whose names go on with ``tensors``."""
        return ComponentBuilder(
            self.model, self._store, self._compatibility, self.prefix + prefix, self._tensors + tensors
        )

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        tensor: str,
        inputs: tuple[str, ...] = (),
        *,
        stored: tuple[int, ...] | None = None,
        rows: Ranges | None = None,
        offset: int = 0,
        axes: tuple[int, ...] | None = None,
        separate: str | None = None,
        direct_format: str = "bf16",
    ) -> None:
        """Add ``prefix + name``, stored in ``tensors + tensor`` as the :class:`Placement` arguments say."""
        tensors, full_name = self._tensors, self.prefix + name
        placement = Placement(
            tensors + tensor, stored or shape, rows, offset, axes, None if separate is None else tensors + separate
        )
        mapping = StoreMapping(full_name, shape, placement, self._store, self._compatibility)
        self.model.add(
            Parameter(full_name, shape, mapping(self._store), mapping, inputs, direct_format, self._residency)
        )

    def stacked(
        self, tensor: str, stored: tuple[int, ...], shape: tuple[int, ...]
    ) -> Callable[[str, tuple[str, ...], int, str], None]:
        """What adds matrices of ``shape`` that are stored in the tensor ``tensors + tensor`` of shape ``stored``.

        It is called with the name, the inputs, the offset and ``separate``, and does what :meth:`add` would: a model
        has tens of thousands of experts, of which a layer's have nearly everything in common.
        """
        prefix, tensors, store, model = self.prefix, self._tensors, self._store, self.model
        compatibility, residency, name_of_tensor = self._compatibility, self._residency, tensors + tensor
        views = TensorViews(store, name_of_tensor, shape, stored)

        def add(name: str, inputs: tuple[str, ...], offset: int, separate: str) -> None:
            full_name, alone = prefix + name, tensors + separate
            placement = Placement(name_of_tensor, stored, None, offset, None, alone)
            mapping = StoreMapping(full_name, shape, placement, store, compatibility)
            source = mapping(store) if has_matrix(store, alone) else views.at(offset)
            model.add(Parameter(full_name, shape, source, mapping, inputs, "bf16", residency))

        return add

    def input(self, name: str) -> tuple[str, ...]:
        """The mathematical input ``prefix + name`` as a parameter's inputs."""
        return (self.prefix + name,)

    def group(self, *names: str) -> None:
        """Let the parameters ``prefix + name`` share one physical tensor."""
        self.model.packing_groups.append(tuple(self.prefix + name for name in names))


def add_text(builder: ComponentBuilder, root: ComponentBuilder, config: Config, head_inputs: tuple[str, ...]) -> None:
    """The text model.

    Args:
        builder: below the checkpoint's text prefix.
        root: the same without a tensor prefix; an untied head always lies there.
        head_inputs: the hidden states that the output head multiplies.
    """
    vocabulary = (config["vocab_size"], config["hidden_size"])
    builder.add("token_embedding", vocabulary, "embed_tokens.weight")
    if config["tie_word_embeddings"]:
        builder.add("output_head", vocabulary, "embed_tokens.weight", head_inputs)
    else:
        root.add("output_head", vocabulary, "lm_head.weight", head_inputs)
    builder.add("final_norm", (config["hidden_size"],), "norm.weight")
    for layer, kind in enumerate(config["layer_types"]):
        add_block(builder.at(f"layers/{layer}/", f"layers.{layer}."), config, kind)


def add_mtp(builder: ComponentBuilder, config: Config) -> None:
    """The multi-token-prediction block: a stem and one full-attention layer."""
    hidden = config["hidden_size"]
    builder.add("input_projection", (hidden, 2 * hidden), "fc.weight", builder.input("stem_input"))
    builder.add("embedding_norm", (hidden,), "pre_fc_norm_embedding.weight")
    builder.add("hidden_norm", (hidden,), "pre_fc_norm_hidden.weight")
    builder.add("final_norm", (hidden,), "norm.weight")
    add_block(builder.at("layers/0/", "layers.0."), config, "full_attention")


def add_block(builder: ComponentBuilder, config: Config, kind: str) -> None:
    """One transformer block with the mixer ``kind``."""
    norm = (config["hidden_size"],)
    builder.add("input_norm", norm, "input_layernorm.weight")
    mixer = add_attention if kind == "full_attention" else add_gated_delta_net
    mixer(builder, config)
    builder.add("post_attention_norm", norm, "post_attention_layernorm.weight")
    feed_forward = add_mixture if is_moe(config) else add_mlp
    feed_forward(builder, config)


def add_attention(builder: ComponentBuilder, config: Config) -> None:
    """Full attention with an output gate; the checkpoint stores query and gate rows of each head in turn."""
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    query, cached = (heads * dim, hidden), (config["num_key_value_heads"] * dim, hidden)
    both = (2 * heads * dim, hidden)
    mixer = builder.input("mixer_input")
    block = builder.at("attention/", "self_attn.")
    query_rows = tuple((2 * head * dim, (2 * head + 1) * dim) for head in range(heads))
    gate_rows = tuple((begin + dim, end + dim) for begin, end in query_rows)
    block.add("query", query, "q_proj.weight", mixer, stored=both, rows=query_rows)
    block.add("gate", query, "q_proj.weight", mixer, stored=both, rows=gate_rows)
    block.add("key", cached, "k_proj.weight", mixer)
    block.add("value", cached, "v_proj.weight", mixer)
    block.add("query_norm", (dim,), "q_norm.weight")
    block.add("key_norm", (dim,), "k_norm.weight")
    block.add("output", (hidden, heads * dim), "o_proj.weight", block.input("gated_output"))
    block.group("query", "key", "gate", "value")
    block.group("query", "key")
    block.group("gate", "value")


def add_gated_delta_net(builder: ComponentBuilder, config: Config) -> None:
    """Linear attention; the checkpoint stores query, key and value rows in one matrix."""
    hidden, heads, taps = config["hidden_size"], config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    mixer = builder.input("mixer_input")
    block = builder.at("gdn/", "linear_attn.")
    block.add("a_log", (heads,), "A_log", direct_format="fp32")
    block.add("dt_bias", (heads,), "dt_bias", direct_format="fp32")
    block.add("convolution", (taps, channels), "conv1d.weight", stored=(channels, 1, taps), axes=(2, 0, 1))
    block.add("a_projection", (heads, hidden), "in_proj_a.weight", mixer)
    block.add("b_projection", (heads, hidden), "in_proj_b.weight", mixer)
    for name, begin, end in (("query", 0, keys), ("key", keys, 2 * keys), ("value", 2 * keys, channels)):
        shape, stored = (end - begin, hidden), (channels, hidden)
        block.add(name, shape, "in_proj_qkv.weight", mixer, stored=stored, rows=((begin, end),))
    block.add("z", (values, hidden), "in_proj_z.weight", mixer)
    block.add("norm", (config["linear_value_head_dim"],), "norm.weight")
    block.add("output", (hidden, values), "out_proj.weight", block.input("gated_output"))
    block.group("query", "key", "value", "z")
    block.group("query", "key")
    block.group("value", "z")
    block.group("a_projection", "b_projection")


def add_mixture(builder: ComponentBuilder, config: Config) -> None:
    """Routed experts and one shared expert.

    The checkpoint stores all experts in two tensors: ``gate_up_proj`` ``(experts, 2 × width, hidden)``, gate rows
    before up rows, and ``down_proj`` ``(experts, hidden, width)``. A store with a matrix an expert is accepted too.
    """
    hidden, experts, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    feed = builder.input("ffn_input")
    block = builder.at("moe/", "mlp.")
    block.add("router", (experts, hidden), "gate.weight", feed)
    block.add("shared_score", (1, hidden), "shared_expert_gate.weight", feed)
    block.group("router", "shared_score")

    up_shape, down_shape, size = (width, hidden), (hidden, width), width * hidden
    gate_up, down = (experts, 2 * width, hidden), (experts, hidden, width)
    add_up = block.stacked("experts.gate_up_proj", gate_up, up_shape)
    add_down = block.stacked("experts.down_proj", down, down_shape)
    for e in range(experts):
        name, alone, first = f"experts/{e}/", f"experts.{e}.", 2 * e * size
        add_up(name + "gate", feed, first, alone + "gate_proj.weight")
        add_up(name + "up", feed, first + size, alone + "up_proj.weight")
        add_down(name + "down", block.input(name + "product"), e * size, alone + "down_proj.weight")
    block.group(*(f"experts/{e}/{role}" for e in range(experts) for role in ("gate", "up")))
    block.group(*(f"experts/{e}/down" for e in range(experts)))

    shared = config["shared_expert_intermediate_size"]
    block.add("shared/gate", (shared, hidden), "shared_expert.gate_proj.weight", feed)
    block.add("shared/up", (shared, hidden), "shared_expert.up_proj.weight", feed)
    product = block.input("shared/product")
    block.add("shared/down", (hidden, shared), "shared_expert.down_proj.weight", product)
    block.group("shared/gate", "shared/up")


def add_mlp(builder: ComponentBuilder, config: Config) -> None:
    """The gated dense feed-forward."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    feed = builder.input("ffn_input")
    block = builder.at("mlp/", "mlp.")
    block.add("gate", (width, hidden), "gate_proj.weight", feed)
    block.add("up", (width, hidden), "up_proj.weight", feed)
    block.add("down", (hidden, width), "down_proj.weight", block.input("product"))
    block.group("gate", "up")
