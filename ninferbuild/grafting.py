"""Components that a recipe takes from another artifact: their objects as parents, and what the directory says of them.

Objects keep shape, format, layout and bytes; they get ids of their own behind those of the recipe's weights, and every
reference follows.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.schema import TensorObject, TensorSpec
from ninferbuild.bindings import WEIGHT, Binding, Fragment
from ninferbuild.method import MethodInput, PrepareRequest
from ninferbuild.rules.graft import StoredObject, graft
from ninferbuild.sources.artifact import ArtifactSource, StoredComponent, renamed_binding

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.rules.rule import RuleCheck

FIRST_ID = 100_000
"""Number of the first grafted object."""

_STATES = ("hidden_size", "vocab_size")
"""Of the configuration of a component: sizes of the states and the tokens that another one reads of it."""

_BLOCK = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Likewise: sizes of one block, for a component that repeats it."""


@dataclass(frozen=True, slots=True)
class Grafted:
    """A component of another artifact, chosen by a recipe."""

    source: ArtifactSource
    component: StoredComponent


@dataclass(frozen=True, slots=True)
class GraftedObject:
    """One object of a grafted component.

    Attributes:
        parameters: names of the parameters that it holds; of an auxiliary its use.
        fragments: which of its elements those are.
    """

    request: PrepareRequest
    checked: RuleCheck
    parameters: tuple[str, ...]
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class GraftedPlan:
    """What grafts add to an artifact."""

    objects: tuple[GraftedObject, ...]
    bindings: dict[str, Binding]
    uses: tuple[dict[str, Any], ...]


def graft_of(name: str, source: object, model: Model) -> Grafted:
    """Check that the component ``name`` of an artifact suits ``model``, and add its record and resources there.

    Raises:
        TypeError: ``source`` is no opened file at all.
        ValueError: it is no artifact; or see :meth:`ninferbuild.recipe.Recipe.graft`.
    """
    if not isinstance(source, ArtifactSource):
        if path := getattr(source, "path", None):
            raise ValueError(
                f"component {name!r} is taken from an artifact, and {path} is none; pass --source {name}=FILE.ninfer"
            )
        raise TypeError(f"component {name!r} is taken from an artifact, a .ninfer file, not from {source!r}")
    component = source.component(name)
    check_component(component, source, model.components, model.parameters)
    for role, item in component.resources.items():
        data = source.artifact.read_object(item.id)
        if model.resources.setdefault(item.id, data) != data:
            raise ValueError(f"{source.path}: resource {item.id} ({role}) differs from the one that the model has")
    model.components[name] = dict(component.record)
    return Grafted(source, component)


def check_component(
    component: StoredComponent, source: ArtifactSource, components: Mapping[str, Any], parameters: Container[str]
) -> None:
    """Refuse a component that cannot stand beside ``components`` with their ``parameters``.

    Raises:
        ValueError: it, or one of its parameters, is there already; or what it extends is missing or of another size.
    """
    name, record = component.name, component.record
    if name in components:
        raise ValueError(f"there is a component {name!r} already; take one of the two")
    taken = next((key for key in component.bindings if key in parameters), None)
    if taken is not None:
        raise ValueError(f"there is a parameter {taken} already, which {source.path} would bring")
    base = record.get("target")
    if base not in (None, name) and base not in components:
        raise ValueError(f"{source.path}: component {name!r} extends {base!r}, and there is no such component")
    _check_sizes(component, source, base, components)
    ours = components.get(base or "", {}).get("config", {})
    norm, hidden = component.elements(f"{name}/final_norm"), ours.get("hidden_size")
    if norm is not None and hidden is not None and norm != hidden:
        raise ValueError(
            f"{source.path}: component {name!r} was made for states of {norm} elements, this model has {hidden}"
        )


