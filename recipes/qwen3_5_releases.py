"""Official recipes for quantised releases of the Qwen3.5 family: NVFP4 and FP8 words are imported as they are.

``docs/from-a-quantised-release.md`` says which recipe belongs to which release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ninferbuild.models.resources import require_added_tokens
from ninferbuild.recipes.components import optional_components, projections, quantize
from ninferbuild.recipes.formats import FP8, NVFP4, Q6, Q8
from ninferbuild.recipes.qwen3_5 import (
    EMBEDDING,
    GDN_GATES,
    HEAD,
    LAYERS,
    NVFP4_MLP_LAYERS,
    ROUTING,
    import_rows,
    layer_of,
    require_dense,
    require_moe,
)
from ninferbuild.sources.compressed_tensors import compressed_matrix_source

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe
    from ninferbuild.recipes import RecipeFunction
    from ninferbuild.sources.logical import LogicalSource

Sources = Mapping[str, Any]

_ROOTS = ("model.language_model.layers.", "model.layers.")
_EXPERTS = ("/moe/experts/", "/moe/shared/")
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def qwen3_8_27b_nvfp4_nvidia(model: Model, recipe: Recipe, sources: Sources) -> None:
    """All text but the embedding from a ModelOpt ``quantized``: NVFP4 feed-forwards, FP8 attention, an FP8 head.

    The release holds its head in NVFP4, which has no vocabulary kernel: its decoded values become row-scaled FP8.
    """
    require_dense(model)
    optional_components(model, recipe)
    quantized = sources["quantized"]
    require_added_tokens(model.resources)
    recipe.assign(EMBEDDING, format=FP8, method="fp8_row_maxabs")
    for name, parameter in model.parameters.items():
        if not name.startswith("text/") or name == EMBEDDING:
            continue
        if name == HEAD:
            source = model.source(name, quantized)
            recipe.assign(name, format=FP8, method="fp8_row_maxabs", source=source, activation_policy="AllowA8")
        elif not parameter.projection or name.endswith(GDN_GATES):
            recipe.assign(name, source=model.source(name, quantized))
        elif "/mlp/" in name:
            import_rows(model, recipe, quantized, name, NVFP4, "AllowA4")
        else:
            import_rows(model, recipe, quantized, name, FP8, "AllowA8")


def qwen3_8_27b_nvfp4_orcarouter(model: Model, recipe: Recipe, sources: Sources) -> None:
    """Text projections from ``quantized``: NVFP4 feed-forwards of the first layers, FP8 for the rest.

    Embedding and head are row-scaled FP8 of the base checkpoint, and norms stay its own.
    """
    require_dense(model)
    optional_components(model, recipe)
    quantized = sources["quantized"]
    require_added_tokens(model.resources)
    recipe.assign([EMBEDDING, HEAD], format=FP8, method="fp8_row_maxabs")
    for name in projections(model, LAYERS):
        if name.endswith(GDN_GATES):
            recipe.assign(name, source=model.source(name, quantized))
        elif "/mlp/" in name and layer_of(name) in NVFP4_MLP_LAYERS:
            import_rows(model, recipe, quantized, name, NVFP4, "AllowA4")
        else:
            import_rows(model, recipe, quantized, name, FP8, "AllowA8")


def qwen3_6_35b_a3b_nvfp4(model: Model, recipe: Recipe, sources: Sources) -> None:
    """NVFP4 experts imported from ``quantized`` as stacks, one divisor a matrix; all else as ``qwen3_6_35b_a3b``."""
    require_moe(model)
    quantized = sources["quantized"]
    require_added_tokens(model.resources)
    optional_components(model, recipe)
    recipe.assign(EMBEDDING, format=Q8, method="grouped_absmax")
    recipe.assign(HEAD, format=Q6, method="grouped_absmax")
    layers = projections(model, LAYERS)
    experts = [name for name in layers if _is_expert(name)]
    left = set(experts)
    quantize(recipe, layers, lambda name: None if name in left or name.endswith(GDN_GATES + ROUTING) else Q8)
    for name in experts:
        recipe.assign(
            name,
            format=NVFP4,
            method="import_encoded",
            source=_expert_source(quantized, name, model.parameters[name].shape),
            activation_policy="AllowA4",
        )
    for names in model.packing_groups:
        if all(name.startswith(LAYERS) and _is_expert(name) for name in names):
            recipe.group(names)


def _is_expert(name: str) -> bool:
    return any(part in name for part in _EXPERTS)


def _expert_source(store: Any, name: str, shape: tuple[int, ...]) -> LogicalSource:
    """The NVFP4 matrix of one routed or shared expert, which a release stores apart from all others.

    Raises:
        ValueError: the store has no such matrix.
    """
    _, _, layer, rest = name.split("/", 3)
    *owner, role = rest.removeprefix("moe/").split("/")  # experts/{e} or shared
    if role not in _PROJECTIONS:
        raise ValueError(f"{name}: unknown expert matrix {role!r}")
    place = "shared_expert" if owner == ["shared"] else ".".join(owner)
    leaf = f"mlp.{place}.{_PROJECTIONS[role]}"
    for root in _ROOTS:
        prefix = f"{root}{layer}.{leaf}"
        if store.has(f"{prefix}.weight_packed"):
            return compressed_matrix_source(store, prefix, (shape[0], shape[1]), NVFP4)
    raise ValueError(
        f"{name}: no NVFP4 source for {leaf} in {store.path}: "
        f"there is no {' or '.join(f'{root}{layer}.{leaf}.weight_packed' for root in _ROOTS)}"
    )


RECIPES: dict[str, RecipeFunction] = {
    function.__name__: function
    for function in (qwen3_6_35b_a3b_nvfp4, qwen3_8_27b_nvfp4_nvidia, qwen3_8_27b_nvfp4_orcarouter)
}
