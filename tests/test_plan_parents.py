"""Planning: which selections become one parent, what is refused, and that users' methods are left alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from fixtures.rm4 import (
    array_parameter,
    doubling_rows,
    model_of,
    nvfp4_parameter,
    nvfp4_source,
    refuse_values,
    rm4,
)
import numpy as np
import pytest
import torch

from ninferbuild.method import PreparedMethod, PrepareRequest
from ninferbuild.models.model import Parameter
from ninferbuild.plan import Fragment, plan_parents, prepare_user_method
from ninferbuild.recipe import Recipe
from ninferbuild.rules import METHODS
from ninferbuild.sources.logical import LogicalSource

Q4, Q8 = "q4_g64_fp16", "q8_g32_fp16"


def nothing(request: PrepareRequest) -> PreparedMethod:
    return request.job(produce=lambda output: None)


def parent_names(recipe: Recipe) -> list[tuple[str, ...]]:
    return [parent.names for parent in plan_parents(recipe).parents]


class TestAutomaticGroups:
    def test_the_first_eligible_group_wins(self) -> None:
        assert parent_names(Recipe(rm4())) == [("query", "key", "gate", "value")]

    def test_separate_skips_groups_as_a_whole(self) -> None:
        recipe = Recipe(rm4())
        recipe.separate("key")
        planned = plan_parents(recipe)
        assert [parent.names for parent in planned.parents] == [("gate", "value"), ("query",), ("key",)]
        assert planned.bindings["query"] == {"object": "weight/000001"}
        assert list(planned.bindings) == ["query", "key", "gate", "value"]

    def test_an_explicit_layout_differs_from_the_default(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", layout="contiguous_le_v1")
        assert parent_names(recipe) == [("gate", "value"), ("query",), ("key",)]
        recipe.assign("query", layout="auto")
        assert parent_names(recipe) == [("query", "key", "gate", "value")]

    def test_a_user_method_is_not_grouped_unless_asked(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("*", method=nothing)
        assert parent_names(recipe) == [("query",), ("key",), ("gate",), ("value",)]
        recipe.group(["query", "key"])
        assert parent_names(recipe) == [("query", "key"), ("gate",), ("value",)]

    def test_a_namesake_of_a_rule_is_a_user_method(self) -> None:
        def cast_direct(request: PrepareRequest) -> PreparedMethod:
            return nothing(request)

        recipe = Recipe(rm4())
        recipe.assign("*", method=cast_direct)
        planned = plan_parents(recipe)
        assert [parent.method_name for parent in planned.parents] == ["cast_direct"] * 4
        assert [parent.rule for parent in planned.parents] == [None] * 4

    def test_aliases_and_split_parameters_are_skipped(self) -> None:
        recipe = Recipe(rm4())
        recipe.share("key", "query")
        recipe.assign("gate", rows=(0, 1), format="bf16")
        assert parent_names(recipe) == [("query",), ("gate",), ("gate",), ("value",)]

    def test_unequal_method_parameters_keep_apart(self) -> None:
        recipe = Recipe(rm4(("query", "key"), (("query", "key"),)))
        recipe.assign("*", format=Q4, method="grouped_absmax")
        recipe.assign("key", parameters={"a": 1})
        with pytest.raises(ValueError, match=r"^key: .*no numerical parameters"):
            plan_parents(recipe)

    def test_array_parameters_are_equal_only_to_themselves(self) -> None:
        recipe = Recipe(rm4(("query", "key"), ()))
        recipe.group("*")
        recipe.assign("*", method=nothing, parameters={"weights": np.arange(3)})
        assert parent_names(recipe) == [("query", "key")]
        recipe.assign("key", parameters={"weights": np.arange(3)})
        with pytest.raises(ValueError, match="incompatible formats, layouts or methods"):
            plan_parents(recipe)

    def test_a_group_of_unknown_parameters(self) -> None:
        model = rm4()
        model.packing_groups.append(("query", "late"))
        with pytest.raises(ValueError, match=r"names late; call recipe\.add_parameter"):
            plan_parents(Recipe(model))


class TestNvfp4:
    def model(self, *divisors: float | None, rows: tuple[int, ...] = (128, 128)) -> Any:
        pairs = zip(("one", "two"), divisors, rows, strict=True)
        parameters = [nvfp4_parameter(name, divisor=divisor, rows=count) for name, divisor, count in pairs]
        return model_of(parameters, [("one", "two")])

    def imported(self, *divisors: float | None, rows: tuple[int, ...] = (128, 128)) -> Recipe:
        recipe = Recipe(self.model(*divisors, rows=rows))
        recipe.assign("*", method="import_encoded")
        return recipe

    def test_equal_divisors_pack(self) -> None:
        (parent,) = plan_parents(self.imported(2.0, 2.0)).parents
        assert (parent.names, parent.target.divisors) == (("one", "two"), 1)

    def test_unequal_divisors_pack_only_on_request(self) -> None:
        recipe = self.imported(2.0, 4.0)
        assert parent_names(recipe) == [("one",), ("two",)]
        recipe.group(("one", "two"))
        (parent,) = plan_parents(recipe).parents
        assert (parent.target.shape, parent.target.divisors) == ((256, 64), 2)

    def test_stacked_matrices_have_equal_row_counts(self) -> None:
        recipe = self.imported(2.0, 4.0, rows=(128, 256))
        recipe.group(("one", "two"))
        with pytest.raises(ValueError, match="equal row counts"):
            plan_parents(recipe)

    def test_unknown_divisors_are_not_stacked(self) -> None:
        recipe = self.imported(2.0, None)
        recipe.assign("*", method=nothing)
        recipe.group(("one", "two"))
        (parent,) = plan_parents(recipe).parents
        assert parent.target.divisors == 1

    def test_what_a_divisor_accessor_raises_passes_through(self) -> None:
        def broken() -> bytes:
            raise LookupError("no such tensor")

        source = nvfp4_source("three")
        broken_source = LogicalSource(source.shape, "three", refuse_values, source.read_encoded, broken)
        recipe = self.imported(2.0, 2.0)
        recipe.assign("two", source=broken_source)
        with pytest.raises(LookupError, match="no such tensor"):
            plan_parents(recipe)

    def test_the_shape_must_fit_whole_tiles(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", format="nvfp4", method="import_encoded")
        with pytest.raises(ValueError, match="N divisible by 128"):
            plan_parents(recipe)

    def test_values_are_not_read(self) -> None:
        recipe = self.imported(2.0, 2.0)
        assert recipe.selections["one"][0].source.read_values is refuse_values
        assert plan_parents(recipe).parents[0].rule is METHODS["import_encoded"]


class TestExplicitGroups:
    def test_overlap_and_aliases(self) -> None:
        recipe = Recipe(rm4())
        recipe.group(["query", "key"])
        recipe.group(["gate", "key"])
        with pytest.raises(ValueError, match="overlap or include a shared alias: key"):
            plan_parents(recipe)
        recipe = Recipe(rm4())
        recipe.share("key", "query")
        recipe.group(["query", "key"])
        with pytest.raises(ValueError, match="overlap or include a shared alias: key"):
            plan_parents(recipe)

    def test_split_members(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("key", rows=(0, 1), format="bf16")
        recipe.group(["query", "key"])
        with pytest.raises(ValueError, match="requires unsplit parameters; key"):
            plan_parents(recipe)

    def test_different_formats(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("key", format="fp32")
        recipe.group(["query", "key"])
        with pytest.raises(ValueError, match="incompatible formats"):
            plan_parents(recipe)

    def test_residencies_do_not_mix_but_may_share(self) -> None:
        parameters = [
            array_parameter("text/w", doubling_rows(1)),
            array_parameter("mtp/w", doubling_rows(1), residency="mtp"),
        ]
        recipe = Recipe(model_of(parameters))
        recipe.group("*")
        with pytest.raises(ValueError, match="independently selected"):
            plan_parents(recipe)
        recipe = Recipe(model_of(parameters))
        recipe.share("mtp/w", "text/w")
        assert plan_parents(recipe).bindings["mtp/w"] == {"object": "weight/000000"}

    def test_shapes(self) -> None:
        recipe = Recipe(rm4())
        recipe.group(["query", "key"], shape=(3, 3))
        with pytest.raises(ValueError, match="element count"):
            plan_parents(recipe)
        model = model_of([array_parameter("wide", doubling_rows(1)), array_parameter("flat", torch.zeros(128))])
        recipe = Recipe(model)
        recipe.group("*")
        with pytest.raises(ValueError, match=r"compatible rows or an explicit parent shape \(storing wide, flat\)"):
            plan_parents(recipe)
        recipe = Recipe(model)
        recipe.group("*", shape=(5, 128))
        assert plan_parents(recipe).parents[0].target.shape == (5, 128)

    def test_long_groups_are_named_briefly(self) -> None:
        names = [f"expert{index}" for index in range(40)]
        recipe = Recipe(model_of([array_parameter(name, torch.zeros(1, 4)) for name in names]))
        recipe.assign("*", format=Q4)
        recipe.group(names)
        with pytest.raises(ValueError, match=r"^expert0,expert1,expert2,expert3,… \(40 parameters\): .*direct target"):
            plan_parents(recipe)


class TestRefusals:
    def test_unknown_format(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", format="zz")
        with pytest.raises(ValueError, match=r"unknown numeric format 'zz'.*\(storing query\)"):
            plan_parents(recipe)

    def test_a_format_without_its_method(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", format=Q4)
        with pytest.raises(ValueError, match=r"^query: .*direct target format"):
            plan_parents(recipe)

    def test_a_layout_of_another_format(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", layout="row_scale_v1")
        with pytest.raises(ValueError, match="does not accept format"):
            plan_parents(recipe)

    def test_parameters_of_a_rule_without_any(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", parameters={"a": 1})
        with pytest.raises(ValueError, match=r"^query: .*no numerical parameters"):
            plan_parents(recipe)

    def test_incomplete_selections(self) -> None:
        recipe = Recipe(rm4(groups=()))
        recipe.assign("query", rows=(1, 3), format="bf16")
        del recipe.selections["query"][1]
        with pytest.raises(ValueError, match="query: incomplete logical coverage at element 128"):
            plan_parents(recipe)
        del recipe.selections["query"][1]
        with pytest.raises(ValueError, match="query: coverage size is incorrect"):
            plan_parents(recipe)


class TestUserMethods:
    def test_planning_does_not_call_them(self) -> None:
        def explode(request: PrepareRequest) -> PreparedMethod:
            raise AssertionError("called while planning")

        recipe = Recipe(rm4())
        recipe.assign("query", method=explode)
        parent = plan_parents(recipe).parents[-2]
        assert (parent.names, parent.rule, parent.checked) == (("query",), None, None)

    def test_the_request(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign(("query", "key"), method=nothing, parameters={"clip": 0.5}, activation_policy="AllowA8")
        recipe.use("key", "input", auxiliaries={"activation_input_divisor": 1.0})
        recipe.group(("key", "query"), shape=(2, 512))
        parent = plan_parents(recipe, rows_per_chunk=7).parents[0]
        request = parent.request
        assert (request.target.id, request.target.shape, request.target.layout) == (
            "weight/000000",
            (2, 512),
            "contiguous_le_v1",
        )
        assert [(item.parameter, item.source.label, item.uses) for item in request.inputs] == [
            ("key", "key", (("key", "input"),)),
            ("query", "query", (("query", "input"),)),
        ]
        assert dict(request.policies) == recipe.policies
        assert dict(request.auxiliary_overrides) == recipe.auxiliary_overrides
        assert (request.parameters, request.rows_per_chunk, request.device) == ({"clip": 0.5}, 7, "")
        assert parent.labels == ("key", "query")
        assert parent.fragments == (Fragment("key", 0, 0, 512), Fragment("query", 0, 512, 1024))

    def test_a_request_is_a_snapshot(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", method=nothing, parameters={"clip": 0.5})
        parent = next(parent for parent in plan_parents(recipe).parents if parent.rule is None)
        recipe.use("query", "input", activation_policy="AllowA4")
        assert parent.request.policies["query", "input"] == "A16Only"
        parent.request.parameters["clip"] = 1.0  # type: ignore[index]
        assert recipe.selections["query"][0].parameters == {"clip": 0.5}
        with pytest.raises(TypeError):
            parent.request.policies["query", "input"] = "AllowA8"  # type: ignore[index]

    def test_the_device_is_given_when_they_are_called(self) -> None:
        devices = []

        class Method:
            def __call__(self, request: PrepareRequest) -> PreparedMethod:
                devices.append(request.device)
                return nothing(request)

        recipe = Recipe(rm4())
        recipe.assign("query", method=Method())
        parent = next(parent for parent in plan_parents(recipe).parents if parent.rule is None)
        assert parent.method_name == "Method"
        assert isinstance(prepare_user_method(parent, "cpu"), PreparedMethod)
        assert devices == ["cpu"]

    def test_errors_carry_the_names(self) -> None:
        def broken(request: PrepareRequest) -> PreparedMethod:
            raise OSError("disk on fire")

        def keyed(request: PrepareRequest) -> PreparedMethod:
            raise KeyError("clip")

        def forgetful(request: PrepareRequest) -> None:
            return None

        recipe = Recipe(rm4())
        recipe.group(["query", "key"])
        recipe.assign(["query", "key"], method=broken)
        with pytest.raises(ValueError, match=r"^query,key: disk on fire$") as caught:
            recipe.prepare(device="cpu")
        assert isinstance(caught.value.__cause__, OSError)
        recipe.assign(["query", "key"], method=keyed)
        with pytest.raises(ValueError, match=r"^query,key: KeyError: 'clip'$"):
            recipe.prepare(device="cpu")
        recipe.assign(["query", "key"], method=forgetful)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"query,key: method forgetful must return request\.job"):
            recipe.prepare(device="cpu")

    def test_jobs_of_a_prepared_recipe(self) -> None:
        recipe = Recipe(rm4())
        recipe.assign("query", method=nothing, parameters={"clip": 0.5})
        jobs = {job.parameters: job for job in recipe.prepare(device="cpu", rows_per_chunk=5).weights}
        job = jobs["query",]
        assert (job.method_name, job.method_parameters, job.sources) == ("nothing", {"clip": 0.5}, ("query",))
        assert jobs["gate", "value"].method_name == "cast_direct"


def test_source_errors_surface_while_planning() -> None:
    def read_values(begin: int, end: int) -> torch.Tensor:
        raise ValueError("missing source tensor x")

    source = LogicalSource((4,), "x", read_values)
    with pytest.raises(ValueError, match=r"^bias: missing source tensor x$"):
        plan_parents(Recipe(model_of([Parameter("bias", (4,), source)])))


def test_planning_does_not_import_torch() -> None:
    program = """
import sys
import numpy as np
from ninferbuild.models.model import Model, Parameter
from ninferbuild.plan import plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.sources.logical import array_source
model = Model({"text": {"config": {}}}, packing_groups=[("a", "b")])
for name in "abc":
    source = array_source(np.zeros((4, 128), np.float32), name)
    model.add(Parameter(name, (4, 128), source, inputs=("x",)))
recipe = Recipe(model)
recipe.assign("*", format="q4_g64_fp16", method="grouped_absmax")
recipe.assign("c", rows=(0, 2), format="fp8_e4m3fn_row_bf16", method="fp8_row_maxabs")
recipe.assign("c", rows=(2, 3), format="bf16", method="cast_direct")
assert len(plan_parents(recipe).parents) == 4
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
