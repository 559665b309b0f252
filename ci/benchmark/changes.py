"""Overrides that change one layer of a target: what a user would edit between two builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ninferbuild.sources.logical import select_rows

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe

LAYER = "text/layers/0/"
DIRECT = ("bf16", "fp32", "int32")


def _quantized(recipe: Recipe) -> list[str]:
    return [name for name in recipe.match(f"{LAYER}*") if recipe.selections[name][0].format not in DIRECT]


def method(model: Model, recipe: Recipe, sources: Mapping[str, Any]) -> None:
    """Same formats, shapes and groups, other results: stands for another parameter of the layer's method.

    The quantised matrices are read from their second row on, with the first row last. Like a changed parameter, that
    gives their actions new keys and every payload new bytes, and moves no object.
    """
    for name in _quantized(recipe):
        source = recipe.selections[name][0].source
        rows = source.shape[0]
        recipe.assign(name, source=select_rows(source, [(1, rows), (0, 1)]))


def format(model: Model, recipe: Recipe, sources: Mapping[str, Any]) -> None:
    """The layer's quantised matrices in 8 bits."""
    recipe.assign(_quantized(recipe), format="q8_g32_fp16")
