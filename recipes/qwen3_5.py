"""Official recipes of the Qwen3.5 family: Qwen3.6 27B, Qwen3.8 27B and Qwen3.6 35B-A3B.

Layer numbers in here are properties of the released checkpoints, not of the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ninferbuild.recipes.components import optional_components, projections, quantize
from ninferbuild.recipes.formats import FP8, NVFP4, Q4, Q5, Q6, Q8

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe
    from ninferbuild.recipes import RecipeFunction

Sources = Mapping[str, Any]

EMBEDDING = "text/token_embedding"
HEAD = "text/output_head"
LAYERS = "text/layers/"

GDN_GATES = ("/gdn/a_projection", "/gdn/b_projection")
"""Decay and write gates of the delta net: a few rows each, always BF16."""

ROUTING = ("/moe/router", "/moe/shared_score")
"""What decides which experts a token goes to: BF16 too."""

_DENSE_Q4 = ("/attention/query", "/attention/key", "/gdn/query", "/gdn/key", "/mlp/gate", "/mlp/up")
_DENSE_MLP = ("/mlp/gate", "/mlp/up")
_RESIDUAL = ("/attention/output", "/gdn/output", "/mlp/down")
_FIRST_LATE_LAYER = 36
_LATE_EXPERT_LAYERS = frozenset({34, 38, 39})
_BF16_ATTENTION_LAYERS = range(24)
NVFP4_MLP_LAYERS = range(56)
"""Layers whose feed-forward the mixed NVFP4 and FP8 releases of Qwen3.8 hold in NVFP4; later ones are FP8."""


def require_dense(model: Model) -> None:
    """Raises ``ValueError`` for a mixture-of-experts model."""
    if "num_experts" in model.config:
        raise ValueError(
            "this official recipe requires Qwen3.5 Dense mathematics, but the model is a mixture of experts"
        )


def require_moe(model: Model) -> None:
    """Raises ``ValueError`` for a dense model."""
    if "num_experts" not in model.config:
        raise ValueError("this official recipe requires Qwen3.5 MoE mathematics; the model is dense")


def layer_of(name: str) -> int:
    """The text layer of a parameter; −1 for one outside the layers."""
    return int(name.split("/", 3)[2]) if name.startswith(LAYERS) else -1


def qwen3_6_27b(model: Model, recipe: Recipe, sources: Sources) -> None:
    """Q4 and Q5 text, Q6 embedding and head."""
    _dense(model, recipe, vocabulary=Q6)


def qwen3_8_27b(model: Model, recipe: Recipe, sources: Sources) -> None:
    """Q4 and Q5 text, Q8 embedding and head."""
    _dense(model, recipe, vocabulary=Q8)


def qwen3_8_27b_q6(model: Model, recipe: Recipe, sources: Sources) -> None:
    """As ``qwen3_8_27b``, with gate and up projections of the feed-forward in Q6."""
    _dense(model, recipe, vocabulary=Q8, mlp=Q6)


def _dense(model: Model, recipe: Recipe, *, vocabulary: str, mlp: str = Q4) -> None:
    require_dense(model)
    optional_components(model, recipe)
    recipe.assign([EMBEDDING, HEAD], format=vocabulary, method="grouped_absmax")

    def choose(name: str) -> str | None:
        if name.endswith(GDN_GATES):
            return None
        if name.endswith(_DENSE_MLP):
            return mlp
        return Q4 if name.endswith(_DENSE_Q4) else Q5

    layers = projections(model, LAYERS)
    _separate_gates(recipe, layers)
    quantize(recipe, layers, choose)


def _separate_gates(recipe: Recipe, names: list[str]) -> None:
    gates = [name for name in names if name.endswith(GDN_GATES)]
    if gates:
        recipe.separate(gates)


def qwen3_8_27b_imatrix(model: Model, recipe: Recipe, sources: Sources) -> None:
    """Searched Q4 and Q5 text, weighed by the importance vectors of ``imatrix``; late layers give up a bit."""
    require_dense(model)
    optional_components(model, recipe)
    parameters = {"imatrix": str(sources["imatrix"].path), "negative_scales": True}

    def search(names: str | list[str], format: str) -> None:
        recipe.assign(names, format=format, method="grouped_search", parameters=parameters)

    search(EMBEDDING, Q4)
    search(HEAD, Q6)
    layers = projections(model, LAYERS)
    _separate_gates(recipe, layers)
    quantized = [name for name in layers if not name.endswith(GDN_GATES)]
    four_bits = {name for name in quantized if name.endswith(_DENSE_Q4) or _late_output(name)}
    search([name for name in quantized if name in four_bits], Q4)
    search([name for name in quantized if name not in four_bits], Q5)


def _late_output(name: str) -> bool:
    """Whether a projection adds to the residual stream of a layer that the search stores in four bits."""
    return name.endswith(_RESIDUAL) and layer_of(name) >= _FIRST_LATE_LAYER


def qwen3_6_35b_a3b(model: Model, recipe: Recipe, sources: Sources) -> None:
    """Q4 and Q5 experts (Q6 in three late layers), Q8 for what every token passes through."""
    require_moe(model)
    optional_components(model, recipe)
    recipe.assign(EMBEDDING, format=Q8, method="grouped_absmax")
    recipe.assign(HEAD, format=Q6, method="grouped_absmax")

    unquantised = GDN_GATES + ROUTING

    def choose(name: str) -> str | None:
        if name.endswith(unquantised):
            return None
        if "/moe/experts/" not in name:
            return Q8
        if not name.endswith("/down"):
            return Q4
        return Q6 if layer_of(name) in _LATE_EXPERT_LAYERS else Q5

    quantize(recipe, projections(model, LAYERS), choose)


def qwen3_6_27b_nvfp4(model: Model, recipe: Recipe, sources: Sources) -> None:
    """NVFP4 text layers imported from ``quantized``; early attention stays BF16, embedding and head are Q8."""
    require_dense(model)
    optional_components(model, recipe)
    quantized = sources["quantized"]
    recipe.assign([EMBEDDING, HEAD], format=Q8, method="grouped_absmax")
    layers = projections(model, LAYERS)
    _separate_gates(recipe, layers)
    for name in layers:
        if not name.endswith(GDN_GATES) and not _bf16_in_nvfp4_release(name):
            import_rows(model, recipe, quantized, name, NVFP4, "AllowA4")


def _bf16_in_nvfp4_release(name: str) -> bool:
    """Whether the Qwen3.6 NVFP4 release keeps this projection in BF16."""
    layer = layer_of(name)
    if "/attention/" in name and not name.endswith("/output"):
        return layer in _BF16_ATTENTION_LAYERS
    return (name.endswith("/attention/output") and layer in (3, 7)) or (name.endswith("/gdn/output") and layer == 4)


def qwen3_8_27b_nvfp4(model: Model, recipe: Recipe, sources: Sources) -> None:
    """All text but the embedding from ``quantized``: NVFP4 feed-forwards, FP8 attention, late layers and head."""
    require_dense(model)
    optional_components(model, recipe)
    quantized = sources["quantized"]
    recipe.assign(EMBEDDING, format=FP8, method="fp8_row_maxabs")
    for name, parameter in model.parameters.items():
        if not name.startswith("text/") or name == EMBEDDING:
            continue
        if not parameter.projection or name.endswith(GDN_GATES):
            recipe.assign(name, source=model.source(name, quantized))
        elif "/mlp/" in name and layer_of(name) in NVFP4_MLP_LAYERS:
            import_rows(model, recipe, quantized, name, NVFP4, "AllowA4")
        else:
            import_rows(model, recipe, quantized, name, FP8, "AllowA8")


def import_rows(model: Model, recipe: Recipe, store: Any, name: str, format: str, policy: str) -> None:
    """Take the parameter's encoded rows from ``store`` as they are."""
    recipe.assign(
        name,
        format=format,
        method="import_encoded",
        source=model.source(name, store, format),
        activation_policy=policy,
    )


RECIPES: dict[str, RecipeFunction] = {
    function.__name__: function
    for function in (
        qwen3_6_27b,
        qwen3_8_27b,
        qwen3_6_35b_a3b,
        qwen3_6_27b_nvfp4,
        qwen3_8_27b_nvfp4,
        qwen3_8_27b_q6,
        qwen3_8_27b_imatrix,
    )
}
