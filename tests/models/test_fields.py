import math
import struct

from hypothesis import given
from hypothesis import strategies as st
import pytest

from ninferbuild.models.fields import binary32, boolean, positive, require_fixed, require_object, unscaled_rope


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_positive_takes_only_integers_above_zero(value: object) -> None:
    assert positive(7, "text.x") == 7
    with pytest.raises(ValueError, match=r"text\.x: expected a positive integer"):
        positive(value, "text.x")


@given(st.floats(min_value=2.0**-126, max_value=3.4e38))
def test_binary32_is_the_nearest_single(value: float) -> None:
    stored = binary32(value, "x")
    assert type(stored) is float
    assert stored == struct.unpack("<f", struct.pack("<f", stored))[0]
    assert abs(stored - value) <= 2.0**-24 * abs(value) * (1 + 2.0**-24)


def test_binary32_keeps_the_rounded_value() -> None:
    assert binary32(1e-6, "x") == 9.999999974752427e-07
    assert binary32(10_000_000, "x") == 10_000_000.0


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (True, "expected a real value"),
        ("1", "expected a real value"),
        (None, "expected a real value"),
        (1e39, "not representable as F32"),
        (10**400, "not representable as F32"),
        (math.inf, "positive finite F32"),
        (math.nan, "positive finite F32"),
        (0, "positive finite F32"),
        (-1.0, "positive finite F32"),
        (1e-60, "positive finite F32"),
    ],
)
def test_binary32_refuses(value: object, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        binary32(value, "x")


def test_fixed_fields_may_be_absent_but_not_null() -> None:
    require_fixed({}, "text", hidden_act="silu")
    require_fixed({"hidden_act": "silu", "attention_bias": False}, "text", hidden_act="silu", attention_bias=False)
    with pytest.raises(ValueError, match=r"text\.hidden_act: expected 'silu', got None"):
        require_fixed({"hidden_act": None}, "text", hidden_act="silu")


def test_a_fixed_boolean_is_no_number() -> None:
    with pytest.raises(ValueError, match="expected False, got 0"):
        require_fixed({"attention_bias": 0}, "text", attention_bias=False)
    require_fixed({"scale": 1}, "text", scale=1.0)


def test_boolean_and_object() -> None:
    assert boolean(False, "x") is False
    with pytest.raises(ValueError, match="must be boolean"):
        boolean(0, "x")
    with pytest.raises(ValueError, match="x: expected an object"):
        require_object([], "x")


def test_rope_objects_are_merged() -> None:
    config = {
        "rope_scaling": {"type": "default", "rope_theta": 5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5, "factor": 1.0, "mrope_section": [1]},
    }
    assert unscaled_rope(config, "text")["mrope_section"] == [1]
    assert unscaled_rope({"rope_scaling": None}, "text") == {}


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        ({"rope_scaling": []}, "expected an object"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.type: expected 'default'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type: expected 'default'"),
        ({"rope_parameters": {"factor": 2}}, "scaled RoPE"),
        ({"rope_parameters": {"factor": None}}, "expected a real value"),
        ({"rope_scaling": {"rope_theta": 1}, "rope_parameters": {"rope_theta": 2}}, "conflicting RoPE field"),
    ],
)
def test_other_rope_is_refused(config: dict[str, object], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        unscaled_rope(config, "text")
