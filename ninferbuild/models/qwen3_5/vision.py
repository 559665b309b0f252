"""Logical parameters of the Vision encoder."""

from __future__ import annotations

from ninferbuild.models.fields import Config
from ninferbuild.models.qwen3_5.parameters import ComponentBuilder


def add_vision(builder: ComponentBuilder, config: Config, text_hidden: int) -> None:
    """Patch and position embeddings, the layers, and the merger into the text model's ``text_hidden`` columns."""
    hidden, merge = config["hidden_size"], config["spatial_merge_size"] ** 2 * config["hidden_size"]
    patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
    columns = patch[0] * patch[1] * patch[2] * patch[3]
    builder.add(
        "patch_embedding",
        (hidden, columns),
        "patch_embed.proj.weight",
        builder.input("patch_input"),
        stored=(hidden, *patch),
    )
    builder.add("patch_embedding_bias", (hidden,), "patch_embed.proj.bias")
    builder.add("position_embedding", (config["num_position_embeddings"], hidden), "pos_embed.weight")
    for layer in range(config["depth"]):
        _add_layer(builder.at(f"layers/{layer}/", f"blocks.{layer}."), config)

    merger = builder.at("merger/", "merger.")
    merger.add("norm_weight", (hidden,), "norm.weight")
    merger.add("norm_bias", (hidden,), "norm.bias")
    _add_linear(merger, "fc1", (merge, merge), "linear_fc1", merger.input("input"))
    _add_linear(merger, "fc2", (text_hidden, merge), "linear_fc2", merger.input("activation"))


def _add_layer(layer: ComponentBuilder, config: Config) -> None:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    for norm in ("norm1", "norm2"):
        layer.add(f"{norm}_weight", (hidden,), f"{norm}.weight")
        layer.add(f"{norm}_bias", (hidden,), f"{norm}.bias")

    roles, source = ("query", "key", "value"), layer.input("attention_input")
    attention = layer.at("attention/", "attn.")
    for n, role in enumerate(roles):
        rows = ((n * hidden, (n + 1) * hidden),)
        attention.add(role, (hidden, hidden), "qkv.weight", source, stored=(3 * hidden, hidden), rows=rows)
        attention.add(f"{role}_bias", (hidden,), "qkv.bias", stored=(3 * hidden,), offset=n * hidden)
    attention.group(*roles)
    attention.group(*(f"{role}_bias" for role in roles))
    _add_linear(attention, "output", (hidden, hidden), "proj", layer.input("attention_output"))

    mlp = layer.at("mlp/", "mlp.")
    _add_linear(mlp, "fc1", (width, hidden), "linear_fc1", layer.input("mlp_input"))
    _add_linear(mlp, "fc2", (hidden, width), "linear_fc2", layer.input("mlp_activation"))


def _add_linear(
    builder: ComponentBuilder, name: str, shape: tuple[int, int], tensor: str, inputs: tuple[str, ...]
) -> None:
    """A matrix and its bias."""
    builder.add(name, shape, f"{tensor}.weight", inputs)
    builder.add(f"{name}_bias", (shape[0],), f"{tensor}.bias")
