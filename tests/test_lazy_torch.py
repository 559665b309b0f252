"""Torch is imported when it is used and not before. Each case is a fresh interpreter: the import state is global."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROLOGUE = """
import sys, threading
from ninferbuild import lazy_torch

def load(text):
    namespace = {}
    with lazy_torch.deferred():
        exec(compile(text, "recipe.py", "exec"), namespace)
    return namespace
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package named torch that loads fast, slowly enough to be caught loading, and counts how often it is loaded."""
    root = tmp_path_factory.mktemp("site")
    package = root / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import builtins, time
            import torch                       # as the real one does
            builtins.torch_loads = getattr(builtins, "torch_loads", 0) + 1
            from torch import core
            time.sleep(0.05)
            float32 = "float32"
            assert torch.core is core
            """
        )
    )
    (package / "core.py").write_text("import torch\nNAME = torch.__name__\n")
    (package / "nn.py").write_text("import torch\nKIND = torch.float32\n")
    return str(root)


def run(text: str, path: str = "") -> str:
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(text)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_untouched_torch_is_never_loaded(stand_in: str) -> None:
    out = run(
        """
        import builtins
        load("import torch\\nimport torch as again\\ndef f(): return torch.float32")
        print("torch" in sys.modules, hasattr(builtins, "torch_loads"), lazy_torch.is_loaded())
        """,
        stand_in,
    )
    assert out == "False False False"


def test_it_loads_on_use_into_the_object_that_was_handed_out(stand_in: str) -> None:
    out = run(
        """
        import builtins
        recipe = load("import torch\\ndef f(): return torch.float32")
        print(recipe["f"](), recipe["torch"] is sys.modules["torch"], type(recipe["torch"]) is type(sys))
        import torch
        print(torch is recipe["torch"], builtins.torch_loads, torch.core.NAME)
        print(torch.__spec__.loader is torch.__loader__)
        print(type(torch.__loader__).__name__, any("Torch" in type(f).__name__ for f in sys.meta_path))
        """,
        stand_in,
    )
    assert out.splitlines() == ["float32 True True", "True 1 torch", "True", "SourceFileLoader False"]


def test_an_import_elsewhere_fills_the_same_object(stand_in: str) -> None:
    out = run(
        """
        import builtins
        recipe = load("import torch")
        again = load("import torch")
        import torch.nn
        print(recipe["torch"] is torch is again["torch"], recipe["torch"].float32, builtins.torch_loads)
        """,
        stand_in,
    )
    assert out == "True float32 1"


@pytest.mark.parametrize(
    "statement", ["from torch import nn", "import torch.nn as nn", "from torch import nn, float32"]
)
def test_importing_from_torch_loads_it(stand_in: str, statement: str) -> None:
    out = run(
        f"r = load('import torch\\n{statement}'); print(r['nn'].KIND, r['torch'] is sys.modules['torch'])", stand_in
    )
    assert out == "float32 True"


def test_a_loaded_torch_is_left_alone(stand_in: str) -> None:
    out = run(
        """
        import torch
        recipe = load("import torch")
        print(recipe["torch"] is torch is sys.modules["torch"], type(torch) is type(sys))
        """,
        stand_in,
    )
    assert out == "True True"


def test_use_and_import_inside_the_deferral(stand_in: str) -> None:
    out = run(
        "r = load('import torch\\nx = torch.float32\\nimport torch as t'); print(r['x'], r['t'] is r['torch'])",
        stand_in,
    )
    assert out == "float32 True"


def test_many_threads_touch_it_at_once(stand_in: str) -> None:
    out = run(
        """
        import builtins
        recipe = load("import torch\\ndef f(): return torch.float32, torch.core.NAME")
        barrier = threading.Barrier(8)
        seen = []
        def touch(index):
            barrier.wait()
            if index % 2:
                seen.append(recipe["f"]())
            else:
                namespace = {}
                exec("import torch; x = torch.float32, torch.core.NAME", namespace)
                seen.append(namespace["x"])
        threads = [threading.Thread(target=touch, args=(index,)) for index in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(set(seen), len(seen), builtins.torch_loads, recipe["torch"] is sys.modules["torch"])
        """,
        stand_in,
    )
    assert out == "{('float32', 'torch')} 8 1 True"


def test_a_torch_that_fails_to_load_says_so_each_time(tmp_path: object) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken build')\n")  # type: ignore[operator]
    out = run(
        """
        recipe = load("import torch")
        for _ in range(2):
            try:
                recipe["torch"].float32
            except ImportError as error:
                print(error)
        """,
        str(tmp_path),
    )
    assert out.splitlines() == ["broken build", "broken build"]


def test_setting_and_deleting_attributes_loads_first(stand_in: str) -> None:
    out = run(
        """
        recipe = load("import torch")
        recipe["torch"].mark = 1
        print(recipe["torch"].float32, "core" in dir(recipe["torch"]))
        del recipe["torch"].mark
        """,
        stand_in,
    )
    assert out == "float32 True"


def test_the_real_torch() -> None:
    out = run(
        """
        recipe = load("import torch\\ndef f(): return torch.arange(4).sum().item()")
        before = "torch" in sys.modules
        print(before, recipe["f"](), recipe["torch"] is sys.modules["torch"])
        import torch.nn.functional as F
        print(F.relu(recipe["torch"].tensor([-1.0, 2.0])).tolist())
        """
    )
    assert out.splitlines() == ["False 6 True", "[0.0, 2.0]"]
