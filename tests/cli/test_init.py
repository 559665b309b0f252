"""``init``: a target is added, and the rest of the file stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
import tempfile
from typing import Any

import pytest

from ninferbuild.target import Proposal, TargetFile, convert_target, load_target

OPTIONS = ("--model", "model", "--recipe", "qwen3_6_27b")


def test_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "c.jinja").touch()
    (tmp_path / "r.py").touch()
    ran = run(
        *("init", "a b", "--model", "model", "--recipe", "r.py:f", "--components", "text,mtp", "--source", "x=model"),
        *(
            "--resource",
            "chat_template.jinja=c.jinja",
            "--proposal",
            "--ranking",
            "c.jinja",
            "--name",
            'n "1"',
            "--out",
            "z",
        ),
        *("--max-file-bytes", "32G", "--assign", "y/*=q4_g64_fp16:grouped_absmax", "-f", "ninferbuild.toml"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "added target a b to ninferbuild.toml\n"
    target = load_target("a b")
    assert target.model == tmp_path / "model"
    assert (target.recipe, target.components) == (f"{tmp_path}/r.py:f", ("text", "mtp"))
    assert target.sources == {"x": tmp_path / "model"}
    assert target.resources == {"chat_template.jinja": tmp_path / "c.jinja"}
    assert target.proposal == Proposal(131072, tmp_path / "c.jinja")
    assert (target.artifact_name, target.out, target.max_file_bytes) == ('n "1"', tmp_path / "z", 32 * 10**9)
    assert (target.assigns[0].format, target.assigns[0].method) == ("q4_g64_fp16", "grouped_absmax")


@pytest.mark.parametrize(
    "before",
    [
        b"# comment\r\n[targets.x]\r\nmodel = 'm' # odd   spacing\r\nrecipe = 'r'\r\n",
        b"[targets.x]\nmodel = 'm'\nrecipe = 'r'",
        b"\n\n",
        b"[cache]\nmax_size = '1G'\n[targets.x]\nmodel='m'\nrecipe='r'\n[[targets.x.assign]]\nselect='a'\nformat='b'\n",
    ],
)
def test_the_rest_stays(project: Path, run: Any, before: bytes) -> None:
    path = project / "ninferbuild.toml"
    path.write_bytes(before)
    path.chmod(0o640)
    assert run("init", "new", *OPTIONS).code == 0
    after = path.read_bytes()
    assert after.startswith(before)
    assert TargetFile(path).names[-1] == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(item.name for item in project.iterdir()) == ["model", "ninferbuild.toml"]


def test_paths_start_from_the_file(project: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    below = project / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    assert run("init", "c", "--model", "../model", "--recipe", "r", "--out", "c.ninfer").code == 0
    target = load_target("c")
    assert (target.model.resolve(), target.out) == (project / "model", below / "c.ninfer")
    assert "/" not in TargetFile(project / "ninferbuild.toml").target("c").model.name
    assert 'model = "../model"' not in (project / "ninferbuild.toml").read_text()


def test_through_a_link(project: Path, run: Any) -> None:
    link = project / "link.toml"
    link.symlink_to("ninferbuild.toml")
    assert run("init", "c", *OPTIONS, "-f", "link.toml").code == 0
    assert link.is_symlink()
    assert "c" in TargetFile(project / "ninferbuild.toml").names


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("a", *OPTIONS), ("ninferbuild.toml", "'a' exists already")),
        (("c",), ("--model is required", "--from")),
        (("c", "--model", "m"), ("--recipe is required",)),
        (("c", *OPTIONS, "--rows-per-chunk", "0"), ("targets.c.rows_per_chunk", "at least 1")),
        (("c/d", *OPTIONS), ("targets.c/d", "'/'")),
        (("c", *OPTIONS, "--out", "a.ninfer"), ("targets.c.out", "'a'")),
        (("c", "--from", "none.json"), ("--from", "none.json")),
        (("c", "--from", "ninferbuild.toml"), ("ninferbuild.toml", "not a conversion report")),
        (("c", "--from", "mine.json"), ("--from", "mine.json is not a conversion report; it has no 'provenance'")),
        (("c", "--from", "list.json"), ("--from", "list.json is not a conversion report")),
    ],
)
def test_refused(project: Path, run: Any, args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    (project / "mine.json").write_text('{"target": {"name": "mine"}}')
    (project / "list.json").write_text("[1]")
    before = (project / "ninferbuild.toml").read_bytes()
    run("init", *args).failed(2, *parts)
    assert (project / "ninferbuild.toml").read_bytes() == before


def test_a_directory_that_takes_no_file(project: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str, dir: Path) -> None:
        raise PermissionError(13, "Permission denied", f"{dir}/{prefix}x")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    ran = run("init", "new", "--model", "model", "--recipe", "qwen3_6_27b")
    ran.failed(1, f"error: {project / 'ninferbuild.toml'}: cannot be written: Permission denied\n")


def test_names_are_printable(project: Path, run: Any) -> None:
    ran = run("init", "new", "--model", "model", "--recipe", "qwen3_6_27b", "-f", "other\n\x1b.toml")
    assert ran.out == "added target new to other\\n\\x1b.toml\n"


def test_inline_targets_cannot_grow(project: Path, run: Any) -> None:
    path = project / "ninferbuild.toml"
    path.write_text('targets = { a = { model = "model", recipe = "r" } }\n')
    run("init", "c", *OPTIONS).failed(2, "ninferbuild.toml", "not valid TOML")
    assert "c" not in TargetFile(path).names


def test_from_our_report(project: Path, run: Any) -> None:
    settings = {"model": "model", "recipe": "qwen3_8_27b", "out": "old.ninfer", "components": ["text"], "workers": 2}
    settings["assign"] = [{"select": "x", "format": "bf16", "parameters": {"a": [1, 2.5]}}]
    target = convert_target(settings)
    (project / "r.json").write_text(json.dumps({"target": target.settings()}))
    ran = run("init", "c", "--from", "r.json", "--out", "new.ninfer", "--json")
    assert ran.code == 0, ran
    made = load_target("c")
    assert json.loads(ran.out) == {"file": str(made.file), "target": "c", "settings": made.settings()}
    assert (made.recipe, made.components, made.workers, made.assigns) == ("qwen3_8_27b", ("text",), 2, target.assigns)
    assert (made.model, made.out) == (project / "model", project / "new.ninfer")


def test_from_a_report_of_the_reference(project: Path, run: Any) -> None:
    report = {
        "components": {"text": {"config": {}, "proposal": {"domain": "indexed", "rows": 96}}, "dflash2": {}},
        "name": "n",
        "output": "old.ninfer",
        "rows_per_chunk": 512,
        "provenance": {
            "converter": "ninfer-v3",
            "recipe": "qwen3_6_27b",
            "sources": {"base": {"path": "model"}, "dflash2": {"path": "d"}},
            "override": "o.py",
            "ranking": "rank.i64",
        },
    }
    (project / "r.json").write_text(json.dumps(report))
    for name in ("d", "o.py", "rank.i64"):
        (project / name).touch()
    assert run("init", "c", "--from", "r.json").code == 0
    target = load_target("c")
    assert (target.model, target.recipe, target.overrides) == (project / "model", "qwen3_6_27b", (f"{project}/o.py",))
    assert (target.components, target.sources) == (("text", "dflash2"), {"dflash2": project / "d"})
    assert target.proposal == Proposal(96, project / "rank.i64")
    assert (target.artifact_name, target.out, target.rows_per_chunk) == ("n", project / "old.ninfer", 512)
