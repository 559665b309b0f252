"""Structs that recipes and methods see are like the dataclasses beside them."""

from __future__ import annotations

import dataclasses

import pytest

from ninferbuild.method import MethodInput
from ninferbuild.recipe import Selection
from ninferbuild.rules.cast_direct import cast_direct


def test_a_selection_can_be_replaced_and_described() -> None:
    selection = Selection(0, 8, "bf16", None, cast_direct, None)  # type: ignore[arg-type]
    changed = dataclasses.replace(selection, format="f32", end=4)  # type: ignore[type-var]
    assert isinstance(changed, Selection)
    assert (changed.begin, changed.end, changed.format, selection.format) == (0, 4, "f32", "bf16")
    assert [field.name for field in dataclasses.fields(Selection)][:3] == ["begin", "end", "format"]  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        selection.format = "f16"  # type: ignore[misc]


def test_an_input_can_be_replaced() -> None:
    item = MethodInput("text/norm", None, ())  # type: ignore[arg-type]
    assert dataclasses.replace(item, parameter="text/head").parameter == "text/head"  # type: ignore[type-var]
