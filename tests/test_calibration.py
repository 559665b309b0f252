"""Measured activation divisors: sites, documents, and the uses that they are given to."""

from __future__ import annotations

import json
from pathlib import Path
import struct
from typing import Any

from fixtures.rm4 import model_of
import pytest
import torch

from ninferbuild.calibration import calibrate, read_calibration, site_of
from ninferbuild.models.model import Parameter
from ninferbuild.plan import plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.sources.logical import array_source

ROLES = {
    "attention/query": "mixer_input",
    "attention/output": "attention/gated_output",
    "mlp/gate": "ffn_input",
    "mlp/up": "ffn_input",
    "mlp/down": "mlp/product",
}
SITES = {
    "text/layers/3/attention/input_projection/input_scale_divisor": 3.0,
    "text/layers/3/mlp/gate_up_projection/input_scale_divisor": 0.1,
    "text/layers/3/mlp/down_projection/input_scale_divisor": 672,
}


def recipe_of(selectors: tuple[str, ...] = ("*/query", "*/mlp/*"), policy: str = "AllowA4") -> Recipe:
    parameters = []
    for role, used in ROLES.items():
        name = f"text/layers/3/{role}"
        source = array_source(torch.ones(128, 64), name)
        parameters.append(Parameter(name, (128, 64), source, inputs=(f"text/layers/3/{used}",)))
    recipe = Recipe(model_of(parameters))
    recipe.assign(selectors, format="nvfp4", method="nvfp4_maxabs", activation_policy=policy)
    return recipe


def document(path: Path, sites: Any) -> Path:
    path.write_text(json.dumps({"model": "any", "measured_sites": sites}))
    return path


def measured(values: dict[str, float]) -> dict[str, Any]:
    return {site: {"amax": 2688 / value, "input_scale_divisor": value} for site, value in values.items()}


def test_sites_of_parameters() -> None:
    layer = "text/layers/12/"
    for role in ("query", "key", "gate", "value"):
        assert site_of(f"{layer}attention/{role}") == f"{layer}attention/input_projection/input_scale_divisor"
    for role in ("query", "key", "value", "z"):
        assert site_of(f"{layer}gdn/{role}") == f"{layer}gdn/input_projection/input_scale_divisor"
    for block in ("attention", "gdn"):
        assert site_of(f"{layer}{block}/output") == f"{layer}{block}/output_projection/input_scale_divisor"
    assert site_of(f"{layer}mlp/up") == f"{layer}mlp/gate_up_projection/input_scale_divisor"
    assert site_of(f"{layer}mlp/down") == f"{layer}mlp/down_projection/input_scale_divisor"
    for name in ("text/output_head", f"{layer}input_norm", "mtp/layers/0/mlp/up", f"{layer}attention/query_norm"):
        assert site_of(name) is None


def test_every_use_gets_the_divisor_of_its_site(tmp_path: Path) -> None:
    recipe = recipe_of()
    with pytest.raises(ValueError, match="a calibrated activation divisor is required"):
        plan_parents(recipe)
    recipe.use("text/layers/3/mlp/up", "text/layers/3/ffn_input", auxiliaries={"activation_input_divisor": 5.0})
    calibrate(recipe, document(tmp_path / "calibration.json", measured(SITES)))
    planned = plan_parents(recipe)
    uses, objects = planned.uses([parent.checked.auxiliaries for parent in planned.parents if parent.checked])
    data = {item.id: item.data for item in objects}
    found = {
        use["parameter"].split("/", 3)[3]: data[use["auxiliaries"]["activation_input_divisor"]["object"]]
        for use in uses
        if "auxiliaries" in use
    }
    values = {"attention/query": 3.0, "mlp/gate": 0.1, "mlp/up": 5.0, "mlp/down": 672.0}
    assert found == {role: struct.pack("<f", value) for role, value in values.items()}


@pytest.mark.parametrize("policy", ["A16Only", "AllowA8"])
def test_uses_of_other_policies_need_no_site(tmp_path: Path, policy: str) -> None:
    recipe = recipe_of(policy=policy)
    calibrate(recipe, document(tmp_path / "calibration.json", {}))
    assert not recipe.auxiliary_overrides
    plan_parents(recipe)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_refuses_sites_of_another_recipe(tmp_path: Path, change: str) -> None:
    sites = dict(SITES)
    if change == "missing":
        gone, _ = sites.popitem()
    else:
        gone = "text/layers/4/mlp/down_projection/input_scale_divisor"
        sites[gone] = 2.0
    recipe = recipe_of()
    with pytest.raises(ValueError, match="calibration site set differs") as error:
        calibrate(recipe, document(tmp_path / "calibration.json", measured(sites)))
    assert gone in str(error.value)
    assert "calibration.json" in str(error.value)
    assert not recipe.auxiliary_overrides


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "must be JSON"),
        ("[]", "needs an object measured_sites"),
        ('{"measured_sites": []}', "needs an object measured_sites"),
        ('{"measured_sites": {"a": 1}}', "a: a measured site needs a number"),
        ('{"measured_sites": {"a": {"input_scale_divisor": true}}}', "a: a measured site needs a number"),
        ('{"measured_sites": {"a": {"input_scale_divisor": "1"}}}', "a: a measured site needs a number"),
        ('{"measured_sites": {"a": {"input_scale_divisor": 0}}}', "a: activation input divisor must be positive"),
        ('{"measured_sites": {"a": {"input_scale_divisor": 1e39}}}', "a: activation input divisor must be positive"),
    ],
)
def test_refuses_what_is_no_calibration(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=fragment) as error:
        read_calibration(path)
    assert str(path) in str(error.value)
