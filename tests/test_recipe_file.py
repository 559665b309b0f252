"""Loading recipe functions: references, siblings, errors, and source text instead of bytecode caches."""

from __future__ import annotations

import os
from pathlib import Path
import py_compile
import subprocess
import sys

import pytest

from ninferbuild import recipe_file
from ninferbuild.recipes import RECIPES


@pytest.fixture(autouse=True)
def _purged() -> object:
    yield
    recipe_file.purge()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def called(function: recipe_file.RecipeFunction) -> list[object]:
    seen: list[object] = []
    function(seen, None, None)
    return seen


def test_an_official_recipe_by_name() -> None:
    name = next(iter(RECIPES))
    loaded = recipe_file.load(name)
    assert (loaded.function, loaded.reference, loaded.file) == (RECIPES[name], name, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.py", ("a.py", "configure")),
        ("a.py:other", ("a.py", "other")),
        ("dir:1/a.py", ("dir:1/a.py", "configure")),
        ("dir:x/a.py:f", ("dir:x/a.py", "f")),
        ("a.py:", ("a.py:", "configure")),
        ("a.py:1x", ("a.py:1x", "configure")),
    ],
)
def test_the_last_colon_splits_before_an_identifier(value: str, expected: tuple[str, str]) -> None:
    assert recipe_file.split_reference(value) == expected


def test_the_function_runs_with_its_arguments(tmp_path: Path) -> None:
    write(
        tmp_path / "r.py",
        "def configure(model, recipe, sources): model.append(__name__)\ndef other(m, r, s): m.append(2)\n",
    )
    loaded = recipe_file.load("r.py", tmp_path)
    assert loaded.reference == "r.py:configure"
    assert loaded.file == tmp_path / "r.py"
    assert called(loaded) == ["ninfer_user_recipe"]
    other = recipe_file.load(str(tmp_path / "r.py:other"))
    assert (other.reference, called(other)) == ("r.py:other", [2])


def test_siblings_are_importable_and_sys_path_is_restored(tmp_path: Path) -> None:
    write(tmp_path / "sibling_one.py", "VALUE = 1\n")
    write(tmp_path / "sibling_pack" / "__init__.py", "from .inner import VALUE\n")
    write(tmp_path / "sibling_pack" / "inner.py", "VALUE = 2\n")
    write(
        tmp_path / "r.py",
        "import sibling_one, sibling_pack\nfrom pathlib import Path\n"
        "def configure(m, r, s): m += [sibling_one.VALUE, sibling_pack.VALUE, Path(__file__).name]\n",
    )
    before = list(sys.path)
    assert called(recipe_file.load("r.py", tmp_path)) == [1, 2, "r.py"]
    assert sys.path == before
    assert list(tmp_path.rglob("__pycache__")) == []


def test_sys_path_is_restored_after_a_failure(tmp_path: Path) -> None:
    write(tmp_path / "r.py", "raise RuntimeError('in the recipe')\n")
    before = list(sys.path)
    with pytest.raises(RuntimeError, match="in the recipe"):
        recipe_file.load("r.py", tmp_path)
    assert sys.path == before
    assert recipe_file.MODULE_NAME not in sys.modules


@pytest.mark.parametrize(
    ("value", "error", "fragment"),
    [
        ("missing.py", FileNotFoundError, "missing.py"),
        ("folder.py", FileNotFoundError, "is a directory"),
        ("notes.txt", ValueError, "cannot load recipe file"),
        ("no_such_recipe", ValueError, "official recipes:"),
        ("qwen3_6_27", ValueError, "did you mean qwen3_6_27b?"),
        ("r.py:absent", AttributeError, "absent"),
        ("r.py:number", TypeError, "must be callable"),
        ("bad.py", SyntaxError, ""),
    ],
)
def test_bad_references(tmp_path: Path, value: str, error: type[Exception], fragment: str) -> None:
    write(tmp_path / "r.py", "number = 1\n")
    write(tmp_path / "bad.py", "def (:\n")
    write(tmp_path / "notes.txt", "")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(error) as caught:
        recipe_file.load(value, tmp_path)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", ["*every", "model, recipe, sources, more=1", "model, /, *others"])
