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
    """Recipe name → recipe. Families are imported when a recipe is first looked up, registered ones when it is new."""

    @cached_property
    def _built_in(self) -> dict[str, RecipeFunction]:
        families = [import_module(name).RECIPES for name in BUILT_IN]
        return {name: function for family in families for name, function in family.items()}

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
        return self._built_in[name] if name in self._built_in else self._registered[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from (name for name in self._registered if name not in self._built_in)

    def __len__(self) -> int:
        return len(self._built_in.keys() | self._registered.keys())

    def __repr__(self) -> str:
        return f"<official recipes: {', '.join(self)}>"


RECIPES: Mapping[str, RecipeFunction] = RecipeRegistry()
"""Name → recipe."""
