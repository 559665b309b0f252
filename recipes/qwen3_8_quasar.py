"""Recipes for QUASAR releases of Qwen3.8 27B: text in NVFP4, with a DFlash2 draft taken from another artifact.

The release is a compressed-tensors checkpoint in which every linear layer of the text model is NVFP4, and embedding,
head, vision and MTP are BF16. It is the base checkpoint here: there is no second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ninferbuild.models.resources import require_added_tokens
from ninferbuild.recipes.formats import NVFP4, Q8
from ninferbuild.recipes.qwen3_5 import GDN_GATES, HEAD, import_rows, require_dense

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe
    from ninferbuild.recipes import RecipeFunction

Sources = Mapping[str, Any]

DRAFT = "dflash2"

_MTP_BLOCK = "mtp/layers/0/"
MTP_CACHED = (f"{_MTP_BLOCK}attention/key", f"{_MTP_BLOCK}attention/value")
"""Projections that a fused operation takes as a pair, in Q8 only."""

MTP_OTHERS = (
    "mtp/input_projection",
    *(f"{_MTP_BLOCK}attention/{role}" for role in ("query", "gate", "output")),
    *(f"{_MTP_BLOCK}mlp/{role}" for role in ("gate", "up", "down")),
)


def qwen3_8_27b_quasar(model: Model, recipe: Recipe, sources: Sources) -> None:
    """NVFP4 text as a QUASAR checkpoint holds it, Q8 head and MTP, and the draft of the artifact ``dflash2``."""
    _quasar(model, recipe, sources, (*MTP_CACHED, *MTP_OTHERS))


def qwen3_8_27b_quasar_kv(model: Model, recipe: Recipe, sources: Sources) -> None:
    """As ``qwen3_8_27b_quasar``, with all of MTP in BF16 but the keys and values of its attention."""
    _quasar(model, recipe, sources, MTP_CACHED)


def _quasar(model: Model, recipe: Recipe, sources: Sources, mtp: tuple[str, ...]) -> None:
    require_dense(model)
    require_added_tokens(model.resources)
    store = sources["base"]
    in_q8 = [HEAD, *(name for name in mtp if name in model.parameters)]
    recipe.assign(in_q8, format=Q8, method="grouped_absmax")
    for name, parameter in model.parameters.items():
        # Gates of the delta net are NVFP4 too, but too few rows for a tile: they keep their decoded values, in BF16.
        if name.startswith("text/layers/") and parameter.projection and not name.endswith(GDN_GATES):
            import_rows(model, recipe, store, name, NVFP4, "AllowA4")
    recipe.graft(DRAFT, sources[DRAFT])
    # The proposal head, which comes later, reads the draft's states as well, with 16-bit activations.
    recipe.add_input(HEAD, f"{DRAFT}/final_hidden", activation_policy="AllowA8")


RECIPES: dict[str, RecipeFunction] = {
    function.__name__: function for function in (qwen3_8_27b_quasar, qwen3_8_27b_quasar_kv)
}
