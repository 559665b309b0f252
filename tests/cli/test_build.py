"""``build``: which targets, what the engine is asked, what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ASKED = {
    "device": None,
    "rerun": False,
    "link": True,
    "overwrite": False,
    "rehash": False,
    "keep_going": False,
    "jobs": None,
    "explain": False,
    "gate": None,
}


def test_defaults(project: Path, run: Any, engine: Any) -> None:
    ran = run("build")
    assert ran.code == 0
    assert [(target.name, options) for target, options in engine.calls] == [("a", ASKED)]
    assert ran.out.splitlines() == [
        "[1/2] first (+1): bf16 (4,)",
        "[2/2] second: bf16 (4,) cached",
        f"wrote {project}/a.ninfer: 55 objects, 1 files, 1.3s",
    ]
    assert ran.err.splitlines() == ["encoding on cpu", "3 actions: 2 executed, 1 cached"]


def test_options_reach_the_engine(project: Path, run: Any, engine: Any) -> None:
    ran = run(
        *("build", "b", "-f", "ninferbuild.toml", "--device", "cuda:1", "--overwrite", "--rerun", "--rehash"),
        *("--no-link", "-k", "-j", "3", "--explain", "--set", "rows_per_chunk=7", "--assign", "x/*=bf16:cast_direct"),
    )
    ((target, options),) = engine.calls
    assert options == {
        "device": "cuda:1",
        "rerun": True,
        "link": False,
        "overwrite": True,
        "rehash": True,
        "keep_going": True,
        "jobs": 3,
        "explain": True,
        "gate": None,
    }
    assert (target.name, target.rows_per_chunk, target.assigns[0].format) == ("b", 7, "bf16")
    assert "nothing linked" in ran.out


def test_up_to_date(project: Path, run: Any, engine: Any) -> None:
    engine.up_to_date = True
    assert run("build").out.splitlines()[-1] == f"{project}/a.ninfer is up to date, 1.3s"


def test_quiet(project: Path, run: Any, engine: Any) -> None:
    ran = run("build", "-q", "a", "b")
    assert (ran.code, ran.out, ran.err, len(engine.calls)) == (0, "", "", 2)


def test_choice_without_default(project: Path, run: Any, engine: Any) -> None:
    file = project / "ninferbuild.toml"
    file.write_text(file.read_text().partition("\n")[2])
    run("build").failed(2, "ninferbuild.toml", "choose one of a, b")
    run("build", "c").failed(2, "ninferbuild.toml", "unknown target 'c'")
    assert not engine.calls


@pytest.mark.parametrize(
    "args", [("--set", "worker=1"), ("--assign", "x"), ("-f", "none.toml"), ("--set", "model=none")]
)
def test_bad_requests(project: Path, run: Any, engine: Any, args: tuple[str, ...]) -> None:
    run("build", *args).failed(2, args[-1].partition("=")[0])
    assert not engine.calls


def test_first_failure_ends_it(project: Path, run: Any, engine: Any) -> None:
    def act(target: Any) -> None:
        if target.name == "a":
            raise ValueError("a is bad")

    engine.act = act
    assert run("build", "a", "b").code == 1
    assert [target.name for target, _ in engine.calls] == ["a"]
    ran = run("build", "-k", "-q", "a", "b")
    assert (ran.code, ran.err) == (1, "error: a is bad\n")
    assert [target.name for target, _ in engine.calls] == ["a", "a", "b"]
    ran = run("build", "-k", "-q", "b", "a")
    assert (ran.code, ran.err) == (1, "error: a is bad\n")
