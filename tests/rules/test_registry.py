"""The table of methods and what is built in."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
import sys

import pytest

from ninferbuild import rules
from ninferbuild.rules import BUILT_IN, METHODS, rule_of
from ninferbuild.rules.registry import GROUP, MethodTable

NAMES = ["cast_direct", "grouped_absmax", "grouped_search", "fp8_row_maxabs", "import_encoded", "nvfp4_maxabs"]


def test_built_in_methods() -> None:
    assert list(METHODS)[: len(NAMES)] == NAMES
    assert [METHODS[name] for name in NAMES] == list(BUILT_IN) == [getattr(rules, name) for name in NAMES]
    assert all(rule_of(rule) is rule for rule in BUILT_IN)
    assert "nope" not in METHODS
    with pytest.raises(KeyError):
        METHODS["nope"]


def test_built_in_is_an_identity_not_a_name() -> None:
    def cast_direct(request):
        return None

    assert rule_of(cast_direct) is None
    assert rule_of(type(rules.cast_direct)()) is None


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a distribution that registers methods for the length of a test."""

    def install(name: str, source: str, entries: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for module in [name for name in sys.modules if name.startswith("mymethods")]:
        del sys.modules[module]


def test_methods_of_other_distributions_are_users_functions(installed) -> None:
    installed("mymethods", "def my_method(request): return request.job(produce=print)\n", "mine = mymethods:my_method")
    table = MethodTable(BUILT_IN)
    assert "mine" in table
    assert "mymethods" not in sys.modules
    assert table["mine"].__name__ == "my_method"
    assert list(table) == [*NAMES, "mine"]
    assert len(table) == len(NAMES) + 1
    assert rule_of(table["mine"]) is None


def test_broken_registrations_say_who_is_to_blame(installed) -> None:
    installed("mymethods_a", "raise RuntimeError('boom')\n", "bad = mymethods_a:x\nflat = mymethods_b:value")
    installed("mymethods_b", "value = 3\n", "")
    table = MethodTable(BUILT_IN)
    with pytest.raises(ValueError, match=r"'bad' of mymethods_a==1.5 cannot be loaded: boom"):
        table["bad"]
    with pytest.raises(ValueError, match=r"'flat' of mymethods_a==1.5 is not a method"):
        table["flat"]


@pytest.mark.parametrize("name", ["cast_direct", "twice"])
def test_names_cannot_be_taken_twice(installed, name) -> None:
    installed("mymethods_a", "def f(request): ...\n", f"{name} = mymethods_a:f")
    installed("mymethods_b", "def f(request): ...\n", f"{name} = mymethods_b:f")
    with pytest.raises(ValueError, match=f"registers the method '{name}', which .* provides"):
        len(MethodTable(BUILT_IN))


def test_package_has_one_name() -> None:
    spec = importlib.util.spec_from_file_location("rules", Path(rules.__file__))
    module = importlib.util.module_from_spec(spec)
    with pytest.raises(ImportError, match=r"ninferbuild\.rules"):
        spec.loader.exec_module(module)
    assert metadata.version("ninferbuild")
