"""Official recipes by name.

A family of recipes is a module named by an entry point of the group ``ninferbuild.recipes`` that offers ``RECIPES``,
a mapping from recipe name to ``f(model, recipe, sources)``. The built-in families are registered that way too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

if __name__ != "ninferbuild.recipes":
    raise ImportError(f"this package is ninferbuild.recipes; it cannot be imported as {__name__!r}")

__all__ = ["RECIPES", "RecipeFunction"]

ENTRY_POINTS = "ninferbuild.recipes"

RecipeFunction = Callable[[Any, Any, Any], Any]
"""``f(model, recipe, sources)``; the return value is ignored."""


class _Registry(Mapping[str, RecipeFunction]):
    """Loads the families when a recipe is first looked up."""

    @cached_property
    def _recipes(self) -> dict[str, RecipeFunction]:
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
        return self._recipes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)

    def __repr__(self) -> str:
        return f"<official recipes: {', '.join(self)}>"


RECIPES: Mapping[str, RecipeFunction] = _Registry()
"""Name → recipe."""
