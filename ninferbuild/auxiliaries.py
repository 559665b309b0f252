"""Auxiliary tensors of uses: merging what recipe and methods supply, and the directory's use records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.formats import GGUF_FORMATS, default_layout
from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.bindings import AUXILIARY
from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, UseKey
from ninferbuild.recipe import ACTIVATION_DIVISOR

if TYPE_CHECKING:
    from ninferbuild.recipe import Recipe

INPUT_COLUMNS = "input_columns"
"""The auxiliary role of a permutation of a matrix's columns; only stored GGUF blocks have one."""


@dataclass(frozen=True, slots=True)
class AuxiliaryObject:
    """One auxiliary tensor of the artifact; ``data`` is in the default layout of ``format``."""

    id: str
    format: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.id, self.shape, self.format, default_layout(self.format))


def merge_auxiliaries(
    recipe: Recipe, tables: Iterable[Mapping[AuxiliaryKey, AuxiliaryValue]]
) -> dict[AuxiliaryKey, AuxiliaryValue]:
    """The recipe's own auxiliary values followed by those that methods supply, in their order.

    Raises:
        TypeError: a value is not an :class:`AuxiliaryValue`.
        ValueError: two values for one key differ, a value is malformed, or no use has its key.
    """
    merged = dict(recipe.auxiliary_overrides)
    for table in tables:
        for key, value in table.items():
            if merged.setdefault(key, value) != value:
                raise ValueError(f"conflicting auxiliary values for {_spelled(key)}")
    for key, value in merged.items():
        _validate(recipe, key, value)
    return merged


def use_records(
    recipe: Recipe, auxiliaries: Mapping[AuxiliaryKey, AuxiliaryValue]
) -> tuple[list[dict[str, Any]], list[AuxiliaryObject]]:
    """The directory's use records in policy order, and the auxiliary objects they name.

    Equal values of one role are one object. An activation divisor is never shared: each use owns its own.

    Args:
        auxiliaries: the result of :func:`merge_auxiliaries`.

    Raises:
        ValueError: a shared NVFP4 parameter lacks the activation divisor that ``AllowA4`` needs.
    """
    by_use: dict[UseKey, list[tuple[str, AuxiliaryValue]]] = {}
    for (parameter, input_name, role), value in auxiliaries.items():
        by_use.setdefault((parameter, input_name), []).append((role, value))
    records: list[dict[str, Any]] = []
    objects: list[AuxiliaryObject] = []
    shared: dict[tuple[str, str, tuple[int, ...], bytes], str] = {}
    for key, policy in recipe.policies.items():
        parameter, input_name = key
        if policy == "AllowA4" and (*key, ACTIVATION_DIVISOR) not in auxiliaries:
            _require_no_divisor(recipe, parameter)
        references: dict[str, dict[str, str]] = {}
        for role, value in by_use.get(key, ()):
            content = (role, value.format, tuple(value.shape), bytes(value.data))
            identifier = None if role == ACTIVATION_DIVISOR else shared.get(content)
            if identifier is None:
                identifier = f"{AUXILIARY}{len(objects):06d}"
                objects.append(AuxiliaryObject(identifier, *content[1:]))
                shared[content] = identifier
            references[role] = {"object": identifier}
        record: dict[str, Any] = {"parameter": parameter, "input": input_name, "activation_policy": policy}
        if references:
            record["auxiliaries"] = references
        records.append(record)
    return records, objects


def _validate(recipe: Recipe, key: AuxiliaryKey, value: AuxiliaryValue) -> None:
    if not isinstance(value, AuxiliaryValue):
        raise TypeError(f"auxiliary {_spelled(key)} is a {type(value).__name__}; provide an AuxiliaryValue")
    parameter, input_name, role = key
    if not isinstance(role, str):
        raise TypeError(f"auxiliary {_spelled(key)}: the role must be text")
    if (parameter, input_name) not in recipe.policies:
        raise ValueError(f"auxiliary {_spelled(key)} names an unknown Use")
    shape = tuple(value.shape)
    if role == ACTIVATION_DIVISOR:
        if value.format != "fp32" or shape != ():
            raise ValueError(f"auxiliary {_spelled(key)} must be an FP32 scalar, not {value.format} of shape {shape}")
        AuxiliaryValue.activation_divisor(value.data)  # which refuses another length too
        return
    if role == INPUT_COLUMNS:
        _require_blocks(recipe, key)
    size = encoded_size(default_layout(value.format), value.format, shape)
    if len(value.data) != size:
        raise ValueError(
            f"auxiliary data length is invalid for {_spelled(key)}: {len(value.data)} bytes, "
            f"{value.format} of shape {shape} has {size}"
        )


def _require_blocks(recipe: Recipe, key: AuxiliaryKey) -> None:
    """Nothing undoes the permutation of a matrix that is quantised anew, so such a matrix must not have one."""
    formats = {selection.format for selection in recipe.selections[recipe.resolve(key[0])]}
    others = sorted(formats - GGUF_FORMATS.keys())
    if others:
        raise ValueError(
            f"auxiliary {_spelled(key)} belongs to stored gguf_* blocks, and the parameter is stored as "
            f"{', '.join(others)}; keep its blocks, or give it a source of untiled columns and take the auxiliary out "
            "of recipe.auxiliary_overrides"
        )


def _require_no_divisor(recipe: Recipe, parameter: str) -> None:
    """An alias has no method call that would import a divisor for its own use, so the recipe must give it one."""
    if parameter not in recipe.aliases:
        return
    target = recipe.resolve(parameter)
    if any(selection.format == "nvfp4" for selection in recipe.selections[target]):
        raise ValueError(
            f"{parameter}: provide its independent activation divisor: it shares the NVFP4 words of {target} "
            f"and allows A4; call recipe.use(..., auxiliaries={{{ACTIVATION_DIVISOR!r}: ...}})"
        )


def _spelled(key: AuxiliaryKey) -> str:
    parameter, input_name, role = key
    return f"{role} of {parameter} × {input_name}"
