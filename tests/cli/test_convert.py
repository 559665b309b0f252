"""``convert``: the reference converter's flags, their abbreviations, and the target they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ninferbuild.target import Proposal

REQUIRED = ("convert", "--model", "model", "--recipe", "r", "--out", "o/z.ninfer")


def test_every_flag(project: Path, run: Any, engine: Any) -> None:
    for name in ("over.py", "chat.jinja", "rank.i64"):
        (project / name).touch()
    ran = run(
        *(*REQUIRED, "--override", "over.py:f", "--source", "quantized=q=1", "--source", "x=missing/path"),
        *("--components", "text,mtp", "--resource", "chat_template.jinja=chat.jinja", "--proposal"),
        *("--proposal-rows", "96", "--ranking", "rank.i64", "--name", "A model", "--device", "cpu"),
        *("--rows-per-chunk", "3", "--max-file-bytes", "16384", "--workers", "2", "--set", "cache.max_size=5"),
        *("--assign", "y=bf16", "--rerun", "--overwrite"),
    )
    assert ran.code == 0, ran
    ((target, options),) = engine.calls
    assert (str(target.model), target.recipe, str(target.out)) == ("model", "r", "o/z.ninfer")
    assert target.overrides == ("over.py:f",)
    assert target.sources == {"quantized": Path("q=1"), "x": Path("missing/path")}
    assert target.components == ("text", "mtp")
    assert target.resources == {"chat_template.jinja": Path("chat.jinja")}
    assert target.proposal == Proposal(96, Path("rank.i64"))
    assert (target.artifact_name, target.device, target.rows_per_chunk) == ("A model", "cpu", 3)
    assert (target.max_file_bytes, target.workers, target.cache.max_size) == (16384, 2, 5)
    assert target.assigns[0].select == ("y",)
    assert (options["rerun"], options["overwrite"], options["device"]) == (True, True, None)


def test_defaults(project: Path, run: Any, engine: Any) -> None:
    run(*REQUIRED, "--proposal-rows", "5", "--ranking", "not-used-without-proposal")
    ((target, _),) = engine.calls
    assert (target.proposal, target.components, target.rows_per_chunk) == (None, None, 512)
    assert target.max_file_bytes is None  # one file; the first converter's 32 GB bound is given up
    run(*REQUIRED, "--proposal")
    assert engine.calls[1][0].proposal == Proposal(131072)


def test_abbreviations(project: Path, run: Any, engine: Any) -> None:
    """Prefixes that were unique among the reference's flags keep their meaning beside ``--overwrite``, ``--json``…"""
    (project / "over.py").touch()
    ran = run("convert", "--o", "z")
    assert ran.code == 2
    assert "ambiguous option --o: could be --override, --out" in ran.err
    ran = run(
        *("convert", "--mo=model", "--rec", "r", "--ou", "z", "--over", "over.py", "--c", "text", "--dev=cpu"),
        *("--ro", "3", "--so", "q=missing", "--w", "1", "--overw", "--ma", "5", "-q", "--rer"),
    )
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    ((target, options),) = engine.calls
    assert (str(target.model), target.recipe, str(target.out), target.overrides) == ("model", "r", "z", ("over.py",))
    assert (target.components, target.device, target.rows_per_chunk, target.workers) == (("text",), "cpu", 3, 1)
    assert (target.max_file_bytes, options["overwrite"], options["rerun"]) == (5, True, True)


@pytest.mark.parametrize(
    ("flag", "candidates"), [("--r", "--recipe, --resource, --ranking"), ("--proposal-", ""), ("--jo", "")]
)
def test_prefixes(run: Any, flag: str, candidates: str) -> None:
    ran = run("convert", flag, "1")
    assert ran.code == 2
    assert ("ambiguous" in ran.err) == bool(candidates)
    assert candidates in ran.err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--source", "a=1", "--source", "a=2"), ("source requires unique NAME=PATH entries", "'a=2'")),
        (("--source", "a"), ("source requires unique NAME=PATH entries",)),
        (("--source", "=a"), ("source requires unique NAME=PATH entries",)),
        (("--resource", "a="), ("resource requires unique NAME=PATH entries",)),
        (("--source", "base=p"), ("--source", "with --model")),
        (("--components", "text,text"), ("--components", "must not repeat 'text'")),
        (("--resource", "x=none"), ("--resource x", "none")),
        (("--rows-per-chunk", "0"), ("--rows-per-chunk", "at least 1")),
        (("--max-file-bytes", "many"), ("--max-file-bytes", "'many'")),
        (("--override", "none.py"), ("--override", "none.py")),
    ],
)
def test_refused(project: Path, run: Any, engine: Any, args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """The reference ends these with a traceback and 1; here they are usage errors, one line and 2."""
    run(*REQUIRED, *args).failed(2, *parts)
    assert not engine.calls
    assert sorted(path.name for path in project.iterdir()) == ["model", "ninferbuild.toml"]


def test_missing_checkpoint(project: Path, run: Any) -> None:
    run("convert", "--model", "none", "--recipe", "r", "--out", "z").failed(2, "--model", "none")
