"""What each operation does to the recipe's state."""

from __future__ import annotations

from typing import Any

from fixtures.rm4 import array_parameter, doubling_rows, model_of, rm4
import pytest
import torch

from ninferbuild.method import AuxiliaryValue
from ninferbuild.models.model import Parameter
from ninferbuild.recipe import Recipe, Selection
from ninferbuild.rules import METHODS
from ninferbuild.sources.logical import array_source

Q4 = "q4_g64_fp16"


def layout_of(recipe: Recipe, name: str) -> list[tuple[int, int, str]]:
    return [(item.begin, item.end, item.format) for item in recipe.selections[name]]


def test_initial_state() -> None:
    model = rm4()
    recipe = Recipe(model)
    assert list(recipe.selections) == ["query", "key", "gate", "value"]
    assert recipe.selections["key"] == [
        Selection(0, 512, "bf16", None, METHODS["cast_direct"], model.parameters["key"].source, {})
    ]
    assert list(recipe.policies.items()) == [((name, "input"), "A16Only") for name in model.parameters]
    assert (recipe.aliases, recipe.auxiliary_overrides, recipe.explicit_groups) == ({}, {}, [])
    assert recipe.separate_parameters == set()


def test_initial_format_is_the_direct_format() -> None:
    source = array_source(torch.zeros(3), "decay")
    recipe = Recipe(model_of([Parameter("decay", (3,), source, direct_format="fp32")]))
    assert layout_of(recipe, "decay") == [(0, 3, "fp32")]


