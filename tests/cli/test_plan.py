"""``plan`` and ``params``: which target they are about. What they show is tested with real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
import sys
from types import ModuleType
from typing import Any

import pytest

from ninferbuild.target import Target


class Plan:
    notes = ("a note",)

    def __init__(self, target: Target):
        self.target = target

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target.name}


@pytest.fixture
def planned(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Target, Any]]:
    """Targets that were planned or whose parameters were listed, with the options."""
    calls: list[tuple[Target, Any]] = []
    module: Any = ModuleType("ninferbuild.preview")

    def plan(target: Target, **options: Any) -> Plan:
        calls.append((target, options))
        return Plan(target)

    def parameters(target: Target, pattern: str | None) -> list[dict[str, Any]]:
        calls.append((target, pattern))
        row: dict[str, Any] = {"name": "n", "shape": [2, 3], "inputs": ["a", "b"], "format": "bf16", "method": "m"}
        row |= {"parent": None, "auxiliaries": []}
        return [row, row | {"shape": [], "inputs": [], "auxiliaries": ["s", "t"] if pattern == "y" else []}]

    module.plan = plan
    module.parameters = parameters
    monkeypatch.setitem(sys.modules, "ninferbuild.preview", module)
    return calls


def test_targets(project: Path, run: Any, planned: list[tuple[Target, Any]]) -> None:
    ran = run("plan", "b", "a", "--hash", "--rehash", "--device", "cuda:7", "--json")
    assert ran.err == "a note\n" * 2
    assert [json.loads(line) for line in ran.out.splitlines()] == [{"target": "b"}, {"target": "a"}]
    assert [(target.name, target.device) for target, _ in planned] == [("b", "cuda:7"), ("a", "cuda:7")]
    assert planned[0][1] == {"hash_sources": True, "device": None, "rehash": True, "explain": False}


def test_options_of_convert(project: Path, run: Any, planned: list[tuple[Target, Any]]) -> None:
    assert run("plan", "--model", "model", "--recipe", "r", "--components", "text,mtp", "--json").code == 0
    assert run("plan", "--model", "model", "--recipe", "r", "--out", "o/z", "--json").code == 0
    assert [str(target.out) for target, _ in planned] == ["model.ninfer", "o/z"]
    assert planned[0][0].components == ("text", "mtp")


@pytest.mark.parametrize("args", [("a", "--recipe", "r"), ("-f", "ninferbuild.toml", "--model", "model")])
def test_not_both(project: Path, run: Any, planned: list[tuple[Target, Any]], args: tuple[str, ...]) -> None:
    run("plan", *args).failed(2, "not both", "--set")
    assert not planned


def test_missing_options(project: Path, run: Any, planned: list[tuple[Target, Any]]) -> None:
    run("plan", "--model", "model").failed(2, "--recipe", "required")
    run("plan", "--recipe", "r").failed(2, "required")


def test_dry_run(project: Path, run: Any, planned: list[tuple[Target, Any]]) -> None:
    assert run("build", "a", "--dry-run", "--json", "--device", "cpu", "--rehash").out == '{"target": "a"}\n'
    assert planned[0][1] == {"hash_sources": False, "device": "cpu", "rehash": True, "explain": False}


def test_params(project: Path, run: Any, planned: list[tuple[Target, Any]]) -> None:
    assert run("params").out.splitlines() == [
        "name  shape  inputs  format  method  parent",
        "n     2 × 3  a, b    bf16    m       -",
        "n     -      -       bf16    m       -",
    ]
    run("params", "b")
    run("params", "b", "x/*")
    run("params", "x/*", "--model", "model", "--recipe", "r")
    assert [(target.name, pattern) for target, pattern in planned] == [
        ("a", None),
        ("b", None),
        ("b", "x/*"),
        ("model.ninfer", "x/*"),
    ]
    assert len(json.loads(run("params", "--json").out)) == 2


def test_params_with_auxiliaries(project: Path, run: Any, planned: list[tuple[Target, Any]]) -> None:
    assert run("params", "a", "y").out.splitlines() == [
        "name  shape  inputs  format  method  parent  auxiliaries",
        "n     2 × 3  a, b    bf16    m       -       -",
        "n     -      -       bf16    m       -       s, t",
    ]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("a", "x", "y"), "one pattern at most"),
        (("x/*",), "unknown target 'x/*'"),
        (("a", "--model", "model"), "--recipe"),
    ],
)
def test_params_refuses(
    project: Path, run: Any, planned: list[tuple[Target, Any]], args: tuple[str, ...], part: str
) -> None:
    run("params", *args).failed(2, part)
    assert not planned
