"""An interrupt that comes while torch loads ends the build, although extensions drop exceptions of what they import."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

from fixtures import fx
import pytest

PROGRAM = """
from importlib.abc import MetaPathFinder
import signal
import sys

from ninferbuild.cli import main


class Dropping(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.version":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass


sys.meta_path.insert(0, Dropping())
sys.exit(main(sys.argv[1:]))
"""

RECIPE = """
{imports}
from tools.convert.official_recipes import qwen3_6_27b


def configure(model, recipe, sources):
    qwen3_6_27b(model, recipe, sources)
"""


@pytest.mark.parametrize("imports", ["", "import torch\n\ntorch.float32"], ids=["of the build", "of a recipe"])
def test_an_interrupt_while_torch_loads_is_kept(tmp_path: Path, imports: str) -> None:
    model, out = fx.write_dense(tmp_path / "model"), tmp_path / "out.ninfer"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(imports=imports))
    options = ["--model", model, "--recipe", recipe, "--components", "text", "--device", "cpu", "--out", out]
    command = [sys.executable, "-c", PROGRAM, "convert", *map(str, options)]
    environment = os.environ | {"NINFERBUILD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "error: interrupted; finished actions are kept"
    assert not out.exists()
