"""What every Qwen3.5 recipe does with the optional components: Vision, MTP and the draft models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ninferbuild.recipes.formats import Q4, Q5, Q6, Q8

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe

_VISION_Q4 = ("/attention/query", "/attention/key", "/attention/value", "/mlp/fc1")
_SENSITIVE = (
    "/moe/router",
    "/moe/shared_score",
    "/attention_conv/kernel_projection",
    "/mlp_conv/kernel_projection",
    "/candidate_selector/hidden_projection",
)
"""Small projections whose errors steer everything after them."""


def projections(model: Model, prefix: str | tuple[str, ...] = "") -> list[str]:
    """Names of the parameters below ``prefix`` that multiply an input, in model order."""
    parameters = model.parameters
    return [name for name in parameters if name.startswith(prefix) and parameters[name].inputs]


def quantize(recipe: Recipe, names: Iterable[str], choose: Callable[[str], str | None]) -> None:
    """Quantise each of ``names`` with ``grouped_absmax`` to the format that ``choose`` gives; None leaves it."""
    chosen: dict[str, list[str]] = {}
    for name in names:
        format = choose(name)
        if format is not None:
            chosen.setdefault(format, []).append(name)
    for format, members in chosen.items():
        recipe.assign(members, format=format, method="grouped_absmax")


def optional_components(model: Model, recipe: Recipe) -> None:
    """Quantise the optional components that the model has, and share the drafts' context keys and values."""
    vision(model, recipe)
    quantize(recipe, projections(model, "mtp/"), _format)
    drafts(model, recipe)


def vision(model: Model, recipe: Recipe) -> None:
    """Quantise the projections of Vision."""
    quantize(recipe, projections(model, "vision/"), _format)


def drafts(model: Model, recipe: Recipe) -> None:
    """Quantise the draft models, and let context keys and values use the matrices of their keys and values."""
    quantize(recipe, projections(model, ("dflash/", "dflash2/")), _format)
    for draft in ("dflash", "dflash2"):
        if draft not in model.components or any(taken.component.name == draft for taken in recipe.grafts):
            continue
        for layer in range(len(model.components[draft]["config"]["layer_types"])):
            attention = f"{draft}/layers/{layer}/attention/"
            for role in ("key", "value"):
                recipe.share(f"{attention}context_{role}", attention + role)


def _format(name: str) -> str | None:
    if not name.startswith("vision/"):
        return None if name.endswith(_SENSITIVE) else Q8
    if name == "vision/patch_embedding":
        return Q6
    if name.startswith("vision/merger/"):
        return Q8
    return Q4 if name.endswith(_VISION_Q4) else Q5
