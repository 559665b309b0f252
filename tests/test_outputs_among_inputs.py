"""An output that is one of the files that a build reads is refused, whatever name it has."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import os
from pathlib import Path

from fixtures import fx
from fixtures.donor import write_donor
import pytest

from ninferbuild.artifact.framing import part_name
from ninferbuild.cli import main

OPTIONS = ("--recipe", "recipe.py", "--device", "cpu", "--proposal", "--proposal-rows", "6", "--ranking", "rank.i64")

Place = Callable[[Path], str]
"""Arranges files, and gives the output."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fx.write_dense(tmp_path / "model")
    (tmp_path / "recipe.py").write_text(
        "import beside\nfrom tools.convert.official_recipes import qwen3_6_27b as configure\n"
    )
    (tmp_path / "beside.py").write_text("SOME = 1\n")
    (tmp_path / "rank.i64").write_bytes(b"".join(count.to_bytes(8, "little") for count in fx.RANKING))
    (tmp_path / "template").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def contents(root: Path) -> dict[str, str]:
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and "cache" not in path.parts:
            found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def linked(link: Callable[[str, str], None]) -> Place:
    def place(here: Path) -> str:
        link(str(here / "model" / "model.safetensors"), "out.ninfer")
        return "out.ninfer"

    return place


def reported(here: Path) -> str:
    os.link("rank.i64", "out.ninfer.conversion.json")
    return "out.ninfer"


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (lambda here: "model/model.safetensors", "source 'base' (model/model.safetensors)"),
        (lambda here: "model/tokenizer.json", "a file of the model (model/tokenizer.json)"),
        (lambda here: "recipe.py", "a recipe file (recipe.py)"),
        (lambda here: "beside.py", "the module beside"),
        (lambda here: "rank.i64", "the ranking (rank.i64)"),
        (lambda here: "template", "resource 'chat_template.jinja' (template)"),
        (linked(os.symlink), "source 'base' (model/model.safetensors)"),
        (linked(os.link), "source 'base' (model/model.safetensors)"),
        (reported, "the ranking (rank.i64)"),
    ],
    ids=["shard", "tokenizer", "recipe", "module", "ranking", "resource", "symlink", "hard link", "report"],
)
def test_inputs_are_not_written(here: Path, capsys: pytest.CaptureFixture[str], place: Place, what: str) -> None:
    out = place(here)
    before = contents(here)
    shared = ("--model", "model", *OPTIONS, "--resource", "chat_template.jinja=template", "--out", out)
    for command in (["plan", *shared], ["convert", *shared, "--overwrite"]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: --out: ")
        assert f"would be written and is read, as {what}" in captured.err
        assert captured.err.endswith("; choose another output\n")
    assert contents(here) == before


def test_parts_are_looked_at_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--model", "model", *OPTIONS[:4], "--max-file-bytes", "300000", "--out", "out.ninfer"]
    part = part_name("out.ninfer", 1)
    os.link("model/model.safetensors", part)
    before = contents(here)
    for command in (["plan", *shared], ["convert", *shared, "--overwrite"]):
        assert main(command) == 2
        assert f"{part} would be written and is read, as source 'base'" in capsys.readouterr().err
    os.unlink(part)
    assert main(["convert", *shared]) == 0
    os.unlink(part)
    os.link("model/model.safetensors", part)
    capsys.readouterr()
    assert main(["convert", *shared, "--overwrite"]) == 2  # everything is cached
    assert f"{part} would be written and is read" in capsys.readouterr().err
    before = {name: digest for name, digest in before.items() if not name.startswith("out")}
    assert before.items() <= contents(here).items()


def test_a_target_names_its_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("ninferbuild.toml", "other.ninfer"):
        (here / "ninferbuild.toml").write_text(
            f'[targets.t]\nmodel = "model"\nrecipe = "qwen3_6_27b"\nout = "{out}"\ndevice = "cpu"\n'
            'sources = { unused = "other.ninfer" }\n'
        )
        (here / "other.ninfer").unlink(missing_ok=True)
        write_donor(here / "other.ninfer")
        before = contents(here)
        assert main(["build", "--overwrite"]) == 2
        assert f"ninferbuild.toml: targets.t.out: {here / out} would be written and is read" in capsys.readouterr().err
        assert contents(here) == before
    assert main(["graph", "--out", "model/model.safetensors"]) == 2
    assert "--out: model/model.safetensors would be written and is read, as source 'base'" in capsys.readouterr().err
    assert contents(here) == before
