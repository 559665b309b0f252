"""What touches no tensor never loads torch, whatever recipe files import."""

from __future__ import annotations

from collections.abc import Sequence
import json
from pathlib import Path
import shutil
import subprocess
import sys

from fixtures.donor import write_donor
from fixtures.workbench import fingerprints, ninferbuild
import pytest

from ninferbuild import compat

RECIPE = """
import torch

from tools.convert.official_recipes import qwen3_6_27b
{imports}

HELD = {{"quantize": quantize_matrix, "fp8": quantize_bf16_rows, "pack": encode_row_split, "output": TensorOutput}}


def configure(model, recipe, sources):
    assert HELD and torch
    qwen3_6_27b(model, recipe, sources)


def halved(request):
    "Uses all of it, once it is called."
    def produce(output):
        with torch.no_grad():
            matrix = quantize_matrix(request.values(0, 8).reshape(1, 8) / 2, request.target.format)
        output.write_codes(0, matrix.codes, matrix.scales)
    return request.job(produce=produce)
"""

NEVER = """
import json
import sys

from ninferbuild.cli import main

for args in json.loads(sys.argv[1]):
    code = main(args)
    sys.stdout.flush()
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "torch")
    if code or loaded:
        sys.exit(f"{' '.join(args)}: exit code {code}, {len(loaded)} modules of torch")
"""


def never_load_torch(directory: Path, *commands: Sequence[str]) -> str:
    """Run the commands one after another in one process that must not come to hold torch; what they print."""
    command = [sys.executable, "-c", NEVER, json.dumps(commands)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(settled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two targets that are built; the recipe of ``imports`` imports every name that there is."""
    root = tmp_path_factory.mktemp("built")
    imports = "\n".join(f"from {module} import *" for module in compat.MODULES if module != "tools.artifact.inspect")
    (root / "recipe.py").write_text(RECIPE.format(imports=imports))
    (root / "ninferbuild.toml").write_text(
        f'default = ["official", "imports"]\n[cache]\ndir = "cache"\n[defaults]\nmodel = "{settled / "dense"}"\n'
        '[targets.official]\nrecipe = "qwen3_6_27b"\n[targets.imports]\nrecipe = "recipe.py"\n'
    )
    done = ninferbuild("build", "--device", "cpu", cwd=root)
    assert done.code == 0, done.err
    return root


def test_a_build_without_work(built: Path) -> None:
    outputs = sorted(built.glob("*.ninfer*"))
    assert len(outputs) == 4
    before = fingerprints(outputs)
    shown = never_load_torch(built, ["build", "--json"], ["build", "imports", "--explain", "--json"])
    assert [json.loads(line)["actions"]["executed"] for line in shown.splitlines()] == [0, 0, 0]
    assert fingerprints(outputs) == before


def test_a_build_that_only_links(built: Path) -> None:
    for output in built.glob("imports.ninfer*"):
        output.unlink()
    shown = never_load_torch(built, ["build", "imports", "--json"])
    assert json.loads(shown)["actions"]["executed"] == 0
    assert (built / "imports.ninfer").exists()


def test_commands(built: Path) -> None:
    commands = [
        ["--help"],
        ["build", "--help"],
        ["plan"],
        ["plan", "official", "--explain"],
        ["plan", "imports", "--hash", "--json"],
        ["params", "imports"],
        ["params", "official", "text/layers/3/*", "--json"],
        *(["list", what] for what in ("targets", "recipes", "methods", "formats")),
        ["inspect", "official.ninfer", "--objects", "--bindings"],
        ["verify", "official.ninfer"],
        ["verify", "official.ninfer", "--against", "official.ninfer.conversion.json"],
        ["diff", "official.ninfer", "imports.ninfer"],
        ["diff", "official", "imports"],
        ["graph", "imports", "--format", "json"],
        ["lock", "imports"],
        ["build", "imports", "--locked"],
        *(["cache", what] for what in ("dir", "stats", "ls", "verify")),
    ]
    assert never_load_torch(built, *commands)


def test_graft(built: Path, tmp_path: Path) -> None:
    write_donor(tmp_path / "donor.ninfer", hidden=128)
    graft = ["graft", str(built / "official.ninfer"), "--component", "draft", "--from", "donor.ninfer", "--out", "o"]
    assert never_load_torch(tmp_path, graft)


def test_commands_that_remove(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    assert never_load_torch(copy, ["cache", "prune", "--max-size", "1Ki"], ["cache", "compact"], ["cache", "clear"])
