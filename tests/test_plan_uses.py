"""Use records and auxiliary tensors."""

from __future__ import annotations

from fixtures.rm4 import model_of, nvfp4_parameter, rm4
import pytest

from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, PreparedMethod, PrepareRequest
from ninferbuild.plan import PlannedRecipe, plan_parents
from ninferbuild.recipe import Recipe

DIVISOR = "activation_input_divisor"
TWO = AuxiliaryValue.activation_divisor(2.0)
WORD = AuxiliaryValue("bf16", (1,), b"\x80\x3f")


def planned_pair() -> PlannedRecipe:
    return plan_parents(Recipe(rm4(("query", "key"), ())))


def of_rules(planned: PlannedRecipe) -> list[dict[AuxiliaryKey, AuxiliaryValue]]:
    return [dict(parent.checked.auxiliaries) for parent in planned.parents if parent.checked is not None]


def test_uses_without_auxiliaries() -> None:
    planned = planned_pair()
    uses, objects = planned.uses(of_rules(planned))
    assert objects == []
    assert uses == [{"parameter": name, "input": "input", "activation_policy": "A16Only"} for name in ("query", "key")]


def test_values_of_methods_follow_those_of_the_recipe() -> None:
    planned = planned_pair()
    planned.recipe.use("key", "input", auxiliaries={DIVISOR: 2.0})
    uses, objects = planned.uses([{("query", "input", "signs"): WORD}, {("key", "input", "signs"): WORD}])
    assert [(item.id, item.format) for item in objects] == [("auxiliary/000000", "bf16"), ("auxiliary/000001", "fp32")]
    assert uses[0]["auxiliaries"] == {"signs": {"object": "auxiliary/000000"}}
    assert list(uses[1]["auxiliaries"].items()) == [
        (DIVISOR, {"object": "auxiliary/000001"}),
        ("signs", {"object": "auxiliary/000000"}),
    ]


def test_equal_values_of_two_roles_are_two_objects() -> None:
    planned = planned_pair()
    _, objects = planned.uses([{("query", "input", role): WORD for role in ("left", "right")}, {}])
    assert len(objects) == 2


def test_divisors_are_never_shared() -> None:
    planned = planned_pair()
    _, objects = planned.uses([{("query", "input", DIVISOR): TWO}, {("key", "input", DIVISOR): TWO}])
    assert [item.data for item in objects] == [TWO.data, TWO.data]


def test_an_equal_value_again_is_no_conflict() -> None:
    planned = planned_pair()
    table = {("query", "input", DIVISOR): TWO}
    assert len(planned.uses([table, table])[1]) == 1
    with pytest.raises(ValueError, match="conflicting auxiliary values for activation_input_divisor of query"):
        planned.uses([table, {("query", "input", DIVISOR): AuxiliaryValue.activation_divisor(4.0)}])


@pytest.mark.parametrize(
    ("role", "value", "message"),
    [
        (DIVISOR, AuxiliaryValue("bf16", (), b"\0\0"), "must be an FP32 scalar"),
        (DIVISOR, AuxiliaryValue("fp32", (1,), TWO.data), "must be an FP32 scalar"),
        (DIVISOR, AuxiliaryValue("fp32", (), b"\0\0\0\x80"), "positive finite"),
        ("signs", AuxiliaryValue("bf16", (2,), b"\x80\x3f"), "auxiliary data length is invalid"),
        ("signs", AuxiliaryValue("zz", (2,), b""), "unknown numeric format"),
        ("input_columns", AuxiliaryValue("int32", (128,), bytes(512)), "belongs to stored gguf_"),
    ],
)
def test_malformed_values_are_refused_while_planning(role: str, value: AuxiliaryValue, message: str) -> None:
    recipe = Recipe(rm4())
    recipe.use("query", "input", auxiliaries={role: value})
    with pytest.raises(ValueError, match=message):
        plan_parents(recipe)
    planned = planned_pair()
    with pytest.raises(ValueError, match=message):
        planned.uses([{("query", "input", role): value}, {}])


def test_values_must_be_auxiliary_values() -> None:
    planned = planned_pair()
    with pytest.raises(TypeError, match="provide an AuxiliaryValue"):
        planned.uses([{("query", "input", "signs"): b"\0\0"}, {}])  # type: ignore[dict-item]


def test_an_unknown_use() -> None:
    recipe = Recipe(rm4())
    recipe.auxiliary_overrides["query", "nope", "signs"] = WORD
    with pytest.raises(ValueError, match="unknown Use"):
        plan_parents(recipe)
    with pytest.raises(ValueError, match="unknown Use"):
        recipe.prepare(device="cpu")


def test_one_table_a_parent() -> None:
    with pytest.raises(ValueError, match="2 parents need as many"):
        planned_pair().uses([{}])


def test_auxiliaries_of_user_methods() -> None:
    def method(request: PrepareRequest) -> PreparedMethod:
        auxiliaries = {(*use, "signs"): WORD for item in request.inputs for use in item.uses}
        return request.job(produce=lambda output: None, auxiliaries=auxiliaries)

    recipe = Recipe(rm4(("query", "key"), ()))
    recipe.assign("query", method=method)
    prepared = recipe.prepare(device="cpu")
    assert prepared.uses[0]["auxiliaries"] == {"signs": {"object": "auxiliary/000000"}}
    assert "auxiliaries" not in prepared.uses[1]


class TestSharedNvfp4:
    def recipe(self, policy: str) -> Recipe:
        recipe = Recipe(model_of([nvfp4_parameter("one"), nvfp4_parameter("two")]))
        recipe.assign("*", method="import_encoded")
        recipe.share("two", "one")
        recipe.use("two", "input", activation_policy=policy)
        return recipe

    def test_allow_a4_needs_a_divisor_of_its_own(self) -> None:
        recipe = self.recipe("AllowA4")
        with pytest.raises(ValueError, match="two: provide its independent activation divisor"):
            recipe.prepare(device="cpu")
        recipe.use("two", "input", auxiliaries={DIVISOR: 3.0})
        prepared = recipe.prepare(device="cpu")
        assert [item.data.hex() for item in prepared.auxiliaries] == ["00004040"]
        assert prepared.uses[1]["auxiliaries"] == {DIVISOR: {"object": "auxiliary/000000"}}

    def test_other_policies_do_not(self) -> None:
        assert self.recipe("AllowA8").prepare(device="cpu").auxiliaries == []
