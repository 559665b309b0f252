"""Whose code a module is: the question that decides how it enters a fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
import sys

import numpy as np
import pytest

from ninferbuild import origins
from ninferbuild.origins import origin_of


def test_the_standard_library() -> None:
    assert origin_of("json", json.__file__).kind == "stdlib"
    assert origin_of("json.decoder", str(Path(json.__file__).with_name("decoder.py"))).kind == "stdlib"
    assert origin_of("math", None).kind == "stdlib"
    assert origin_of("posix", "built-in").kind == "stdlib"
    assert origin_of("os", "frozen").kind == "stdlib"


def test_an_installed_package_is_its_distribution() -> None:
    origin = origin_of("numpy.linalg", str(Path(np.__file__).parent / "linalg" / "__init__.py"))
    assert origin.kind == "installed"
    assert origin.distribution is not None
    assert (origin.distribution.name, origin.distribution.version) == ("numpy", np.__version__)
    assert origin == origin_of("numpy", np.__file__)


def test_a_package_whose_distribution_has_another_name() -> None:
    yaml = pytest.importorskip("yaml")
    distribution = origin_of("yaml", yaml.__file__).distribution
    assert distribution is not None
    assert distribution.name == "PyYAML"


def test_this_project_and_its_other_names() -> None:
    assert origin_of("ninferbuild.rules.groupwise", origins.__file__).kind == "own"
    assert origin_of("tools.convert.methods", "ninferbuild.compat").kind == "own"
    assert origin_of("tools.convert.methods", "/somewhere/tools/convert/methods.py").kind == "user"


@pytest.mark.parametrize("name", ["helper", "json", "numpy", "__main__"])
def test_everything_else_is_a_user_s(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("")
    assert origin_of(name, str(tmp_path / f"{name}.py")).kind == "user"


def install(root: Path, record: str | None) -> Path:
    package = root / "fancy_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("")
    info = root / "fancy.name-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Fancy.Name\nVersion: 1.2\n\nName: not this\n")
    if record is not None:
        (info / "RECORD").write_text(record)
    return package


def test_any_directory_with_a_record_counts(tmp_path: Path) -> None:
    package = install(tmp_path, "fancy_package/__init__.py,sha256=x,0\nfancy_package/inner.py,sha256=y,0\n")
    inner = origin_of("fancy_package.inner", str(package / "inner.py"))
    assert str(inner.distribution).startswith("Fancy.Name 1.2 ")
    assert inner == origin_of("fancy_package", str(package / "__init__.py"))
    (package / "added.py").write_text("")
    assert origin_of("fancy_package.added", str(package / "added.py")).kind == "user"


@pytest.mark.parametrize("record", [None, "", "other/__init__.py,,\n"])
def test_without_a_record_of_the_file_it_is_a_user_s(tmp_path: Path, record: str | None) -> None:
    package = install(tmp_path, record)
    assert origin_of("fancy_package", str(package / "__init__.py")).kind == "user"


def test_another_record_is_another_distribution(tmp_path: Path) -> None:
    found = [
        origin_of(
            "fancy_package",
            str(install(tmp_path / name, f"fancy_package/__init__.py,sha256={name},0\n") / "__init__.py"),
        )
        for name in ("a", "b")
    ]
    assert found[0] != found[1]


def test_this_test_is_a_user_s() -> None:
    assert origin_of(__name__, sys.modules[__name__].__file__ if __name__ in sys.modules else __file__).kind == "user"
