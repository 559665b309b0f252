"""From a configured recipe to physical parents, and to the bindings and uses of the artifact's directory.

Planning is torch-free: built-in methods are checked through :meth:`Rule.check`, which looks at shapes, names and
scalars; a user's method is called by :func:`prepare_user_method` only when its parent has to be encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.formats import DIRECT_FORMATS, default_layout
from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.auxiliaries import AuxiliaryObject, merge_auxiliaries, use_records
from ninferbuild.bindings import WEIGHT, Fragment, bindings_of
from ninferbuild.expert_banks import check_expert_banks
from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, Method, MethodInput, PreparedMethod, PrepareRequest
from ninferbuild.models.bulk import collection_paused
from ninferbuild.recipe import PreparedRecipe, Recipe, Selection, WeightJob
from ninferbuild.rules import rule_of
from ninferbuild.rules.rule import Rule, RuleCheck
from ninferbuild.sources.logical import LogicalSource, leading_rows
from ninferbuild.user_errors import message_of

if TYPE_CHECKING:
    from ninferbuild.models.model import Parameter

__all__ = ["AuxiliaryObject", "Fragment", "Parent", "PlannedRecipe", "plan_parents", "prepare", "prepare_user_method"]

Item = tuple[str, Selection]
"""A parameter and the selection of it that is stored."""


@dataclass(frozen=True, slots=True)
class Parent:
    """One physical tensor object.

    Attributes:
        request: what its method sees.
        rule: the built-in method, or None for a user's.
        checked: what the rule's check gave; None for a user's method, or when the check was not asked for.
        fragments: where the parameters lie, in parent order.
        grafted: names of the parameters that an object from another artifact holds; empty for all others.
    """

    request: PrepareRequest
    method: Method
    method_name: str
    rule: Rule | None
    checked: RuleCheck | None
    fragments: tuple[Fragment, ...]
    grafted: tuple[str, ...] = ()

    @property
    def target(self) -> TensorSpec:
        return self.request.target

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names in parent order."""
        return self.grafted or tuple(item.parameter for item in self.request.inputs)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the sources in parent order."""
        return tuple(item.source.label for item in self.request.inputs)


@dataclass(frozen=True, slots=True)
class PlannedRecipe:
    """What an artifact will hold. Valid as long as ``recipe`` is not configured further.

    Attributes:
        parents: in object order: the recipe's weights, then the objects of grafted components.
        bindings: of all parameters.
        grafted_uses: use records of the grafted components.
    """

    recipe: Recipe
    parents: tuple[Parent, ...]
    bindings: dict[str, dict[str, Any]]
    grafted_uses: tuple[dict[str, Any], ...] = ()

    @property
    def weights(self) -> list[TensorSpec]:
        """Specs of the recipe's weights."""
        return [parent.target for parent in self.parents if not parent.grafted]

    @property
    def grafted(self) -> list[TensorSpec]:
        """Specs of the objects of grafted components."""
        return [parent.target for parent in self.parents if parent.grafted]

    @collection_paused()
    def uses(
        self, auxiliaries: Sequence[Mapping[AuxiliaryKey, AuxiliaryValue]]
    ) -> tuple[list[dict[str, Any]], list[AuxiliaryObject]]:
        """The directory's uses, and the auxiliary objects they refer to.

        Args:
            auxiliaries: what each parent's method supplies, in parent order: for a rule ``checked.auxiliaries``, for
                a user's method what it returned.

        Raises:
            ValueError: values conflict, are malformed or belong to no use, or a shared NVFP4 parameter lacks the
                activation divisor that ``AllowA4`` needs.
        """
        if len(auxiliaries) != len(self.parents):
            raise ValueError(f"{len(self.parents)} parents need as many tables of auxiliaries, not {len(auxiliaries)}")
        records, objects = use_records(self.recipe, merge_auxiliaries(self.recipe, auxiliaries))
        return [*records, *map(dict, self.grafted_uses)], objects


