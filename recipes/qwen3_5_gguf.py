"""Official recipes that keep the blocks of a GGUF export of the Qwen3.5 family.

Text and MTP come from ``--source gguf=FILE.gguf``, Vision from ``--source vision=…`` (an mmproj file or a Safetensors
checkpoint), drafts from their own sources; of the base checkpoint only configuration and resources are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ninferbuild.models.bulk import collection_paused
from ninferbuild.recipes import components
from ninferbuild.recipes.gguf_checks import header_of, require_header, require_negative, require_tensors
from ninferbuild.recipes.gguf_geometry import QWEN_27B, QWEN_35B_A3B, Experts, Geometry
from ninferbuild.recipes.gguf_import import Importer
from ninferbuild.recipes.gguf_tensors import NEXTN_PROJECTION, Kind, block_prefix, mtp_tensors, text_tensors
from ninferbuild.recipes.gguf_vision import vision_store
from ninferbuild.recipes.qwen3_5 import require_dense, require_moe
from ninferbuild.sources.ggml_types import BF16, DIRECT_TYPES, F32, GGML_TYPES

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe
    from ninferbuild.recipes import RecipeFunction
    from ninferbuild.sources.gguf import GGUFFile

Sources = Mapping[str, Any]

_BLOCK_TYPES = frozenset(kind.id for kind in GGML_TYPES.values() if kind.format is not None)
_TYPES = {
    Kind.MATRIX: _BLOCK_TYPES,
    Kind.VECTOR: frozenset({F32.id}),
    Kind.CONTROL: _BLOCK_TYPES | DIRECT_TYPES.keys(),
    Kind.ROUTING: frozenset({F32.id, BF16.id}),
}


def qwen3_8_27b_gguf(model: Model, recipe: Recipe, sources: Sources) -> None:
    """The blocks of a Qwen3.5, Qwen3.6 or Qwen3.8 27B GGUF as they are; Vision in Q4 to Q8."""
    dense_blocks(model, recipe, sources, QWEN_27B)


def qwen3_6_35b_a3b_gguf(model: Model, recipe: Recipe, sources: Sources) -> None:
    """The blocks of a Qwen3.5 or Qwen3.6 35B-A3B GGUF as they are; Vision in BF16."""
    mixture_blocks(model, recipe, sources, QWEN_35B_A3B)


def dense_blocks(model: Model, recipe: Recipe, sources: Sources, geometry: Geometry) -> None:
    """The recipe for a dense model of any geometry.

    Raises:
        ValueError: the model or the file has another geometry, the file is no whole export, or a source is missing.
    """
    require_dense(model)
    _import(model, recipe, sources, geometry)
    if "vision" in model.components:
        components.vision(model, recipe)


def mixture_blocks(model: Model, recipe: Recipe, sources: Sources, geometry: Geometry) -> None:
    """The recipe for a mixture of experts of any geometry; files with fewer experts are taken as the model says.

    Raises:
        ValueError: as :func:`dense_blocks`.
    """
    require_moe(model)
    if isinstance(geometry.feed_forward, Experts):
        experts = replace(geometry.feed_forward, count=model.config["num_experts"])
        geometry = replace(geometry, feed_forward=experts)
    _import(model, recipe, sources, geometry)


@collection_paused()
def _import(model: Model, recipe: Recipe, sources: Sources, geometry: Geometry) -> None:
    require_geometry(model, geometry)
    gguf = _opened(sources)
    mtp = "mtp" in model.components
    _check(gguf, geometry, mtp=mtp)
    importer = Importer(model, recipe, gguf, geometry)
    importer.text()
    if mtp:
        importer.mtp()
    if "vision" in model.components:
        store = vision_store(sources["vision"], model.components["vision"]["config"])
        for name in model.parameters:
            if name.startswith("vision/"):
                recipe.assign(name, source=model.source(name, store))
    components.drafts(model, recipe)
    _require_complete(model, importer.assigned)


def require_geometry(model: Model, geometry: Geometry) -> None:
    """Raises ``ValueError`` unless the model's configuration has the sizes of ``geometry``."""
    feed_forward = geometry.feed_forward
    expected: dict[str, Any] = {
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "vocab_size": geometry.vocabulary,
        "num_attention_heads": geometry.attention_heads,
        "num_key_value_heads": geometry.key_value_heads,
        "head_dim": geometry.attention_dim,
        "linear_num_key_heads": geometry.key_heads,
        "linear_key_head_dim": geometry.gdn_dim,
        "linear_num_value_heads": geometry.value_heads,
        "linear_value_head_dim": geometry.gdn_dim,
        "linear_conv_kernel_dim": geometry.taps,
    }
    if isinstance(feed_forward, Experts):
        expected["moe_intermediate_size"] = feed_forward.width
        expected["shared_expert_intermediate_size"] = feed_forward.shared_width
    else:
        expected["intermediate_size"] = feed_forward
    for key, value in expected.items():
        if model.config.get(key) != value:
            raise ValueError(
                f"this recipe requires the {geometry.label} geometry: {key} is {model.config.get(key)} in the model's "
                f"config.json, expected {value}"
            )
    for layer, kind in enumerate(model.config["layer_types"]):
        if (kind == "full_attention") != geometry.full_attention(layer):
            raise ValueError(f"this recipe requires the {geometry.label} geometry: layer {layer} must not be {kind}")


def _opened(sources: Sources) -> GGUFFile:
    from ninferbuild.sources.gguf import GGUFFile

    gguf = sources["gguf"]
    if not isinstance(gguf, GGUFFile):
        raise ValueError(f"--source gguf must name the model's .gguf file, not {gguf.path}")
    return gguf


def _check(gguf: GGUFFile, geometry: Geometry, *, mtp: bool) -> None:
    """Raises ``ValueError`` unless the file is a whole export of the model, with the MTP block where it is needed."""
    expected = header_of(geometry)
    require_header(gguf, expected)
    block, has_mtp = block_prefix(geometry.layers), False
    tensors = text_tensors(geometry)
    if block + NEXTN_PROJECTION in gguf.tensors:
        has_mtp = True
        tensors |= mtp_tensors(geometry)
    key = f"{expected['general.architecture']}.block_count"
    if gguf.kv.get(key) != geometry.layers and not (has_mtp and gguf.kv.get(key) == geometry.layers + 1):
        require_header(gguf, {key: geometry.layers + has_mtp})
    require_tensors(gguf, tensors, _TYPES)
    if mtp and not has_mtp:
        raise ValueError(
            f"{gguf.path}: component mtp needs {block}nextn.*, which this file does not hold; "
            "use an -mtp GGUF, or leave mtp out of the components"
        )
    for layer in range(geometry.layers):
        if not geometry.full_attention(layer):
            require_negative(gguf, f"{block_prefix(layer)}ssm_a")


def _require_complete(model: Model, assigned: set[str]) -> None:
    left = [name for name in model.parameters if name.startswith(("text/", "mtp/")) and name not in assigned]
    if left:
        raise ValueError(f"the GGUF holds no tensor for {', '.join(left[:5])}{', …' if len(left) > 5 else ''}")


RECIPES: dict[str, RecipeFunction] = {
    function.__name__: function for function in (qwen3_8_27b_gguf, qwen3_6_35b_a3b_gguf)
}
