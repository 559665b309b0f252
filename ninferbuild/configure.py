"""From a target to a configured recipe: open the checkpoint, build the model, run the recipe functions in order.

Only headers and scalars are read. ``import torch`` in a recipe file costs nothing until torch is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ninferbuild import models, user_modules
from ninferbuild.artifact.formats import get_format
from ninferbuild.recipe import Recipe
from ninferbuild.recipe_file import RecipeFunction, UnknownRecipeError, load
from ninferbuild.sources.opened import Sources
from ninferbuild.target_schema import OptionError, Origin

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipes.proposal import AddedProposal
    from ninferbuild.target import Target


@dataclass(frozen=True, slots=True)
class Configured:
    """A target's model and recipe, ready to be planned.

    Attributes:
        sources: stay open as long as values are read.
        recipe_reference: official name or ``file.py:function``.
        ranking: file of token counts behind the proposal head.
    """

    target: Target
    model: Model
    recipe: Recipe
    sources: Sources
    recipe_reference: str
    override_references: tuple[str, ...]
    ranking: Path | None


@contextmanager
def configured(target: Target) -> Iterator[Configured]:
    """Configure ``target``; on leaving, its sources are closed and its recipe modules forgotten.

    Raises:
        ValueError, TypeError, OSError, ImportError: the checkpoint, a source or a recipe is unsuitable.
    """
    with ExitStack() as stack:
        _check_grafts(target)
        sources = stack.enter_context(Sources(target.model, target.sources, target.grafts))
        base = sources["base"]
        try:
            model = models.build(
                base, components=target.components, resource_overrides=target.resources, sources=sources
            )
        except models.ComponentsError as error:
            raise OptionError(f"{target.origin / 'components'}: {error}") from error
        recipe = Recipe(model)
        stack.callback(user_modules.purge)
        loaded = _load(target.recipe, target.origin / "recipe")
        loaded(model, recipe, sources)
        for component in target.grafts:
            recipe.graft(component, sources[component])
        ranking, proposal = _add_proposal(target, recipe)
        overrides = []
        for reference in target.overrides:
            override = _load(reference, target.origin / "overrides")
            override(model, recipe, sources)
            overrides.append(override.reference)
        if proposal is not None:
            proposal.follow_output_head(recipe)
        for assign in target.assigns:
            try:
                if assign.format is not None:
                    get_format(assign.format)
                recipe.assign(assign.select, **assign.arguments())
            except (ValueError, TypeError) as error:
                raise OptionError(f"{assign.origin}: {error}" if assign.origin else str(error)) from error
        yield Configured(target, model, recipe, sources, loaded.reference, tuple(overrides), ranking)


def _load(reference: str, origin: Origin) -> RecipeFunction:
    try:
        return load(reference)
    except UnknownRecipeError as error:
        raise UnknownRecipeError(f"{origin}: {error}") from None


def _check_grafts(target: Target) -> None:
    """Refuse what would give a component twice."""
    for component, path in target.grafts.items():
        origin = target.origin / "grafts" / component
        if component in target.sources:
            raise OptionError(f"{origin}: there is a source of this name; give one of them")
        if component in (target.components or ("text",)):
            raise OptionError(f"{origin}: the component is built from the checkpoint; leave it out of the components")
        if os.path.realpath(path) == os.path.realpath(target.out):
            raise OptionError(f"{origin}: {path} is the output too; choose another output")


def _add_proposal(target: Target, recipe: Recipe) -> tuple[Path | None, AddedProposal | None]:
    if target.proposal is None:
        return None, None
    from ninferbuild.recipes.proposal import add_official_proposal, find_ranking

    ranking = find_ranking(target.proposal.ranking, recipe.model.root)
    return ranking, add_official_proposal(recipe, ranking=ranking, rows=target.proposal.rows)