def _check_sizes(
    component: StoredComponent, source: ArtifactSource, base: str | None, components: Mapping[str, Any]
) -> None:
    """Refuse a component that extended another ``base`` in its artifact than the one it would extend here.

    Its own configuration does not tell: that of Vision has a hidden size of its own, that of a draft none at all.
    """
    own = component.record.get("config", {})
    theirs, ours = (side.get(base or "", {}).get("config", {}) for side in (source.components, components))
    keys = [key for key in _STATES if key in theirs and key in ours]
    if "dflash_config" in own and "num_hidden_layers" in theirs and "num_hidden_layers" in ours:
        keys.append("num_hidden_layers")  # it names the layers whose states it reads
    if own.keys() <= {"architectures"}:
        keys += _BLOCK  # MTP: a block like those of the text, which says nothing of its own sizes
    for key in keys:
        if theirs.get(key) != ours.get(key):
            raise ValueError(
                f"{source.path}: component {component.name!r} was made for {key} {theirs.get(key)}, "
                f"this model has {ours.get(key)}"
            )


def readers_of(component: StoredComponent) -> Iterator[dict[str, Any]]:
    """Uses of states of the component by parameters of others, as they should be beside it.

    A proposal head holds rows of the output head and multiplies what that multiplies; an artifact without one does not
    say so.
    """
    yield from component.readers
    for use in component.readers:
        if use["parameter"] == "text/output_head":
            yield {"parameter": "proposal/head", "input": use["input"], "activation_policy": "A16Only"}


def plan_grafts(grafts: Sequence[Grafted], weights: int) -> GraftedPlan:
    """Name the objects of ``grafts`` in order.

    Args:
        weights: how many weights precede them.

    Raises:
        ValueError: so many that the ids collide.
    """
    if grafts and weights > FIRST_ID:
        raise ValueError(f"{weights} weights leave no ids for grafted objects, which begin at {WEIGHT}{FIRST_ID}")
    objects: list[GraftedObject] = []
    bindings: dict[str, Binding] = {}
    uses: list[dict[str, Any]] = []
    for item in grafts:
        component = item.component
        first = FIRST_ID + len(objects)
        names = {tensor.id: f"{WEIGHT}{first + index:06d}" for index, tensor in enumerate(component.tensors)}
        held = _held(component)
        objects += [_object(item.source, tensor, names[tensor.id], held[tensor.id]) for tensor in component.tensors]
        bindings |= {name: renamed_binding(binding, names) for name, binding in component.bindings.items()}
        uses += [renamed_use(use, names) for use in component.uses]
    return GraftedPlan(tuple(objects), bindings, tuple(uses))


def _held(component: StoredComponent) -> dict[str, list[Fragment]]:
    """Object id → the parameters, or uses, whose elements it holds."""
    sizes = {tensor.id: prod(tensor.shape) for tensor in component.tensors}
    held: dict[str, list[Fragment]] = {identifier: [] for identifier in sizes}
    named = [*component.bindings.items()]
    for use in component.uses:
        for role, binding in use.get("auxiliaries", {}).items():
            named.append((f"{use['parameter']} × {use['input']} {role}", binding))
    for name, binding in named:
        if "object" in binding:
            held[binding["object"]].append(Fragment(name, 0, 0, sizes[binding["object"]]))
            continue
        begin = 0
        for part in binding["parts"]:
            first, last = part["range"]
            held[part["object"]].append(Fragment(name, begin, first, last))
            begin += last - first
    return held


def _object(source: ArtifactSource, tensor: TensorObject, identifier: str, held: Sequence[Fragment]) -> GraftedObject:
    spec = TensorSpec(identifier, tensor.shape, tensor.format, tensor.layout, tensor.divisors)
    names = tuple(dict.fromkeys(fragment.parameter for fragment in held))
    nothing: Mapping[Any, Any] = MappingProxyType({})
    inputs = (MethodInput(names[0], source.payload(tensor), ()),)
    request = PrepareRequest(spec, inputs, nothing, {}, "", 512, nothing)
    checked = replace(graft.check(request), state=StoredObject(source.artifact, tensor.id))
    return GraftedObject(request, checked, names, tuple(held))


def renamed_use(use: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a use record with other object ids."""
    renamed = dict(use)
    if "auxiliaries" in use:
        renamed["auxiliaries"] = {role: renamed_binding(binding, names) for role, binding in use["auxiliaries"].items()}
    return renamed