def test_functions_that_can_take_the_arguments(tmp_path: Path, arguments: str) -> None:
    write(tmp_path / "r.py", f"def configure({arguments}):\n    pass\n")
    function = recipe_file.load("r.py", tmp_path)
    assert function.reference == "r.py:configure"
    function(None, None, None)


def test_a_function_that_cannot_take_the_arguments(tmp_path: Path) -> None:
    write(tmp_path / "r.py", "def two(model, recipe):\n    pass\n")
    with pytest.raises(TypeError, match=r"r\.py: two\(model, recipe\) must take \(model, recipe, sources\)"):
        recipe_file.load("r.py:two", tmp_path)(None, None, None)


def edit_unseen(path: Path, text: str) -> None:
    """Replace the text of a file keeping its size and times to the nanosecond."""
    stat = path.stat()
    assert len(text) == stat.st_size
    path.write_text(text)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    helper = write(tmp_path / "unseen_helper.py", "VALUE = 1\n")
    recipe = write(tmp_path / "r.py", "import unseen_helper\ndef configure(m, r, s): m += [unseen_helper.VALUE, 1]\n")
    for path in (helper, recipe):
        py_compile.compile(str(path))  # what an earlier run of plain Python leaves behind
    assert called(recipe_file.load("r.py", tmp_path)) == [1, 1]
    recipe_file.purge()
    edit_unseen(helper, "VALUE = 2\n")
    edit_unseen(recipe, recipe.read_text().replace(", 1]", ", 3]"))
    assert called(recipe_file.load("r.py", tmp_path)) == [2, 3]


def test_modules_on_the_path_are_read_from_source_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = write(tmp_path / "lib" / "path_helper.py", "VALUE = 1\n")
    py_compile.compile(str(library))
    edit_unseen(library, "VALUE = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    write(tmp_path / "r.py", "def configure(m, r, s):\n    import path_helper\n    m.append(path_helper.VALUE)\n")
    assert called(recipe_file.load("r.py", tmp_path)) == [2]


def test_purging_makes_the_next_load_read_helpers_again(tmp_path: Path) -> None:
    helper = write(tmp_path / "purged_helper.py", "VALUE = 1\n")
    write(tmp_path / "r.py", "import purged_helper\ndef configure(m, r, s): m.append(purged_helper.VALUE)\n")
    first = recipe_file.load("r.py", tmp_path)
    helper.write_text("VALUE = 22\n")
    recipe_file.purge()
    assert not {"purged_helper", recipe_file.MODULE_NAME} & set(sys.modules)
    assert called(recipe_file.load("r.py", tmp_path)) == [22]
    assert called(first) == [1]  # functions keep the namespace they came from


def test_each_recipe_gets_its_own_sibling_of_the_same_name(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / str(number) / "same_name.py", f"VALUE = {number}\n")
        write(tmp_path / str(number) / "r.py", "import same_name\ndef configure(m, r, s): m.append(same_name.VALUE)\n")
    assert called(recipe_file.load("1/r.py", tmp_path)) == [1]
    assert called(recipe_file.load("2/r.py", tmp_path)) == [2]


def test_compatibility_names_work_in_late_imports(tmp_path: Path) -> None:
    write(
        tmp_path / "r.py",
        "def configure(m, r, s):\n"
        "    from tools.artifact.formats import get_format\n"
        "    m.append(get_format('bf16').name)\n",
    )
    loaded = recipe_file.load("r.py", tmp_path)
    assert called(loaded) == ["bf16"]
    with pytest.raises(ImportError):
        loaded.function([], None, None)  # outside of user_code()
    with recipe_file.user_code():
        loaded.function([], None, None)


def test_loading_a_recipe_that_imports_torch_loads_no_torch(tmp_path: Path) -> None:
    write(
        tmp_path / "r.py",
        "import torch\nfrom tools.artifact.formats import QuantFormat\ndef configure(m, r, s): pass\n",
    )
    script = (
        "import sys\nfrom pathlib import Path\nfrom ninferbuild import recipe_file\n"
        "loaded = recipe_file.load('r.py', Path(sys.argv[1]))\nloaded(None, None, None)\n"
        "print('torch' in sys.modules, loaded.function.__globals__['torch'].float32)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "torch.float32"]
