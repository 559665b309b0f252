"""What a fingerprint cannot see through is refused, by name and with what to do; what it can is not."""

from __future__ import annotations

from pathlib import Path
import sys
import textwrap
from types import ModuleType

import pytest

from ninferbuild import recipe_file
from ninferbuild.fingerprint import Fingerprint, fingerprint


@pytest.fixture(autouse=True)
def _purged() -> object:
    yield
    recipe_file.purge()


def taken(text: str, tmp_path: Path, name: str = "method") -> Fingerprint:
    recipe_file.purge()
    (tmp_path / "r.py").write_text(textwrap.dedent(text))
    return fingerprint(recipe_file.load(f"r.py:{name}", tmp_path).function)


REFUSED = {
    "environ": ("import os", "os.environ['A']", "environment", "parameters="),
    "environ by name": ("from os import environ", "environ['A']", "environment", "parameters="),
    "environ renamed": ("import os as o", "o.environ.get('A')", "environment", "parameters="),
    "environ through an alias": ("import os\nalias = os", "alias.environ", "environment", "parameters="),
    "os as an object": ("import os", "getattr(os, 'env' + 'iron')", "environment", "parameters="),
    "getenv": ("from os import getenv", "getenv('A')", "environment", "parameters="),
    "working directory": ("import os", "os.getcwd()", "environment", "parameters="),
    "Path.cwd": ("from pathlib import Path", "Path.cwd()", "environment", "parameters="),
    "arguments": ("import sys", "sys.argv", "environment", "parameters="),
    "time": ("import time", "time.time()", "clock", "parameters="),
    "time by name": ("from time import perf_counter as p", "p()", "clock", "parameters="),
    "now": ("from datetime import datetime", "datetime.now()", "clock", "parameters="),
    "random": ("import random", "random.random()", "random", "default_rng"),
    "random by name": ("from random import choice", "choice([1, 2])", "random", "default_rng"),
    "unseeded Random": ("import random", "random.Random().random()", "random", "default_rng"),
    "numpy random": ("import numpy as np", "np.random.rand(3)", "random", "default_rng"),
    "numpy random by name": ("from numpy.random import rand", "rand(3)", "random", "default_rng"),
    "numpy random module": ("from numpy import random as nr", "nr.rand(3)", "random", "default_rng"),
    "unseeded default_rng": ("import numpy as np", "np.random.default_rng()", "random", "default_rng"),
    "default_rng of None": ("import numpy as np", "np.random.default_rng(None)", "random", "default_rng"),
    "unseeded default_rng by name": ("from numpy.random import default_rng", "default_rng()", "random", "default_rng"),
    "torch random": ("import torch", "torch.randn(3)", "random", "manual_seed"),
    "torch random by name": ("from torch import randn", "randn(3)", "random", "manual_seed"),
    "torch init": ("import torch", "torch.nn.init.normal_(r)", "random", "manual_seed"),
    "uuid": ("import uuid", "uuid.uuid4()", "random", "default_rng"),
    "secrets": ("import secrets", "secrets.token_bytes(2)", "random", "default_rng"),
    "urandom": ("import os", "os.urandom(2)", "random", "default_rng"),
    "generator object": ("import numpy as np\ng = np.random.default_rng(0)", "g.random()", "random", "default_rng"),
    "torch generator": ("import torch\ng = torch.Generator()", "torch.rand(2, generator=g)", "random", "manual_seed"),
    "socket": ("import socket", "socket.create_connection(('a', 1))", "network", "beforehand"),
    "urllib": ("import urllib.request", "urllib.request.urlopen('a')", "network", "beforehand"),
    "subprocess": ("import subprocess", "subprocess.run(['a'])", "processes", "function itself"),
    "thread": ("import threading", "threading.Thread(target=r)", "threads", "function itself"),
    "ctypes": ("import ctypes", "ctypes.CDLL('a')", "without Python noticing", "numpy.load"),
    "safetensors": ("import safetensors", "safetensors.safe_open('a', 'np')", "without Python noticing", "numpy.load"),
    "from_file": ("import torch", "torch.from_file('a')", "without Python noticing", "numpy.load"),
    "exists": ("from pathlib import Path", "Path('a').exists()", "file system", "open the file"),
    "listdir": ("import os", "os.listdir('.')", "file system", "open the file"),
    "stat": ("import os", "os.path.getmtime('a')", "file system", "open the file"),
    "glob of a path": ("from pathlib import Path", "list(Path('a').glob('*'))", "file system", "open the file"),
    "resolve": ("from pathlib import Path", "Path('a').resolve()", "file system", "__file__"),
    "eval": ("", "eval('1')", "looks at code", "parameters="),
    "__import__": ("", "__import__('os').environ", "looks at code", "parameters="),
    "importlib": ("import importlib", "importlib.import_module('os')", "looks at code", "parameters="),
    "code": ("", "method.__code__", "looks at code", "parameters="),
    "doc": ("", "method.__doc__", "looks at code", "parameters="),
    "hash": ("", "hash('a')", "differs between runs", "hashlib"),
    "id": ("", "id(r)", "differs between runs", "is"),
    "unknown module": ("import sched", "sched.scheduler()", "not known", "configuring"),
    "open file": ("f = open(__file__)", "f.read()", "alive", "inside the function"),
    "lock": ("import threading\nL = threading.Lock()", "L", "threads", "function itself"),
    "generator": ("g = (x for x in [1])", "next(g)", "iterator", "list"),
    "iterator": ("g = iter([1])", "next(g)", "iterator", "list"),
    "set of objects": ("class C: pass\ns = {C(), C()}", "len(s)", "order", "list"),
    "global assignment": ("n = 0\ndef up():\n    global n\n    n += 1", "up()", "changes while", "inside the function"),
    "module attribute": ("import helper_mod", "setattr_helper()", "changes while", "inside the function"),
    "cached": ("import functools\n@functools.cache\ndef c(): return 1", "c()", "keeps results", "remove the decorator"),
    "lru_cache": (
        "import functools\n@functools.lru_cache(3)\ndef c(): return 1",
        "c()",
        "keeps results",
        "remove the decorator",
    ),
    "exec": ("space = {}\nexec('def f(): return 1', space)\nf = space['f']", "f()", "source text", ".py file"),
    "model": ("from ninferbuild.models.model import Model\nm = Model({})", "m", "object of the build", "configuring"),
    "own module": ("from ninferbuild import recipe", "recipe.Recipe(r)", "object of the build", "configuring"),
    "helper environ": ("import helper_mod", "helper_mod.env()", "environment", "parameters="),
    "late import": ("", "__late__", "environment", "parameters="),
    "method of a class": (
        "import time\nclass C:\n    def f(self): return time.time()\nc = C()",
        "c.f()",
        "clock",
        "parameters=",
    ),
    "default argument": ("import time\ndef f(now=time.time): return now()", "f()", "clock", "parameters="),
    "decorated": (
        "import time, functools\n"
        "def d(f):\n    @functools.wraps(f)\n    def w(): return f() + time.time()\n    return w\n"
        "@d\ndef f(): return 1",
        "f()",
        "clock",
        "parameters=",
    ),
}
BODIES = {
    "module attribute": "helper_mod.value = 2",
    "late import": "import os\n    return os.environ",
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_hidden_inputs_are_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "helper_mod.py").write_text("import os\nvalue = 1\ndef env(): return os.environ\n")
    head, expression, why, fix = REFUSED[case]
    body = BODIES.get(case, f"return {expression}")
    found = taken(f"{head}\ndef method(r):\n    {body}\n", tmp_path)
    assert any(why in reason.why and fix in reason.fix for reason in found.uncacheable), found.uncacheable
    assert all(reason.name and "\n" not in str(reason) for reason in found.uncacheable)


