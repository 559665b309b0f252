"""Bindings: where the elements of each logical parameter are stored."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.recipe import Recipe

WEIGHT = "weight/"
"""How the ids of objects that actions make begin; in a directory they follow each other in the order of the actions."""

AUXILIARY = "auxiliary/"
"""How the ids of objects that uses refer to begin; those of grafted components go by other names."""

Binding = dict[str, Any]
"""``{"object": id}`` for a whole object, else ``{"parts": [{"object": id, "range": [first, last]}, …]}``."""


class Fragment(msgspec.Struct, frozen=True):
    """Elements ``[first, last)`` of a parent: they are the parameter's elements from ``begin`` on."""

    parameter: str
    begin: int
    first: int
    last: int


_Place = tuple[int, Fragment, "TensorSpec"]
"""First element of a parameter that a fragment holds, the fragment, and the parent it lies in."""


_NOWHERE: Binding = {}
"""Stands for a binding that is not known yet."""


def bindings_of(recipe: Recipe, parents: Iterable[tuple[TensorSpec, Iterable[Fragment]]]) -> dict[str, Binding]:
    """The bindings of all parameters in recipe order; aliases follow the parameters that own their storage.

    Raises:
        ValueError: the fragments of a parameter do not cover it exactly.
    """
    parameters = recipe.model.parameters
    bindings: dict[str, Binding] = dict.fromkeys(recipe.selections, _NOWHERE)
    for name in recipe.aliases:
        bindings.pop(name, None)
    others: dict[str, list[_Place]] = {}
    for target, fragments in parents:
        identifier = target.id
        for fragment in fragments:
            name, begin, first, last = fragment.parameter, fragment.begin, fragment.first, fragment.last
            shape = parameters[name].shape
            if begin or last - first != prod(shape) or bindings[name] is not _NOWHERE:
                others.setdefault(name, []).append((begin, fragment, target))
            elif first or target.shape != shape:  # as nearly always: one fragment, and all of it
                bindings[name] = {"parts": [{"object": identifier, "range": [first, last]}]}
            else:
                bindings[name] = {"object": identifier}
    for name, binding in bindings.items():
        if binding is _NOWHERE:
            bindings[name] = _joined(name, parameters[name].shape, others.pop(name, []))
    for name in others:  # what is stored whole is stored somewhere else too
        raise ValueError(f"{name}: incomplete logical coverage at element {prod(parameters[name].shape)}")
    for name in recipe.aliases:
        bindings[name] = _copied(bindings[recipe.resolve(name)])
    return bindings


def _joined(name: str, shape: tuple[int, ...], stored: list[_Place]) -> Binding:
    """The binding of a parameter that lies in several places."""
    stored.sort(key=lambda place: place[0])
    cursor = 0
    for begin, fragment, _ in stored:
        if begin != cursor:
            raise ValueError(f"{name}: incomplete logical coverage at element {cursor}")
        cursor += fragment.last - fragment.first
    if cursor != prod(shape):
        raise ValueError(f"{name}: coverage size is incorrect: {cursor} of {prod(shape)} elements")
    return {"parts": [{"object": target.id, "range": [part.first, part.last]} for _, part, target in stored]}


def _copied(binding: Binding) -> Binding:
    if "object" in binding:
        return dict(binding)
    return {"parts": [{"object": part["object"], "range": list(part["range"])} for part in binding["parts"]]}
