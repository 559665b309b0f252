"""What is written as TOML is what TOML's reader gives back."""

import math
import tomllib

from hypothesis import given
from hypothesis import strategies as st
import pytest

from ninferbuild.toml_text import toml_key, toml_value

texts = st.text(st.characters(exclude_categories=("Cs",)))
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(texts, values)
def test_round_trip(key: str, value: object) -> None:
    assert tomllib.loads(f"{toml_key(key)} = {toml_value(value)}\n") == {key: value}


def test_nan() -> None:
    assert math.isnan(tomllib.loads(f"a = {toml_value(math.nan)}")["a"])


def test_none_has_no_text() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        toml_value({"a": None})