SEEN = {
    "os.path": ("import os", "os.path.join('a', 'b')"),
    "open": ("from pathlib import Path", "Path(__file__).with_name('a').read_bytes()"),
    "np.load": ("import numpy as np", "np.load('a.npy')"),
    "seeded default_rng": ("import numpy as np", "np.random.default_rng(0).random(3)"),
    "seeded by name": ("from numpy.random import default_rng", "default_rng(r.seed).random(3)"),
    "seeded keyword": ("import numpy as np", "np.random.default_rng(seed=3)"),
    "RandomState": ("import numpy as np", "np.random.RandomState(7).rand(3)"),
    "Random": ("import random", "random.Random(3).random()"),
    "torch generator": ("import torch", "torch.randn(3, generator=torch.Generator().manual_seed(0))"),
    "torch mathematics": ("import torch", "torch.nn.functional.relu(r.values(0, 1).to(torch.float32))"),
    "absolute value": ("import torch", "torch.zeros(1).absolute()"),
    "print": ("import sys", "print(r, file=sys.stderr)"),
    "logging": ("import logging\nlog = logging.getLogger('x')", "log.info('a')"),
    "numpy function": ("from numpy import linalg, sum as s", "s(linalg.norm(r))"),
    "scipy-like chain": ("import numpy", "numpy.linalg.norm(r) + numpy.float32(1)"),
    "formats": (
        "from tools.artifact.formats import QuantFormat, get_format",
        "isinstance(get_format('bf16'), QuantFormat)",
    ),
    "whole module": ("from tools.artifact import formats", "formats.get_format('bf16')"),
    "rule": ("from tools.convert import methods", "methods.grouped_absmax(r)"),
    "auxiliary": ("from tools.convert.methods import AuxiliaryValue", "AuxiliaryValue('fp32', (), b'1234')"),
    "user decorator": ("def d(f):\n    return lambda: f()\n@d\ndef f(): return 1", "f()"),
    "safe late import": ("", "__import_math__"),
}


