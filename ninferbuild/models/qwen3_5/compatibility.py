"""May a parameter of a model be taken from another checkpoint?

Only what decides the parameter's shape or meaning is compared: a fine-tune with another RoPE base or context length
is a legal source of weights, one with another head size is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ninferbuild.models.fields import Config
from ninferbuild.models.model import Store
from ninferbuild.models.qwen3_5.config import draft_config, text_config, vision_config

_NOT_A_MODEL = frozenset({"quantization_config", "_name_or_path", "transformers_version", "torch_dtype", "dtype"})

_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_LINEAR_HEADS = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
)


def has_model_config(store: Store) -> bool:
    """Whether the checkpoint describes a model; a folder of mere tensors has no config or a quantisation alone."""
    return not _NOT_A_MODEL.issuperset(store.config)


class Compatibility:
    """Checks of other stores against one model's component configurations."""

    def __init__(self, configs: dict[str, Config]):
        """``configs``: component → configuration as the artifact stores it."""
        self._configs = configs
        # A recipe maps thousands of parameters onto one store. The store is kept so that its id stays its own.
        self._checked: dict[tuple[int, str], tuple[Store, Config]] = {}

    def check(self, name: str, store: Store) -> None:
        """Refuse ``store`` as a source of the parameter ``name`` if the two configurations disagree about it.

        Raises:
            ValueError: they disagree, or the store's configuration is unsuitable on its own.
        """
        if not has_model_config(store):
            return
        component = name.split("/", 1)[0]
        actual = self._actual(component, store)
        expected = self._configs["text" if component == "mtp" else component]
        if component.startswith("dflash"):
            _compare(name, store, actual["dflash_config"], expected["dflash_config"], _draft_fields(name))
        if "/layers/" in name:
            _check_topology(name, store, component, actual, expected)
        _compare(name, store, actual, expected, _FIELDS[component](name))

    def _actual(self, component: str, store: Store) -> Config:
        key = (id(store), component)
        if key not in self._checked:
            self._checked[key] = (store, self._read(component, store.config))
        return self._checked[key][1]

    def _read(self, component: str, config: Config) -> dict[str, Any]:
        if component in ("text", "mtp"):
            return text_config(config, mtp=component == "mtp")
        if component == "vision":
            return vision_config(config, self._configs["text"])
        return draft_config(config, self._configs["text"], component)


def _text_fields(name: str) -> Iterable[str]:
    yield "hidden_size"
    if name.endswith(("token_embedding", "output_head")):
        yield "vocab_size"
    if name == "text/output_head":
        yield "tie_word_embeddings"
    if "/attention/" in name:
        yield from _HEADS
    if "/gdn/" in name:
        yield from _LINEAR_HEADS
        if name.endswith("/convolution"):
            yield "linear_conv_kernel_dim"
    if "/mlp/" in name:
        yield "intermediate_size"
    if "/moe/experts/" in name:
        yield from ("num_experts", "moe_intermediate_size")
    if "/moe/shared/" in name:
        yield "shared_expert_intermediate_size"
    if name.endswith("/moe/router"):
        yield "num_experts"


def _vision_fields(name: str) -> Iterable[str]:
    yield "hidden_size"
    if "/attention/" in name:
        yield "num_heads"
    if "/mlp/" in name:
        yield "intermediate_size"
    if name == "vision/patch_embedding":
        yield from ("patch_size", "temporal_patch_size")
    if name.startswith("vision/merger/fc"):
        yield "spatial_merge_size"
    if "position_embedding" in name:
        yield "num_position_embeddings"


def _draft_block_fields(name: str) -> Iterable[str]:
    if "/attention/" in name:
        yield from _HEADS
    if "/mlp/" in name:
        yield "intermediate_size"


def _draft_fields(name: str) -> Iterable[str]:
    """Fields of ``dflash_config``."""
    if name.endswith("/feature_projection"):
        yield "target_layer_ids"
    if "conv/" in name:
        yield "conv_kernel_size"
        if name.endswith("/kernel_projection"):
            yield "conv_group_size"
    if "/candidate_selector/" in name:
        yield "selector_rank"


_FIELDS = {
    "text": _text_fields,
    "mtp": _text_fields,
    "vision": _vision_fields,
    "dflash": _draft_block_fields,
    "dflash2": _draft_block_fields,
}


def _check_topology(name: str, store: Store, component: str, actual: Config, expected: Config) -> None:
    layer = int(name.split("/")[2])
    if component == "vision":
        same = layer < actual["depth"]
    elif component == "mtp":
        same = layer == 0
    else:
        types = actual["layer_types"]
        same = layer < len(types) and types[layer] == expected["layer_types"][layer]
    if not same:
        raise ValueError(f"{name}: layer topology differs in additional source {store.path}")


def _compare(name: str, store: Store, actual: Config, expected: Config, fields: Iterable[str]) -> None:
    for field in sorted(set(fields)):
        if actual.get(field) != expected.get(field):
            raise ValueError(
                f"{name}: additional source {field} differs: "
                f"{actual.get(field)!r} in {store.path}, not {expected.get(field)!r}"
            )
