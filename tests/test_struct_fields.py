"""Structs that recipes and methods see are like the dataclasses beside them."""

from __future__ import annotations

import dataclasses
import pydoc

import msgspec
import numpy as np
import pytest

from ninferbuild.method import MethodInput
from ninferbuild.models.model import Parameter
from ninferbuild.recipe import Selection
from ninferbuild.rules.cast_direct import cast_direct
from ninferbuild.sources.logical import LogicalSource, array_source


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


def read(begin: int, end: int) -> None:
    pass


def test_a_source_is_compared_and_shown_by_its_public_fields() -> None:
    source, other = (LogicalSource((2,), "x", read, files=("a",)) for _ in range(2))  # type: ignore[arg-type]
    assert source.description is None
    assert source == other
    assert hash(source) == hash(other)
    assert source != dataclasses.replace(source, label="y")
    assert repr(source) == (
        f"LogicalSource(shape=(2,), label='x', read_values={read!r}, read_encoded=None, weight_divisor=None, "
        "input_divisor=None, files=('a',), fingerprint=None)"
    )


def test_a_source_with_another_reader_is_described_anew() -> None:
    source = array_source(np.zeros(2, np.float32), "zeros")
    assert source.description is not None
    assert msgspec.structs.replace(source, read_values=read).description is None  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [Parameter("a", (2,), None), LogicalSource((2,), "x", read)])  # type: ignore[arg-type]
def test_fields_are_frozen(record: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'shape'"):
        record.shape = (1,)  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'shape'"):
        del record.shape  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [LogicalSource, MethodInput, Parameter, Selection])
def test_help_can_be_asked_for(kind: type) -> None:
    assert f"class {kind.__name__}" in pydoc.plain(pydoc.render_doc(kind))