@collection_paused()
def plan_parents(recipe: Recipe, *, rows_per_chunk: int = 512, device: str = "") -> PlannedRecipe:
    """Plan every parent and check its built-in method; methods of users are not called.

    Raises:
        ValueError: a group, format, layout or method does not suit its parameters, with their names, or the engine
            would refuse the NVFP4 experts of a layer.
    """
    parents = tuple(_parents(recipe, device, rows_per_chunk, check_rules=True))
    # What is known already is refused now rather than after hours of encoding.
    tables = (parent.checked.auxiliaries for parent in parents if parent.checked is not None)
    check_expert_banks(parents, merge_auxiliaries(recipe, tables))
    planned = _planned(recipe, parents)
    return _with_grafts(planned) if recipe.grafts else planned


def _with_grafts(planned: PlannedRecipe) -> PlannedRecipe:
    from ninferbuild.grafting import plan_grafts  # few recipes take anything from another artifact
    from ninferbuild.rules.graft import graft

    plan = plan_grafts(planned.recipe.grafts, len(planned.parents))
    parents = [
        Parent(item.request, graft, graft.name, graft, item.checked, item.fragments, item.parameters)
        for item in plan.objects
    ]
    return PlannedRecipe(planned.recipe, (*planned.parents, *parents), {**planned.bindings, **plan.bindings}, plan.uses)


def prepare_user_method(parent: Parent, device: str) -> PreparedMethod:
    """Call the method of a parent for ``device``.

    Raises:
        ValueError: the method raised; its message follows the parameter names, and the exception is the cause.
        TypeError: it returned something else than ``request.job(...)``.
    """
    try:
        prepared = parent.method(replace(parent.request, device=device))
    except Exception as error:
        raise _method_error(parent.names, error) from error
    if not isinstance(prepared, PreparedMethod):
        raise TypeError(
            f"{_prefix(parent.names)}: method {parent.method_name} must return request.job(...), "
            f"not {type(prepared).__name__}"
        )
    return prepared


def prepare(recipe: Recipe, *, device: str, rows_per_chunk: int) -> PreparedRecipe:
    """What :meth:`Recipe.prepare` does: the same plan, with every method called through its public interface."""
    if recipe.grafts:
        raise ValueError("components from another artifact are put in by the build, not by a prepared recipe")
    parents = tuple(_parents(recipe, device, rows_per_chunk, check_rules=False))
    prepared = [prepare_user_method(parent, device) for parent in parents]
    planned = _planned(recipe, parents)
    uses, auxiliaries = planned.uses([item.auxiliaries for item in prepared])
    weights = tuple(
        WeightJob(parent.target, job, parent.names, parent.labels, parent.method_name, dict(parent.request.parameters))
        for parent, job in zip(parents, prepared, strict=True)
    )
    return PreparedRecipe(weights, planned.bindings, uses, auxiliaries)


def _planned(recipe: Recipe, parents: tuple[Parent, ...]) -> PlannedRecipe:
    bindings = bindings_of(recipe, ((parent.target, parent.fragments) for parent in parents))
    return PlannedRecipe(recipe, parents, bindings)


def _parents(recipe: Recipe, device: str, rows_per_chunk: int, *, check_rules: bool) -> Iterator[Parent]:
    """Parents in object order. Without ``check_rules`` their methods will all be called through their own interface."""
    policies = MappingProxyType(dict(recipe.policies))
    overrides = MappingProxyType(dict(recipe.auxiliary_overrides))
    parameters = recipe.model.parameters
    sizes = _Sizes()
    for index, (items, chosen_shape, explicit) in enumerate(_partition(recipe)):
        members = [parameters[name] for name, _ in items]
        if len({member.residency for member in members}) > 1:
            raise _several_residencies(members)
        choice = items[0][1]
        inputs = tuple([_input(name, item, member.inputs) for (name, item), member in zip(items, members, strict=True)])
        try:
            target = _target(f"{WEIGHT}{index:06d}", choice, inputs, chosen_shape, explicit, sizes)
        except ValueError as error:
            raise ValueError(f"{error} (storing {_listed([name for name, _ in items])})") from error
        request = PrepareRequest(target, inputs, policies, dict(choice.parameters), device, rows_per_chunk, overrides)
        method = choice.method
        rule = rule_of(method)
        checked = None
        if rule is not None and check_rules:
            try:
                checked = rule.check(request)
            except Exception as error:
                raise _method_error([name for name, _ in items], error) from error
        method_name = getattr(method, "__name__", None) or type(method).__name__
        yield Parent(request, method, method_name, rule, checked, _fragments(items))


