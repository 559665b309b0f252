"""Logical parameters of the DFlash and DFlash2 draft models."""

from __future__ import annotations

from ninferbuild.models.fields import Config
from ninferbuild.models.qwen3_5.parameters import ComponentBuilder


def add_draft(builder: ComponentBuilder, config: Config, text: Config) -> None:
    """A draft model.

    Keys and values of the context come from the same tensors as those of the draft tokens, but they multiply another
    input, so they are parameters of their own.
    """
    hidden, features = text["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    second = "conv_kernel_size" in config["dflash_config"]
    builder.add("feature_projection", (hidden, features * hidden), "fc.weight", builder.input("target_features"))
    builder.add("context_norm", (hidden,), "hidden_norm.weight")
    builder.add("final_norm", (hidden,), "norm.weight")
    for layer in range(config["num_hidden_layers"]):
        block = builder.at(f"layers/{layer}/", f"layers.{layer}.")
        _add_layer(block, builder.input("context_input"), config, hidden)
        if second:
            _add_convolutions(block, config["dflash_config"], hidden)
    if second:
        _add_selector(builder, config["dflash_config"], text)


def _add_layer(layer: ComponentBuilder, context: tuple[str, ...], config: Config, hidden: int) -> None:
    dim, width = config["head_dim"], config["intermediate_size"]
    query, cached = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer.add("input_norm", (hidden,), "input_layernorm.weight")
    layer.add("post_attention_norm", (hidden,), "post_attention_layernorm.weight")

    source = layer.input("query_projection_input")
    attention = layer.at("attention/", "self_attn.")
    attention.add("query", (query, hidden), "q_proj.weight", source)
    for role, tensor in (("key", "k_proj.weight"), ("value", "v_proj.weight")):
        attention.add(role, (cached, hidden), tensor, source)
        attention.add(f"context_{role}", (cached, hidden), tensor, context)
    attention.group("query", "key", "value")
    attention.add("query_norm", (dim,), "q_norm.weight")
    attention.add("key_norm", (dim,), "k_norm.weight")
    attention.add("output", (hidden, query), "o_proj.weight", layer.input("attention_output"))

    mlp = layer.at("mlp/", "mlp.")
    mlp.add("gate", (width, hidden), "gate_proj.weight", layer.input("mlp_input"))
    mlp.add("up", (width, hidden), "up_proj.weight", layer.input("mlp_input"))
    mlp.add("down", (hidden, width), "down_proj.weight", layer.input("mlp_product"))
    mlp.group("gate", "up")


def _add_convolutions(layer: ComponentBuilder, config: Config, hidden: int) -> None:
    taps, group = config["conv_kernel_size"], config["conv_group_size"]
    for name in ("attention_conv", "mlp_conv"):
        source = layer.input(f"{name}_input")
        branch = layer.at(f"{name}/", f"{name}.")
        branch.add("base_kernel", (2, taps, hidden), "base_kernel")
        branch.add("kernel_projection", (2 * taps * hidden // group, hidden), "kernel_projection.weight", source)


def _add_selector(builder: ComponentBuilder, config: Config, text: Config) -> None:
    rank = config["selector_rank"]
    source = builder.input("final_hidden")
    selector = builder.at("candidate_selector/", "candidate_selector.")
    selector.add("hidden_projection", (rank, text["hidden_size"]), "hidden_projection.weight", source)
    for role in ("predecessor_codebook", "successor_codebook"):
        selector.add(role, (text["vocab_size"], rank), role)
