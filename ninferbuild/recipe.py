"""What a recipe configures: for each parameter how it is stored, grouped and shared, and how its uses compute.

A recipe is a function ``configure(model, recipe, sources)`` that calls the methods of :class:`Recipe`. Nothing here
reads a payload or imports torch; :mod:`ninferbuild.plan` turns the configured state into physical parents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from ninferbuild.artifact.formats import default_layout
from ninferbuild.artifact.schema import ACTIVATION_POLICIES
from ninferbuild.matching import NameIndex
from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, Method, PreparedMethod, UseKey
from ninferbuild.models.bulk import collection_paused
from ninferbuild.rules import METHODS, cast_direct
from ninferbuild.struct_fields import with_dataclass_fields

if TYPE_CHECKING:
    from ninferbuild.artifact.schema import TensorSpec
    from ninferbuild.auxiliaries import AuxiliaryObject
    from ninferbuild.grafting import Grafted
    from ninferbuild.models.model import Model, Parameter
    from ninferbuild.sources.artifact import ArtifactSource
    from ninferbuild.sources.logical import LogicalSource

__all__ = ["PreparedRecipe", "Recipe", "Selection", "WeightJob", "default_layout"]

DEFAULT_POLICY = "A16Only"
ACTIVATION_DIVISOR = "activation_input_divisor"
"""The one auxiliary role with a meaning of its own: the FP32 divisor of a quantised activation."""


@with_dataclass_fields
class Selection(msgspec.Struct, frozen=True):
    """The choices for elements ``[begin, end)`` of a parameter (flat, C order).

    ``source`` always has the parameter's full shape. ``layout`` None means the default layout of ``format``.
    """

    begin: int
    end: int
    format: str
    layout: str | None
    method: Method
    source: LogicalSource
    parameters: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class WeightJob:
    """One prepared parent: what is stored, and the job that writes it.

    ``parameters`` and ``sources`` (labels) are in parent order.
    """

    spec: TensorSpec
    prepared: PreparedMethod
    parameters: tuple[str, ...]
    sources: tuple[str, ...]
    method_name: str
    method_parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreparedRecipe:
    """A recipe ready to be written: weights in object order, and the directory's bindings and uses."""

    weights: tuple[WeightJob, ...]
    bindings: dict[str, dict[str, Any]]
    uses: list[dict[str, Any]]
    auxiliaries: list[AuxiliaryObject]


