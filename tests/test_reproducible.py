"""The bytes of an artifact follow from its target alone: not from the place, the machine's state or the Python."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import shutil
import subprocess
import sys

from fixtures.workbench import ninferbuild
import pytest

from ninferbuild import build, load_target

OVERRIDE = """
from ninferbuild.rules.groupwise import quantize_matrix

LIMIT = 0.5


def clipped(request):
    rows, columns = request.target.shape

    def produce(output):
        block = request.values(0, rows * columns).reshape(rows, columns)
        words = quantize_matrix(block.clamp(-LIMIT, LIMIT), request.target.format, device=request.device)
        output.write_codes(0, words.codes, words.scales)

    return request.job(produce=produce)


def configure(model, recipe, sources):
    recipe.assign("text/layers/1/mlp/down", format="q6_g64_fp16", method=clipped)
    recipe.assign("text/layers/3/attention/*", format="fp8_e4m3fn_row_bf16", method="fp8_row_maxabs")
    recipe.assign(["text/layers/3/attention/*_norm"], format="bf16", method="cast_direct")
"""

TARGET = """
[targets.model]
model = "{model}"
recipe = "qwen3_6_27b"
overrides = ["over.py"]
components = ["text", "vision", "mtp"]
proposal = {{ rows = 6, ranking = "{ranking}" }}
name = "a model"
device = "cpu"
max_file_bytes = 400000
"""


def write(directory: Path, model: Path, ranking: Path, *, override: str = OVERRIDE) -> Path:
    """A directory with a target of its own; nothing is shared with another one."""
    directory.mkdir(parents=True)
    (directory / "over.py").write_text(override)
    (directory / "ninferbuild.toml").write_text(
        '[cache]\ndir = "cache"\n' + TARGET.format(model=model, ranking=ranking)
    )
    return directory


def artifact(directory: Path) -> dict[str, bytes]:
    """File name → content of the artifact that was built in ``directory``."""
    files = [path for path in directory.iterdir() if path.name.startswith("model.ninfer")]
    return {path.name: path.read_bytes() for path in files if not path.name.endswith(".json")}


@pytest.fixture(scope="module")
def reference(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The artifact as this process builds it."""
    directory = write(tmp_path_factory.mktemp("here") / "one", checkpoints / "dense", checkpoints / "rank.i64")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NINFERBUILD_CACHE", raising=False)
        build(load_target(file=directory))
    found = artifact(directory)
    assert sorted(found) == ["model.ninfer", *(f"model.ninfer.part-000{number}" for number in range(1, len(found)))]
    assert len(found) > 1
    return found


def test_elsewhere_with_a_comment(reference: dict[str, bytes], checkpoints: Path, tmp_path: Path) -> None:
    """Another directory, cache, checkpoint directory and number of workers; the override says more about itself."""
    model = shutil.copytree(checkpoints / "dense", tmp_path / "a copy" / "of it")
    ranking = shutil.copy(checkpoints / "rank.i64", tmp_path / "counts.i64")
    commented = '"""What it does."""\n' + OVERRIDE.replace("LIMIT = 0.5", "LIMIT = 0.5  # found by trial")
    assert commented.count("#") == 1
    directory = write(tmp_path / "deep" / "down", model, Path(ranking), override=commented)
    result = build(load_target(file=directory), jobs=3)
    assert result.executed == result.total
    assert artifact(directory) == reference


def test_a_comment_executes_nothing(checkpoints: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "one", checkpoints / "dense", checkpoints / "rank.i64")
    build(load_target(file=directory))
    before = artifact(directory)
    (directory / "over.py").write_text("# a comment\n" + OVERRIDE)
    result = build(load_target(file=directory))
    assert (result.executed, result.up_to_date) == (0, True)
    assert artifact(directory) == before


def test_in_another_process(reference: dict[str, bytes], checkpoints: Path, tmp_path: Path) -> None:
    """Another order of hashes, time zone and language, and no bytecode."""
    directory = write(tmp_path / "one", checkpoints / "dense", checkpoints / "rank.i64")
    env = {"PYTHONHASHSEED": "12345", "TZ": "Pacific/Chatham", "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = ninferbuild("build", "-q", cwd=directory, env=env)
    assert (ran.code, ran.out) == (0, ""), ran
    assert artifact(directory) == reference


NEEDED = "torch, numpy, xxhash, lmdb, networkx, msgspec, click, rich, platformdirs"


def other_pythons() -> Iterator[str]:
    """Interpreters of other minor versions, on the path and among those of pyenv."""
    minors = [minor for minor in range(11, 20) if minor != sys.version_info.minor]
    for minor in minors:
        if (found := shutil.which(f"python3.{minor}")) is not None:
            yield found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in minors:
        yield from map(str, sorted(versions.glob(f"3.{minor}.*/bin/python")))


@pytest.fixture
def other_python() -> str:
    """An interpreter of another minor version that has the dependencies."""
    tried = list(dict.fromkeys(other_pythons()))
    for python in tried:
        ran = subprocess.run([python, "-c", f"import {NEEDED}"], capture_output=True, check=False)
        if ran.returncode == 0:
            return python
    where = f"none of {', '.join(tried)} has" if tried else "there is no other Python 3.11 or later with"
    pytest.skip(f"{where} {NEEDED}")


def test_with_another_python(other_python: str, reference: dict[str, bytes], checkpoints: Path, tmp_path: Path) -> None:
    directory = write(tmp_path / "one", checkpoints / "dense", checkpoints / "rank.i64")
    ran = ninferbuild("build", "-q", cwd=directory, python=other_python)
    assert (ran.code, ran.out) == (0, ""), ran
    assert artifact(directory) == reference