class TestAssign:
    def test_only_given_choices_change(self) -> None:
        recipe = Recipe(rm4())
        before = recipe.selections["query"][0]
        recipe.assign("query", format=Q4)
        after = recipe.selections["query"][0]
        assert after.format == Q4
        assert (after.method, after.source, after.layout, after.parameters) == (
            before.method,
            before.source,
            None,
            {},
        )
        recipe.assign("query", method="grouped_absmax")
        assert recipe.selections["query"][0].method is METHODS["grouped_absmax"]
        assert recipe.selections["query"][0].format == Q4

    def test_auto_layout_means_the_default(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", layout="contiguous_le_v1")
        assert recipe.selections["query"][0].layout == "contiguous_le_v1"
        recipe.assign("query", layout="auto")
        assert recipe.selections["query"][0].layout is None

    def test_parameters_are_a_deep_copy(self) -> None:
        recipe = Recipe(rm4())
        given: dict[str, Any] = {"bounds": [1, 2]}
        recipe.assign(["query", "key"], parameters=given)
        given["bounds"].append(3)
        assert [recipe.selections[name][0].parameters for name in ("query", "key")] == [{"bounds": [1, 2]}] * 2

    def test_rows_split_and_stay_split(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", rows=(1, 3), format=Q4)
        assert layout_of(recipe, "query") == [(0, 128, "bf16"), (128, 384, Q4), (384, 512, "bf16")]
        recipe.assign("query", rows=(0, 2), format="q8_g32_fp16")
        assert [piece[:2] for piece in layout_of(recipe, "query")] == [(0, 128), (128, 256), (256, 384), (384, 512)]
        assert [piece[2] for piece in layout_of(recipe, "query")] == ["q8_g32_fp16", "q8_g32_fp16", Q4, "bf16"]
        recipe.assign("query", format="bf16")
        assert [piece[2] for piece in layout_of(recipe, "query")] == ["bf16"] * 4

    def test_a_source_with_rows_has_the_full_shape(self) -> None:
        recipe = Recipe(rm4())
        other = array_source(doubling_rows(9), "other")
        recipe.assign("query", source=other, rows=(0, 1))
        assert [item.source.label for item in recipe.selections["query"]] == ["other", "query"]
        with pytest.raises(ValueError, match="override source shape differs"):
            recipe.assign("query", source=array_source(doubling_rows(9)[:1], "row"), rows=(0, 1))
        with pytest.raises(TypeError, match="must be a LogicalSource, not Tensor"):
            recipe.assign("query", source=doubling_rows(9))  # type: ignore[arg-type]

    def test_rows_alone_only_validate(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", rows=(1, 3))
        assert len(recipe.selections["query"]) == 1

    @pytest.mark.parametrize("rows", [(0, 5), (True, 2), (-1, 2), (2, 2), (3, 1), (0.0, 2)])
    def test_invalid_rows(self, rows: Any) -> None:
        with pytest.raises(ValueError, match=r"query: row range .* is invalid"):
            Recipe(rm4()).assign("query", rows=rows, format=Q4)

    def test_rows_need_two_bounds_and_a_leading_axis(self) -> None:
        recipe = Recipe(model_of([array_parameter("scalar", torch.tensor(1.0)), *rm4().parameters.values()]))
        with pytest.raises(ValueError, match="rows requires two bounds"):
            recipe.assign("scalar", rows=(0, 1))
        with pytest.raises(ValueError, match="rows requires two bounds"):
            recipe.assign("query", rows=(0, 1, 2))  # type: ignore[arg-type]

    def test_methods(self) -> None:
        recipe = Recipe(rm4())
        with pytest.raises(ValueError, match="unknown conversion method 'x'"):
            recipe.assign("query", method="x")
        with pytest.raises(TypeError, match="must be a conversion function"):
            recipe.assign("query", method=3)  # type: ignore[arg-type]

    def test_the_method_is_checked_before_the_selectors(self) -> None:
        with pytest.raises(ValueError, match="unknown conversion method"):
            Recipe(rm4()).assign("nope", method="x")

    def test_policy_applies_to_every_input_whatever_the_rows(self) -> None:
        model = model_of(
            [array_parameter("weight", doubling_rows(1), ("a", "b")), array_parameter("bias", torch.zeros(4))]
        )
        recipe = Recipe(model)
        recipe.assign("weight", rows=(0, 1), activation_policy="AllowA8")
        assert recipe.policies == {("weight", "a"): "AllowA8", ("weight", "b"): "AllowA8"}
        assert len(recipe.selections["weight"]) == 1
        recipe.assign("bias", activation_policy="not looked at")
        with pytest.raises(ValueError, match="unknown activation policy 'X'"):
            recipe.assign("weight", activation_policy="X")

    def test_names_before_a_failing_one_stay_changed(self) -> None:
        model = model_of([array_parameter("wide", doubling_rows(1)), array_parameter("short", doubling_rows(2)[:2])])
        recipe = Recipe(model)
        with pytest.raises(ValueError, match="short: row range"):
            recipe.assign("*", rows=(0, 4), format=Q4)
        assert layout_of(recipe, "wide") == [(0, 512, Q4)]
        assert layout_of(recipe, "short") == [(0, 256, "bf16")]


class TestUse:
    def test_policy_and_divisor(self) -> None:
        recipe = Recipe(rm4())
        recipe.use("query", "input", activation_policy="AllowA4", auxiliaries={"activation_input_divisor": 2.0})
        assert recipe.policies["query", "input"] == "AllowA4"
        expected = AuxiliaryValue("fp32", (), b"\x00\x00\x00\x40")
        assert recipe.auxiliary_overrides == {("query", "input", "activation_input_divisor"): expected}

    def test_setting_again_keeps_the_position(self) -> None:
        recipe = Recipe(rm4())
        signs = AuxiliaryValue("bf16", (1,), b"\x80\x3f")
        recipe.use("query", "input", auxiliaries={"activation_input_divisor": 2.0, "signs": signs})
        recipe.use("query", "input", auxiliaries={"activation_input_divisor": b"\x00\x00\x80\x3f"})
        assert [key[2] for key in recipe.auxiliary_overrides] == ["activation_input_divisor", "signs"]
        assert recipe.auxiliary_overrides["query", "input", "activation_input_divisor"].data == b"\x00\x00\x80\x3f"

    def test_errors_leave_the_state_alone(self) -> None:
        recipe = Recipe(rm4())
        with pytest.raises(ValueError, match="unknown mathematical use"):
            recipe.use("query", "nope")
        with pytest.raises(ValueError, match="unknown activation policy"):
            recipe.use("query", "input", activation_policy="X")
        with pytest.raises(TypeError, match="provide an AuxiliaryValue"):
            recipe.use("query", "input", activation_policy="AllowA4", auxiliaries={"r": 1.0})
        with pytest.raises(ValueError, match="positive finite"):
            recipe.use("query", "input", activation_policy="AllowA4", auxiliaries={"activation_input_divisor": 0.0})
        assert recipe.policies["query", "input"] == "A16Only"
        assert recipe.auxiliary_overrides == {}


class TestShare:
    def test_selections_are_copied_and_an_assign_ends_the_sharing(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("key", rows=(0, 1), format=Q4)
        recipe.share("query", "key")
        assert recipe.aliases == {"query": "key"}
        assert recipe.selections["query"] == recipe.selections["key"]
        recipe.assign("key", format="bf16")
        assert layout_of(recipe, "query") == [(0, 128, Q4), (128, 512, "bf16")]
        recipe.assign("query", activation_policy="AllowA8")
        assert recipe.aliases == {"query": "key"}
        recipe.assign("query", layout="auto")
        assert recipe.aliases == {}
        assert layout_of(recipe, "query") == [(0, 128, Q4), (128, 512, "bf16")]

    def test_chains_are_followed(self) -> None:
        recipe = Recipe(rm4())
        recipe.share("gate", "key")
        recipe.share("query", "gate")
        assert recipe.resolve("query") == "key"

    def test_cycles(self) -> None:
        recipe = Recipe(rm4())
        with pytest.raises(ValueError, match="cyclic weight sharing"):
            recipe.share("query", "query")
        recipe.share("query", "key")
        with pytest.raises(ValueError, match="cyclic weight sharing"):
            recipe.share("key", "query")
        recipe.share("gate", "query")
        with pytest.raises(ValueError, match="cyclic weight sharing"):
            recipe.share("query", "gate")  # reaches query on the way to key
        assert recipe.aliases == {"query": "key", "gate": "query"}

    def test_both_must_exist_with_one_shape(self) -> None:
        recipe = Recipe(model_of([array_parameter("a", torch.zeros(4)), array_parameter("b", torch.zeros(2, 2))]))
        with pytest.raises(ValueError, match="shared parameters must exist"):
            recipe.share("a", "c")
        with pytest.raises(ValueError, match="equal logical shapes"):
            recipe.share("a", "b")


def test_separate_and_group_keep_match_order() -> None:
    recipe = Recipe(rm4())
    recipe.separate(["k*", "gate"])
    assert recipe.separate_parameters == {"key", "gate"}
    recipe.group(["v*", "query"], shape=[2, 512])
    recipe.group("gate")
    assert recipe.explicit_groups == [(("value", "query"), (2, 512)), (("gate",), None)]
