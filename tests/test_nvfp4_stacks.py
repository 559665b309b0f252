"""Stacks of NVFP4 matrices: who decides how many divisors a parent has, and what each use is given."""

from __future__ import annotations

from collections.abc import Sequence
import struct

from fixtures.rm4 import model_of, nvfp4_parameter, payload
import pytest

from ninferbuild.method import AuxiliaryKey
from ninferbuild.plan import plan_parents
from ninferbuild.recipe import PreparedRecipe, Recipe
from ninferbuild.rules import METHODS

NAMES = ("one", "two", "three")
ROLE = "activation_input_divisor"


def stack(
    divisors: Sequence[float | None],
    inputs: Sequence[float | None] | None = None,
    *,
    rows: Sequence[int] | None = None,
    policy: str = "A16Only",
    explicit: bool = True,
) -> Recipe:
    """Matrices (128, 64) with these weight and input divisors, imported; one group if ``explicit``."""
    names = NAMES[: len(divisors)]
    inputs, rows = inputs or [None] * len(names), rows or [128] * len(names)
    parameters = [
        nvfp4_parameter(name, rows=count, divisor=divisor, input_divisor=activation)
        for name, count, divisor, activation in zip(names, rows, divisors, inputs, strict=True)
    ]
    recipe = Recipe(model_of(parameters, [names]))
    recipe.assign("*", method="import_encoded", activation_policy=policy)
    if explicit:
        recipe.group(names)
    return recipe


def words(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize(
    ("divisors", "stored"),
    [((2.0, 4.0), (2.0, 4.0)), ((2.0, 2.0, 4.0), (2.0, 2.0, 4.0)), ((2.0, 2.0), (2.0,)), ((2.0, 2.0, 2.0), (2.0,))],
)
def test_a_group_stores_a_word_a_matrix_unless_all_agree(
    divisors: tuple[float, ...], stored: tuple[float, ...]
) -> None:
    (job,) = stack(divisors).prepare(device="cpu").weights
    assert job.spec.divisors == len(stored)
    assert job.spec.shape == (128 * len(divisors), 64)
    size = 128 * len(divisors) * 36
    assert payload(job)[size:] == words(*stored)


def test_matrices_of_other_heights_need_one_divisor() -> None:
    (job,) = stack((2.0, 2.0), rows=(256, 128)).prepare(device="cpu").weights
    assert (job.spec.shape, job.spec.divisors) == ((384, 64), 1)
    with pytest.raises(
        ValueError,
        match="NVFP4 sources quantised against different divisors must be complete matrices with equal row counts",
    ):
        plan_parents(stack((2.0, 4.0), rows=(256, 128)))


def test_automatic_packing_keeps_unequal_divisors_apart() -> None:
    parents = plan_parents(stack((2.0, 4.0), explicit=False)).parents
    assert [(parent.names, parent.target.divisors) for parent in parents] == [(("one",), 1), (("two",), 1)]


@pytest.mark.parametrize(("divisors", "unknown"), [((2.0, None), "two"), ((None, None), "one")])
def test_automatic_packing_keeps_unknown_divisors_apart(divisors: tuple[float | None, ...], unknown: str) -> None:
    with pytest.raises(ValueError, match=f"^{unknown}: the NVFP4 weight divisor must be finite and positive"):
        plan_parents(stack(divisors, explicit=False))  # one after the other, so the message names one matrix


@pytest.mark.parametrize("chunk", [1, 200, 512, 4096])
def test_the_chunk_size_does_not_matter(chunk: int) -> None:
    recipe = stack((2.0, 4.0, 3.0), rows=(384, 384, 384))
    (job,) = recipe.prepare(device="cpu", rows_per_chunk=chunk).weights
    (other,) = recipe.prepare(device="cpu").weights
    assert payload(job) == payload(other)


def activations(recipe: Recipe) -> dict[str, tuple[str, bytes]]:
    """Parameter → (object of its activation divisor, the word in it)."""
    prepared: PreparedRecipe = recipe.prepare(device="cpu")
    data = {item.id: item.data for item in prepared.auxiliaries}
    named = {use["parameter"]: use["auxiliaries"][ROLE]["object"] for use in prepared.uses if "auxiliaries" in use}
    return {name: (identifier, data[identifier]) for name, identifier in named.items()}


@pytest.mark.parametrize(
    ("divisors", "inputs", "smallest"),
    [((2.0, 4.0, 3.0), (7, 5, 9), 5), ((2.0, 2.0), (7, 5), 5), ((2.0,), (7,), 7), ((2.0, 4.0), (None, 6), 6)],
)
def test_every_use_owns_an_object_with_the_smallest_divisor(
    divisors: tuple[float, ...], inputs: tuple[float | None, ...], smallest: float
) -> None:
    found = activations(stack(divisors, inputs, policy="AllowA4"))
    assert {word for _, word in found.values()} == {words(smallest)}
    assert len({identifier for identifier, _ in found.values()}) == len(found) == len(divisors)


def test_an_override_wins_for_its_use_alone() -> None:
    recipe = stack((2.0, 4.0, 3.0), (7, 5, 9), policy="AllowA4")
    recipe.use("three", "input", auxiliaries={ROLE: 3.0})
    found = {name: word for name, (_, word) in activations(recipe).items()}
    assert found == {"one": words(5), "two": words(5), "three": words(3)}


@pytest.mark.parametrize("value", [2.5, words(2.5)])
def test_an_override_is_a_number_or_four_bytes(value: float | bytes) -> None:
    recipe = stack((2.0,), policy="A16Only")
    recipe.use("one", "input", auxiliaries={ROLE: value})
    assert activations(recipe)["one"][1] == words(2.5)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="activation input divisor must be positive finite FP32"):
            recipe.use("one", "input", auxiliaries={ROLE: bad})


def test_uses_of_wider_activations_need_none() -> None:
    assert activations(stack((2.0, 4.0), policy="A16Only")) == {}
    assert activations(stack((2.0, 4.0), (7, 5), policy="AllowA8")) == {}


def test_four_bit_activations_need_one() -> None:
    with pytest.raises(ValueError, match="one: supply an activation divisor for AllowA4"):
        plan_parents(stack((2.0, 4.0), policy="AllowA4"))


def test_an_alias_of_four_bit_activations_needs_its_own() -> None:
    recipe = stack((2.0, 2.0), (7, 5), policy="AllowA4")
    recipe.explicit_groups.clear()
    recipe.share("two", "one")
    planned = plan_parents(recipe)
    tables: list[dict[AuxiliaryKey, object]] = [dict(p.checked.auxiliaries) for p in planned.parents if p.checked]
    with pytest.raises(ValueError, match="two: provide its independent activation divisor"):
        planned.uses(tables)  # type: ignore[arg-type]
    recipe.use("two", "input", auxiliaries={ROLE: 4.0})
    assert {name: word for name, (_, word) in activations(recipe).items()} == {"one": words(7), "two": words(4)}


def test_a_method_that_reads_values_makes_one_divisor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources may be NVFP4 too, with divisors that have nothing to do with the parent's."""
    rule = METHODS["grouped_absmax"]
    monkeypatch.setattr(type(rule), "check", lambda self, request: None)
    recipe = stack((2.0, 4.0))
    recipe.assign("*", method=rule)
    for explicit in (True, False):
        if not explicit:
            recipe.explicit_groups.clear()
        (parent,) = plan_parents(recipe).parents
        assert (parent.names, parent.target.divisors) == (("one", "two"), 1)