@pytest.mark.parametrize("case", sorted(SEEN))
def test_ordinary_code_is_not_refused(tmp_path: Path, case: str) -> None:
    head, expression = SEEN[case]
    body = "import math\n    return math.pi" if case == "safe late import" else f"return {expression}"
    assert taken(f"{head}\ndef method(r):\n    {body}\n", tmp_path).uncacheable == ()


def test_a_reason_names_the_object_and_is_given_once(tmp_path: Path) -> None:
    text = """
        import os
        def deep(): return os.environ["A"], os.environ["B"]
        def method(r): return deep(), deep()
    """
    found = taken(text, tmp_path).uncacheable
    assert len({reason.name for reason in found}) == len(found)
    assert any("ninfer_user_recipe.deep" in reason.name for reason in found)


def test_nonlocal_state_is_refused_and_local_state_is_not(tmp_path: Path) -> None:
    text = """
        def make():
            count = 0
            def method(r):
                nonlocal count
                count += 1
                return count
            return method
        method = make()
        def fine(r):
            count = 0
            def inner():
                nonlocal count
                count += 1
            inner()
            return count
    """
    assert any("changes" in reason.why for reason in taken(text, tmp_path).uncacheable)
    assert taken(text, tmp_path, "fine").uncacheable == ()


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    found = taken("def method(r):\n    import surely_not_there\n    return surely_not_there.x\n", tmp_path)
    assert any("surely_not_there" in reason.name for reason in found.uncacheable)


def test_a_source_that_wraps_the_checkpoint_is_refused(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from ninferbuild.sources.safetensors import SafetensorsSource, tensor_source

    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as store:
        base = tensor_source(store, "w", (2, 3))

        def read_values(begin: int, end: int) -> object:
            return base.values(begin, end) * 2

        (reason,) = fingerprint(read_values).uncacheable
    assert "checkpoint" in reason.why
    assert "request.values" in reason.fix
    assert "base" in reason.name


def test_functions_of_packages_count_by_package(tmp_path: Path) -> None:
    import numpy as np

    found = fingerprint(np.linalg.norm)
    assert any(line.startswith("package numpy ") for line in found.lines)
    assert found.uncacheable == ()


def test_compiled_code_of_no_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = ModuleType("local_extension")
    extension.__file__ = str(tmp_path / "local_extension.so")
    extension.Kind = type("Kind", (), {"__module__": "local_extension"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "local_extension", extension)
    for expression in ("local_extension.Kind()", "thing"):
        text = f"import local_extension\nthing = local_extension.Kind()\ndef method(r): return {expression}\n"
        assert any("compiled" in reason.why for reason in taken(text, tmp_path).uncacheable)


def test_a_locked_up_value_is_named_with_its_place(tmp_path: Path) -> None:
    text = "import io\nSETTINGS = {'a': [1, open(__file__)]}\ndef method(r): return SETTINGS\n"
    (reason,) = taken(text, tmp_path).uncacheable
    assert reason.name == "ninfer_user_recipe.SETTINGS (used by ninfer_user_recipe.method)['a'][1]"