def _partition(recipe: Recipe) -> Iterator[tuple[list[Item], tuple[int, ...] | None, bool]]:
    """What becomes one parent, its explicit shape, and whether the recipe asked for it.

    Explicit groups come first, then automatic ones, then the rest.

    Raises:
        ValueError: explicit groups overlap, include an alias or a parameter that is split by rows, or mix choices.
    """
    selections, aliases = recipe.selections, recipe.aliases
    used: set[str] = set()
    for names, shape in recipe.explicit_groups:
        taken = next((name for name in names if name in used or name in aliases), None)
        if taken is not None:
            raise ValueError(f"explicit groups overlap or include a shared alias: {taken} (grouping {_listed(names)})")
        split = next((name for name in names if len(selections[name]) != 1), None)
        if split is not None:
            raise ValueError(f"explicit grouping requires unsplit parameters; {split} is split by rows")
        used.update(names)
        items = [(name, selections[name][0]) for name in names]
        if not _compatible(items):
            raise ValueError(
                f"grouped parameters have incompatible formats, layouts or methods: {_listed(names)}; "
                "assign the same ones, with equal method parameters, to all of them"
            )
        yield items, shape, True
    left_alone = recipe.separate_parameters | aliases.keys()
    for names in recipe.model.packing_groups:
        try:
            choices = [selections[name] for name in names]
        except KeyError as error:
            unknown = error.args[0]
            raise ValueError(
                f"a packing group of the model names {unknown}; call recipe.add_parameter(...) for it"
            ) from None
        if not names or not used.isdisjoint(names) or not left_alone.isdisjoint(names):
            continue
        if max(map(len, choices)) > 1:
            continue
        items = [(name, choice) for name, (choice,) in zip(names, choices, strict=True)]
        if _packs_automatically(items):
            used.update(names)
            yield items, None, False
    for name, pieces in selections.items():
        if name not in used and name not in aliases:
            for selection in pieces:
                yield [(name, selection)], None, False


def _packs_automatically(items: Sequence[Item]) -> bool:
    """Whether unsplit selections share one parent without being asked to.

    Encoded NVFP4 words do so only under one common divisor: some consumers of automatic groups take one scalar. What
    a divisor accessor raises passes through.
    """
    first = items[0][1]
    rule = rule_of(first.method)
    if rule is None or not _compatible(items):
        return False
    if first.format == "nvfp4" and rule.reads == "encoded":
        divisors = _divisors(selection.source for _, selection in items)
        return None not in divisors and len(divisors) == 1
    return True


def _compatible(items: Sequence[Item]) -> bool:
    first = items[0][1]
    format, layout, method, parameters = first.format, first.layout, first.method, first.parameters
    for _, other in items:
        if other.format != format or other.layout != layout:
            return False
        if other.method is not method and other.method != method:
            return False
        if other.parameters is not parameters and not _equal_parameters(other.parameters, parameters):
            return False
    return True


