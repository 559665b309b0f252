"""Experts that the engine would refuse are named before anything is encoded."""

from __future__ import annotations

from collections.abc import Sequence

from fixtures.rm4 import model_of, nvfp4_source
import pytest

from ninferbuild.models.model import Parameter
from ninferbuild.plan import plan_parents
from ninferbuild.recipe import Recipe

LAYER = "text/layers/7/moe/"
ROUTED = [f"{LAYER}experts/{expert}/{role}" for expert in range(3) for role in ("gate", "up")]
SHARED = [f"{LAYER}shared/gate", f"{LAYER}shared/up"]
ROLE = "activation_input_divisor"


def experts(routed: Sequence[float] = (8,) * 6, shared: Sequence[float] = (8, 8), down: float = 6) -> Recipe:
    """A layer with three routed experts and a shared one, each bank a group."""
    divisors = dict(zip([*ROUTED, *SHARED], [*routed, *shared], strict=True))
    divisors |= {f"{LAYER}experts/{expert}/down": 6.0 for expert in range(3)} | {f"{LAYER}shared/down": down}
    parameters = []
    for index, (name, divisor) in enumerate(divisors.items()):
        source = nvfp4_source(name, divisor=2.0 + index, input_divisor=divisor)
        product = name.replace("/down", "/product") if name.endswith("/down") else "text/layers/7/ffn_input"
        parameters.append(Parameter(name, source.shape, source, inputs=(product,), direct_format="nvfp4"))
    recipe = Recipe(model_of(parameters))
    recipe.assign("*", method="import_encoded", activation_policy="AllowA4")
    recipe.group(ROUTED)
    recipe.group(SHARED)
    recipe.group(f"{LAYER}experts/*/down")
    return recipe


def refusal(recipe: Recipe) -> str:
    with pytest.raises(ValueError, match="activation divisors disagree") as caught:
        plan_parents(recipe)
    return str(caught.value)


def test_sources_may_disagree_inside_a_bank() -> None:
    """The parent gives all of them its smallest divisor."""
    planned = plan_parents(experts(routed=(9, 8, 8, 70, 8, 8), shared=(8, 12)))
    assert [parent.target.divisors for parent in planned.parents] == [6, 2, 3, 1]


def test_matrices_that_part_routed_and_shared_experts_are_named() -> None:
    message = refusal(experts(routed=(8, 8, 8, 5, 8, 7)))
    assert f"text/layers/7 gate and up: 8, but {ROUTED[3]} 5, {ROUTED[5]} 7." in message
    assert "recipe.use(" in message
    assert ROUTED[0] not in message


def test_every_bank_is_named() -> None:
    message = refusal(experts(shared=(8, 4), down=3))
    assert f"gate and up: 8, but {SHARED[1]} 4; text/layers/7 down: 6, but {LAYER}shared/down 3" in message


def test_an_override_of_one_use_parts_its_bank() -> None:
    recipe = experts()
    recipe.use(ROUTED[2], "text/layers/7/ffn_input", auxiliaries={ROLE: 3.0})
    assert f"8, but {ROUTED[2]} 3." in refusal(recipe)


def test_overrides_bring_banks_together() -> None:
    recipe = experts(shared=(8, 4))
    for name in SHARED:
        recipe.use(name, "text/layers/7/ffn_input", auxiliaries={ROLE: 8.0})
    assert len(plan_parents(recipe).parents) == 4


def test_uses_without_four_bit_activations_have_no_say() -> None:
    recipe = experts(shared=(8, 4))
    recipe.assign(SHARED, activation_policy="A16Only")
    assert len(plan_parents(recipe).parents) == 4


def test_other_parameters_may_disagree() -> None:
    parameters = []
    for index, name in enumerate(("text/layers/0/mlp/gate", "text/layers/0/mlp/up")):
        source = nvfp4_source(name, divisor=2.0 + index, input_divisor=4.0 + index)
        parameters.append(Parameter(name, source.shape, source, inputs=("x",), direct_format="nvfp4"))
    recipe = Recipe(model_of(parameters))
    recipe.assign("*", method="import_encoded", activation_policy="AllowA4")
    assert len(plan_parents(recipe).parents) == 2
