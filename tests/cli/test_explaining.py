"""``--explain``, ``diff`` and ``graph`` on the command line."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
from typing import Any

from fixtures import fx
import pytest

DOWN = "text/layers/3/mlp/down"

TARGETS = """
[defaults]
model = "fx"
recipe = "qwen3_6_27b"
components = ["text"]
device = "cpu"

[targets.a]
[targets.b]
[[targets.b.assign]]
select = "text/layers/3/mlp/down"
format = "q6_g64_fp16"
"""

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint, two targets and a cache."""
    root = tmp_path_factory.mktemp("explaining")
    fx.write_dense(root / "fx")
    (root / "ninferbuild.toml").write_text(f'{TARGETS}\n[cache]\ndir = "cache"\n')
    return root


@pytest.fixture
def here(built: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(built)
    assert run("build", "a", "-q").code == 0
    return built


def test_build_explains(here: Path, run: Run) -> None:
    ran = run("build", "a", "--explain", "--no-link", "--assign", f"{DOWN}=q8_g32_fp16", "--rerun")
    assert ran.code == 0, ran
    assert "  format: q5_g64_fp16 → q8_g32_fp16" in ran.err.splitlines()
    assert "  asked for with --rerun" in ran.err.splitlines()
    quiet = run("build", "a", "--explain", "-q", "--no-link", "--assign", f"{DOWN}=q8_g32_fp16", "--rerun")
    assert (quiet.code, quiet.out) == (0, "")
    assert "  asked for with --rerun" in quiet.err.splitlines()
    assert "actions: " in ran.err
    assert "actions: " not in quiet.err
    ran = run("build", "a", "--json", "--explain")
    assert json.loads(ran.out)["explain"] == []


def test_plan_explains(here: Path, run: Run) -> None:
    ran = run("plan", "a", "--hash", "--explain", "--assign", f"{DOWN}=q4_g64_fp16", "--json")
    assert ran.code == 0, ran
    (item,) = json.loads(ran.out)["explain"]
    assert (item["name"], item["parameters"], item["state"]) == (DOWN, [DOWN], "run")
    assert item["lines"][0] == "format: q5_g64_fp16 → q4_g64_fp16"
    ran = run("plan", "a", "--hash", "--explain")
    assert "no action would run: every payload is cached" in ran.out.splitlines()
    ran = run("build", "b", "--dry-run", "--explain")
    assert "first build of this target\n" in ran.out


def test_diff_of_targets_and_artifacts(here: Path, run: Run) -> None:
    ran = run("diff", "a", "b", "--hash")
    assert ran.code == 3
    assert ran.out.splitlines() == [
        DOWN,
        "  format: q5_g64_fp16 → q6_g64_fp16",
        "  bytes: 21504 → 25600",
        "A a (target), B b (target)",
        "not equal: objects: 54 equal, 1 different",
    ]
    ran = run("diff", "a", "a.ninfer", "--hash")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "equal: objects: 55 equal")
    ran = run("diff", "a.ninfer", "b", "--json", "--hash")
    found = json.loads(ran.out)
    assert (ran.code, found["equal"], found["equal_objects"]) == (3, False, 54)
    assert [item["name"] for item in found["objects"]] == [DOWN]
    ran = run("diff", "-q", "./a.ninfer", "a.ninfer", "--no-payload")
    assert ran.code == 0
    assert ran.out.splitlines()[-1].endswith("(payloads not compared)")


def test_diff_of_what_is_neither(here: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("diff", "nothing", "a").failed(2, "nothing", "ninferbuild.toml")
    run("diff", "a", "fx/config.json").failed(1, "fx/config.json")
    monkeypatch.chdir(tmp_path)
    run("diff", "a", "b").failed(2, "a is neither a target nor an artifact")


def test_graph(here: Path, run: Run, tmp_path: Path) -> None:
    ran = run("graph", "a")
    assert (ran.code, ran.out.splitlines()[0]) == (0, "digraph actions {")
    nodes = json.loads(run("graph", "a", "--json").out)["nodes"]
    assert {node["kind"] for node in nodes} == {"source", "encode", "resource", "link"}
    out = tmp_path / "graph.mmd"
    ran = run("graph", "a", "--format", "mermaid", "--out", out, "--assign", f"{DOWN}=q8_g32_fp16")
    assert (ran.code, ran.out) == (0, f"wrote {out}\n")
    assert "q8_g32_fp16 [128, 256]" in out.read_text()
    run("graph", "a", "--json", "--format", "dot").failed(2, "--json")
    run("graph").failed(2, "choose one of a, b")
    run("graph", "a", "--out", tmp_path / "none" / "x").failed(1, "none")


@pytest.mark.parametrize("command", ["diff", "graph"])
def test_help_has_examples(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert f"  ninferbuild {command} " in ran.out