def _equal_parameters(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equality of method parameters; arrays in them are equal only to themselves."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # "the truth value of an array is ambiguous"
        return False


def _divisors(sources: Iterable[LogicalSource]) -> set[bytes | None]:
    """The distinct weight divisors, as FP32 words; None stands for an unknown one."""
    return {_weight_divisor(source) for source in sources}


def _weight_divisor(source: LogicalSource) -> bytes | None:
    if source.weight_divisor is None:
        return None
    description = source.description
    if description is not None and description.encoding != "nvfp4":
        return None  # a stored matrix offers the accessor before anyone has looked at what it holds
    return source.weight_divisor()


def _several_residencies(members: Sequence[Parameter]) -> ValueError:
    residencies = sorted({member.residency for member in members})
    return ValueError(
        f"parameters of independently selected residencies ({', '.join(residencies)}) "
        f"cannot share one parent: {_listed([member.name for member in members])}"
    )


def _input(name: str, selection: Selection, inputs: tuple[str, ...]) -> MethodInput:
    """The selection as an input: its source restricted to its elements, which are whole leading-axis rows."""
    source = selection.source
    if selection.begin or selection.end != prod(source.shape):
        source = _selected(name, selection)
    uses = ((name, inputs[0]),) if len(inputs) == 1 else tuple([(name, given) for given in inputs])
    return MethodInput(name, source, uses)


def _selected(name: str, selection: Selection) -> LogicalSource:
    source = selection.source
    shape = source.shape
    row = prod(shape[1:])
    if not shape or selection.begin % row or selection.end % row:
        raise ValueError(f"{name}: selections must consist of complete leading-axis rows of {row} elements")
    return leading_rows(source, selection.begin // row, selection.end // row)


class _Sizes:
    """Which combinations of layout, format, shape and divisors are known to be storable; a model has few."""

    def __init__(self) -> None:
        self._accepted: set[tuple[str, str, tuple[int, ...], int]] = set()

    def require_storable(self, layout: str, format: str, shape: tuple[int, ...], divisors: int) -> None:
        """Raises ``ValueError`` when the layout cannot hold the tensor."""
        combination = (layout, format, shape, divisors)
        if combination not in self._accepted:
            encoded_size(layout, format, shape, divisors)
            self._accepted.add(combination)


def _target(
    identifier: str,
    choice: Selection,
    inputs: Sequence[MethodInput],
    chosen_shape: tuple[int, ...] | None,
    explicit: bool,
    sizes: _Sizes,
) -> TensorSpec:
    """The stored tensor; refuses what its layout cannot hold."""
    sources = [item.source for item in inputs]
    shape = _parent_shape(choice.format, [source.shape for source in sources], chosen_shape)
    layout = choice.layout or default_layout(choice.format)
    divisors = _stacked_divisors(choice, sources) if explicit else 1
    sizes.require_storable(layout, choice.format, shape, divisors)
    return TensorSpec(identifier, shape, choice.format, layout, divisors)


def _parent_shape(format: str, shapes: Sequence[tuple[int, ...]], chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    if chosen is not None:
        total = sum(map(prod, shapes))
        if prod(chosen) != total:
            raise ValueError(f"parent shape {chosen} changes its element count of {total}")
        if any(type(extent) is not int for extent in chosen):
            raise ValueError(f"parent shape {chosen} must be made of integers")
        return chosen
    direct = format in DIRECT_FORMATS
    first = shapes[0]
    if len(shapes) == 1:
        if direct or len(first) == 2:
            return first
        return (prod(first[:-1]), first[-1]) if first else (1, 1)
    if all(len(shape) == 1 for shape in shapes):
        total = sum(shape[0] for shape in shapes)
        return (total,) if direct else (1, total)
    if all(len(shape) == 2 and shape[1] == first[1] for shape in shapes) and len(first) == 2:
        return (sum(shape[0] for shape in shapes), first[1])
    raise ValueError("packed parameters need compatible rows or an explicit parent shape")


def _stacked_divisors(choice: Selection, sources: Sequence[LogicalSource]) -> int:
    """How many FP32 divisors an explicit NVFP4 group stores: one, or one a source when the sources' known ones differ.

    A built-in method that quantises values gives its parent a divisor of its own, whatever its sources were divided by.
    """
    rule = rule_of(choice.method)
    if choice.format != "nvfp4" or len(sources) < 2 or (rule is not None and rule.reads != "encoded"):
        return 1
    divisors = _divisors(sources)
    if None in divisors or len(divisors) == 1:
        return 1
    if any(len(source.shape) != 2 or source.shape[0] != sources[0].shape[0] for source in sources):
        raise ValueError(
            "NVFP4 sources quantised against different divisors must be complete matrices with equal row counts"
        )
    return len(sources)


def _fragments(items: Sequence[Item]) -> tuple[Fragment, ...]:
    fragments, cursor = [], 0
    for name, selection in items:
        begin = selection.begin
        end = cursor + selection.end - begin
        fragments.append(Fragment(name, begin, cursor, end))
        cursor = end
    return tuple(fragments)


def _method_error(names: Sequence[str], error: Exception) -> ValueError:
    prefix = f"{_prefix(names)}: "
    message = message_of(error)
    return ValueError(message if message.startswith(prefix) else prefix + message)


def _prefix(names: Sequence[str]) -> str:
    """Names joined by commas; a stack of hundreds of experts is cut short."""
    if len(names) <= 8:
        return ",".join(names)
    return f"{','.join(names[:4])},… ({len(names)} parameters)"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
