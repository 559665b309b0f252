"""Official recipes by name.

A family of recipes is a module that offers ``RECIPES``, a mapping from recipe name to ``f(model, recipe, sources)``.
Other distributions register theirs as entry points of the group ``ninferbuild.recipes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

if __name__ != "ninferbuild.recipes":
    raise ImportError(f"this package is ninferbuild.recipes; it cannot be imported as {__name__!r}")

__all__ = ["RECIPES", "RecipeFunction", "RecipeRegistry"]

BUILT_IN = (
    "ninferbuild.recipes.qwen3_5",
    "ninferbuild.recipes.qwen3_5_releases",
    "ninferbuild.recipes.qwen3_8_quasar",
    "ninferbuild.recipes.qwen3_5_gguf",
    "ninferbuild.recipes.bonsai2_ternary",
)
"""Families of this distribution; they are found whatever the installed metadata says."""

ENTRY_POINTS = "ninferbuild.recipes"

RecipeFunction = Callable[[Any, Any, Any], Any]
"""``f(model, recipe, sources)``; the return value is ignored."""


class RecipeRegistry(Mapping[str, RecipeFunction]):
    """Recipe name → recipe. Families are imported in their order until one has the recipe, registered ones last."""

    @staticmethod
    def _families() -> Iterator[Mapping[str, RecipeFunction]]:
        return (import_module(name).RECIPES for name in BUILT_IN)

    @cached_property
    def _registered(self) -> dict[str, RecipeFunction]:
        from importlib.metadata import entry_points

        recipes: dict[str, RecipeFunction] = {}
        for entry in entry_points(group=ENTRY_POINTS):
            try:
                family: Mapping[str, RecipeFunction] = entry.load().RECIPES
            except Exception as error:
                raise ImportError(f"recipe family {entry.name} ({entry.value}) cannot be loaded: {error}") from error
            for name, function in family.items():
                recipes.setdefault(name, function)
        return recipes

    def __getitem__(self, name: str) -> RecipeFunction:
        for family in self._families():
            if name in family:
                return family[name]
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for family in (*self._families(), self._registered) for name in family))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<official recipes: {', '.join(self)}>"


RECIPES: Mapping[str, RecipeFunction] = RecipeRegistry()
"""Name → recipe."""