class Recipe:
    """The state that a recipe configures.

    Attributes:
        model: the model whose parameters are configured.
        selections: parameter → its selections, which cover it in element order; parameters in model order.
        policies: (parameter, input) → activation policy.
        auxiliary_overrides: (parameter, input, role) → value that the recipe supplies.
        aliases: parameter → the parameter whose storage it shares.
        separate_parameters: parameters that automatic grouping leaves alone.
        explicit_groups: (names, parent shape or None), in call order.
        grafts: components that are taken from another artifact, in call order.
    """

    def __init__(self, model: Model):
        self.model = model
        self.selections: dict[str, list[Selection]] = {}
        self.policies: dict[UseKey, str] = {}
        self.auxiliary_overrides: dict[AuxiliaryKey, AuxiliaryValue] = {}
        self.aliases: dict[str, str] = {}
        self.separate_parameters: set[str] = set()
        self.explicit_groups: list[tuple[tuple[str, ...], tuple[int, ...] | None]] = []
        self.grafts: list[Grafted] = []
        self._names: NameIndex | None = None
        self._add(model.parameters.items())

    def add_parameter(self, name: str) -> None:
        """Take up a parameter that was added to the model: its own source, its direct format, ``A16Only`` uses.

        Raises:
            ValueError: the recipe has the parameter already, or the model does not have it.
        """
        if name in self.selections:
            raise ValueError(f"recipe already contains {name}")
        parameter = self.model.parameters.get(name)
        if parameter is None:
            raise ValueError(f"the model has no parameter {name}; call model.add(...) first")
        self._add([(name, parameter)])

    @collection_paused()
    def _add(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        self._names = None
        selections, policies = self.selections, self.policies
        for name, parameter in parameters:
            size, source = prod(parameter.shape), parameter.source
            selections[name] = [Selection(0, size, parameter.direct_format, None, cast_direct, source, {})]
            for input_name in parameter.inputs:
                policies[name, input_name] = DEFAULT_POLICY

    def match(self, selectors: str | Sequence[str]) -> tuple[str, ...]:
        """The parameter names that ``selectors`` select, in first-seen order without repeats.

        A selector is an exact name, or a case-sensitive pattern of ``*`` (also across ``/``), ``?`` and ``[…]`` whose
        matches come in model order.

        Raises:
            ValueError: there are no selectors, or one of them selects nothing.
        """
        patterns = (selectors,) if isinstance(selectors, str) else tuple(selectors)
        if not patterns:
            raise ValueError("parameter selectors must not be empty")
        found: dict[str, None] = dict.fromkeys(patterns)
        if found.keys() <= self.selections.keys():  # far the commonest, and an index of very many names takes its time
            return tuple(found)
        found = {}
        for pattern in patterns:
            if pattern in self.selections:
                found[pattern] = None
                continue
            if self._names is None or len(self._names) != len(self.selections):
                self._names = NameIndex(self.selections)
            names = self._names.find(pattern)
            if not names:
                hint = "; call recipe.add_parameter(...) for it first" if pattern in self.model.parameters else ""
                raise ValueError(f"selector {pattern!r} matched no logical parameter{hint}")
            found.update(dict.fromkeys(names))
        return tuple(found)

    @collection_paused()
    def assign(
        self,
        selectors: str | Sequence[str],
        *,
        format: str | None = None,
        layout: str | None = None,
        method: str | Method | None = None,
        source: LogicalSource | None = None,
        parameters: Mapping[str, Any] | None = None,
        activation_policy: str | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Change the given choices, and only those, of every matched parameter.

        Args:
            layout: a layout name, or ``"auto"`` for the default one of the format.
            method: a method, or the name of a built-in one.
            source: replaces where values come from; has the parameter's full shape, also with ``rows``.
            parameters: handed to the method; a deep copy is kept.
            activation_policy: set for every input of the parameters, whatever ``rows`` says.
            rows: restrict the change to leading-axis rows ``[first, last)``. A split stays a split: pieces are
                separate objects from then on.

        Raises:
            ValueError: nothing matches, the method or policy is unknown, the source has another shape, or the rows
                are outside the parameter.
            TypeError: ``method`` cannot be called, or ``source`` is not a source.
        """
        changes = _Changes(
            format,
            layout,
            None if method is None else _resolve_method(method),
            source,
            None if parameters is None else deepcopy(dict(parameters)),
        )
        physical = any(change is not None for change in changes)
        all_parameters, selections, aliases = self.model.parameters, self.selections, self.aliases
        for name in self.match(selectors):
            parameter = all_parameters[name]
            shape = parameter.shape
            if source is not None:
                _require_shape(name, source, shape)
            begin, end = (0, prod(shape)) if rows is None else _element_range(name, shape, rows)
            if physical:
                if aliases:
                    aliases.pop(name, None)
                known = selections[name]
                if len(known) == 1 and begin <= known[0].begin < known[0].end <= end:  # nearly all
                    selections[name] = [changes.made_to(known[0])]
                else:
                    selections[name] = _rewritten(known, begin, end, changes)
            if activation_policy is not None:
                for input_name in parameter.inputs:
                    key = (name, input_name)
                    self._check_use(key, activation_policy)
                    self.policies[key] = activation_policy

    def use(
        self,
        parameter: str,
        input_name: str,
        *,
        activation_policy: str | None = None,
        auxiliaries: Mapping[str, AuxiliaryValue | float | bytes] | None = None,
    ) -> None:
        """Set the policy of one use, or supply auxiliary tensors for it by role.

        A plain number (or four little-endian FP32 bytes) is accepted for ``activation_input_divisor`` only.

        Raises:
            ValueError: the use or the policy is unknown, or a divisor is not a positive finite FP32.
            TypeError: another role was given something else than an :class:`AuxiliaryValue`.
        """
        key = (parameter, input_name)
        self._check_use(key, activation_policy)
        values = {role: _auxiliary(role, value) for role, value in (auxiliaries or {}).items()}
        if activation_policy is not None:
            self.policies[key] = activation_policy
        for role, value in values.items():
            self.auxiliary_overrides[parameter, input_name, role] = value

    def _check_use(self, key: UseKey, policy: str | None) -> None:
        if key not in self.policies:
            raise ValueError(f"unknown mathematical use {key[0]} × {key[1]}")
        if policy is not None and policy not in ACTIVATION_POLICIES:
            known = ", ".join(ACTIVATION_POLICIES)
            raise ValueError(f"unknown activation policy {policy!r} for {key[0]}; choose one of {known}")

    def separate(self, selectors: str | Sequence[str]) -> None:
        """Keep the matched parameters out of automatic groups; groups that contain one are skipped as a whole."""
        self.separate_parameters.update(self.match(selectors))

    def group(self, selectors: str | Sequence[str], *, shape: Sequence[int] | None = None) -> None:
        """Store the matched parameters, in match order, as one parent, of ``shape`` when it is given."""
        self.explicit_groups.append((self.match(selectors), None if shape is None else tuple(shape)))

    def share(self, parameter: str, target: str) -> None:
        """Let ``parameter`` use the stored object of ``target``; uses and policies stay its own.

        A later physical change of ``parameter`` ends the sharing.

        Raises:
            ValueError: one of them does not exist, their shapes differ, or ``target`` shares with ``parameter``.
        """
        for name in (parameter, target):
            if name not in self.selections:
                raise ValueError(f"shared parameters must exist; there is no {name}")
        shapes = tuple(self.model.parameters[name].shape for name in (parameter, target))
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"shared parameters need equal logical shapes: {parameter} is {shapes[0]}, {target} is {shapes[1]}"
            )
        visited = {parameter}
        link: str | None = target
        while link is not None:
            if link in visited:
                raise ValueError(f"cyclic weight sharing of {parameter} and {target}")
            visited.add(link)
            link = self.aliases.get(link)
        self.aliases[parameter] = target
        self.selections[parameter] = list(self.selections[target])

    def add_input(self, parameter: str, input_name: str, *, activation_policy: str = DEFAULT_POLICY) -> None:
        """Let ``parameter`` multiply one more input, or set the policy of one that it multiplies already.

        Raises:
            ValueError: the recipe has no such parameter, or the policy is unknown.
        """
        known = self.model.parameters.get(parameter)
        if known is None or parameter not in self.selections:
            raise ValueError(f"there is no parameter {parameter} to multiply {input_name}")
        if activation_policy not in ACTIVATION_POLICIES:
            raise ValueError(f"unknown activation policy {activation_policy!r} for {parameter}")
        if input_name not in known.inputs:
            self.model.parameters[parameter] = replace(known, inputs=(*known.inputs, input_name))
            for (name, _, role), value in list(self.auxiliary_overrides.items()):
                # What a weight was transformed with applies to all that it multiplies; a divisor is one activation's.
                if name == parameter and role != ACTIVATION_DIVISOR:
                    self.auxiliary_overrides.setdefault((parameter, input_name, role), value)
        self.policies[parameter, input_name] = activation_policy

    def graft(self, component: str, source: ArtifactSource) -> None:
        """Take a whole component from an artifact, byte for byte.

        Its record, parameters, uses and objects become part of this artifact; nothing is decoded. Parameters of the
        model that multiply a state of the component there, such as the output head, do so here, with the same policy.

        Args:
            source: an opened artifact: what ``sources[NAME]`` gives for a ``.ninfer`` file.

        Raises:
            TypeError: ``source`` is no artifact.
            ValueError: the artifact has no such component, the model has it already, or the component was made for
                another model.
        """
        from ninferbuild.grafting import graft_of, readers_of  # few recipes take anything from another artifact

        taken = graft_of(component, source, self.model)
        self.grafts.append(taken)
        for use in readers_of(taken.component):
            known = self.model.parameters.get(use["parameter"])
            if use["parameter"] in self.selections and known is not None and use["input"] not in known.inputs:
                policy = use.get("activation_policy", DEFAULT_POLICY)
                self.add_input(use["parameter"], use["input"], activation_policy=policy)

    def resolve(self, parameter: str) -> str:
        """The parameter whose storage ``parameter`` uses: itself, or the end of its chain of aliases."""
        while parameter in self.aliases:
            parameter = self.aliases[parameter]
        return parameter

    def prepare(self, *, device: str = "cuda", rows_per_chunk: int = 512) -> PreparedRecipe:
        """Plan the parents and call every method once. The recipe does not change; preparing again is fine.

        Raises:
            ValueError: a group, format, layout or method does not suit its parameters.
            TypeError: a method did not return ``request.job(...)``.
        """
        from ninferbuild.plan import prepare  # the planner is a later stage

        return prepare(self, device=device, rows_per_chunk=rows_per_chunk)


class _Changes(NamedTuple):
    """Choices given to :meth:`Recipe.assign`; None leaves one as it is. ``layout`` may be ``"auto"``."""

    format: str | None
    layout: str | None
    method: Method | None
    source: LogicalSource | None
    parameters: dict[str, Any] | None

    def made_to(self, item: Selection) -> Selection:
        """``item`` with these choices. A recipe of a big model does this 100,000 times."""
        format, layout, method, source, parameters = self
        if layout is None:
            layout = item.layout
        return Selection(
            item.begin,
            item.end,
            item.format if format is None else format,
            None if layout == "auto" else layout,
            item.method if method is None else method,
            item.source if source is None else source,
            item.parameters if parameters is None else parameters,
        )


def _resolve_method(method: str | Method) -> Method:
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"unknown conversion method {method!r}; choose one of {', '.join(METHODS)}")
        return METHODS[method]
    if not callable(method):
        raise TypeError(f"method must be a conversion function or the name of one, not {method!r}")
    return method


def _require_shape(name: str, source: LogicalSource, shape: tuple[int, ...]) -> None:
    if not hasattr(source, "read_values"):
        raise TypeError(f"{name}: source must be a LogicalSource, not {type(source).__name__}")
    if tuple(source.shape) != tuple(shape):
        raise ValueError(f"{name}: override source shape differs: {tuple(source.shape)}, the parameter is {shape}")


def _element_range(name: str, shape: tuple[int, ...], rows: tuple[int, int]) -> tuple[int, int]:
    """Flat element bounds of leading-axis rows."""
    if len(rows) != 2 or not shape:
        raise ValueError(f"{name}: rows requires two bounds and a parameter with rows, not {rows!r} of shape {shape}")
    first, last = rows
    if type(first) is not int or type(last) is not int or not 0 <= first < last <= shape[0]:
        raise ValueError(f"{name}: row range {tuple(rows)} is invalid; the parameter has {shape[0]} rows")
    row = prod(shape[1:])
    return first * row, last * row


def _rewritten(selections: list[Selection], begin: int, end: int, changes: _Changes) -> list[Selection]:
    """Selections with ``changes`` made to elements ``[begin, end)``; those that straddle a bound are split."""
    result = []
    for item in selections:
        first, last = max(item.begin, begin), min(item.end, end)
        if first >= last:
            result.append(item)
            continue
        if item.begin < first:
            result.append(structs.replace(item, end=first))
        result.append(changes.made_to(structs.replace(item, begin=first, end=last)))
        if last < item.end:
            result.append(structs.replace(item, begin=last))
    return result


def _auxiliary(role: str, value: AuxiliaryValue | float | bytes) -> AuxiliaryValue:
    if isinstance(value, AuxiliaryValue):
        return value
    if role != ACTIVATION_DIVISOR:
        raise TypeError(f"role {role!r} got a {type(value).__name__}; provide an AuxiliaryValue")
    return AuxiliaryValue.activation_divisor(value)
