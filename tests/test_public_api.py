"""The interface for Python programs, as the README shows it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
import re
import subprocess
import sys
from typing import Any

from fixtures.workbench import REPOSITORY
import pytest

import ninferbuild
from ninferbuild.version import VERSION


def readme_example() -> str:
    """The Python code of the README's section."""
    section = (REPOSITORY / "README.md").read_text("utf-8").partition("\n## From Python\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert isinstance(code, str)
    return code


@pytest.fixture
def project(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ninferbuild.toml").write_text(
        f'[cache]\ndir = "cache"\n[defaults]\ndevice = "cpu"\n'
        f'[targets.qwen]\nmodel = "{checkpoints / "dense"}"\nrecipe = "qwen3_6_27b"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_of_the_readme(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(readme_example(), "README.md", "exec"), {})
    payload, artifact_id, objects = capsys.readouterr().out.split()
    with ninferbuild.open_artifact(project / "qwen.ninfer") as artifact:
        assert int(payload) == artifact.payload_bytes
        assert artifact_id == artifact.artifact_id.hex()
        assert int(objects) == len(artifact.objects) == 55


def test_the_example_uses_public_names_alone() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(readme_example()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ninferbuild"
    }
    assert used == {"load_target", "plan", "build", "open_artifact"}
    assert used <= set(ninferbuild.__all__)


@pytest.mark.parametrize("name", ninferbuild.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(ninferbuild, name)
    assert name in dir(ninferbuild)
    if name == "__version__":
        assert value == VERSION
        return
    text = inspect.getdoc(value)
    assert text is not None
    assert text.splitlines()[0].endswith((".", ":"))
    assert not text.startswith(f"{name}(")  # what dataclasses write when nobody did


@pytest.mark.parametrize("value", [ninferbuild.Target, ninferbuild.load_target, ninferbuild.build, ninferbuild.plan])
def test_parameters_are_annotated(value: Any) -> None:
    parameters = inspect.signature(value).parameters.values()
    assert [item.name for item in parameters if item.annotation is inspect.Parameter.empty] == []


@pytest.mark.parametrize("name", [name for name in ninferbuild.__all__ if name.endswith("Error")])
def test_errors_have_one_base(name: str) -> None:
    error = getattr(ninferbuild, name)
    assert issubclass(error, ninferbuild.NinferbuildError)


@pytest.mark.parametrize("value", [ninferbuild.build, ninferbuild.plan])
def test_what_is_documented_is_taken(value: Any) -> None:
    """Every parameter that a docstring describes exists."""
    text = inspect.getdoc(value) or ""
    described = re.findall(r"^    (\w+(?:, \w+)*): ", text.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE)
    assert described
    assert {name for names in described for name in names.split(", ")} <= set(inspect.signature(value).parameters)


def test_a_target_that_is_not_there(project: Path) -> None:
    with pytest.raises(ninferbuild.UsageError, match="qwen"):
        ninferbuild.load_target("qwne")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'converts'"):
        ninferbuild.converts  # noqa: B018


def test_importing_loads_nothing_else() -> None:
    code = "import sys, ninferbuild; print(sorted(name for name in sys.modules if name.startswith('ninferbuild')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ninferbuild', 'ninferbuild.version']"
