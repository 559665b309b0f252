"""The import names of the reference converter resolve to this project, and to nothing else's expense."""

from __future__ import annotations

from collections.abc import Iterator
import importlib
from pathlib import Path
import subprocess
import sys

import pytest

from ninferbuild import compat


def resolved(module: str) -> dict[str, object]:
    with compat.active():
        view = importlib.import_module(module)
        return {name: getattr(view, name) for name in view.__all__}


@pytest.mark.parametrize("module", sorted(compat.MODULES))
def test_names_are_the_objects_of_this_project(module: str) -> None:
    for name, value in resolved(module).items() if any_exists(module) else ():
        place, there = compat.MODULES[module][name]
        assert value is getattr(importlib.import_module(place), there)


def any_exists(module: str) -> bool:
    return any(importlib.util.find_spec(place) for place, _ in compat.MODULES[module].values())


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("tools.convert.official_recipes", "qwen3_6_27b qwen3_8_27b qwen3_6_35b_a3b RECIPES Q4 Q5 Q6 Q8 FP8"),
        ("tools.convert.sources.logical", "LogicalSource EncodedRows array_source select_rows gather_source"),
        ("tools.convert.methods", "cast_direct grouped_absmax fp8_row_maxabs import_encoded METHODS AuxiliaryValue"),
        ("tools.convert.model", "Model Parameter"),
        ("tools.convert.recipe", "Recipe Selection default_layout"),
        ("tools.convert.quantization.groupwise", "quantize_matrix pick_device"),
        ("tools.convert.quantization.fp8_row", "quantize_bf16_rows"),
        ("tools.artifact.formats", "get_format QuantFormat Q4_G64_FP16 NUMERIC_FORMATS decode_e4m3fn_word"),
        ("tools.artifact.schema", "TensorSpec ArtifactError binding_parts"),
        ("tools.artifact.reader", "Artifact"),
    ],
)
def test_documented_names_are_there(module: str, names: str) -> None:
    assert set(names.split()) <= set(resolved(module))


def test_every_way_to_import() -> None:
    namespace: dict[str, object] = {}
    with compat.active():
        exec(
            "import tools.artifact.formats\n"
            "from tools.artifact import formats\n"
            "from tools.artifact.formats import get_format\n"
            "from tools import artifact\n"
            "import tools.artifact.formats as other\n"
            "import tools\n"
            "same = tools.artifact.formats is formats is other is artifact.formats\n"
            "same = same and formats.get_format is get_format\n"
            "from tools.artifact.framing import *\n",
            namespace,
        )
    assert namespace["same"] is True
    assert namespace["MAGIC"] == importlib.import_module("ninferbuild.artifact.framing").MAGIC


@pytest.mark.parametrize(
    ("statement", "error", "fragments"),
    [
        ("from tools.artifact.formats import get_fromat", ImportError, ["get_fromat", "available:", "get_format"]),
        (
            "import tools.convert.recipes",
            ModuleNotFoundError,
            ["did you mean tools.convert.recipe?", "official_recipes"],
        ),
        ("from tools.convert.sources import nothing", ImportError, ["nothing", "tools.convert.sources.logical"]),
        ("import tools.artifact.formats as f; f.nope", AttributeError, ["nope", "get_format"]),
    ],
)
def test_what_is_missing_is_said_with_what_there_is(statement: str, error: type, fragments: list[str]) -> None:
    with compat.active(), pytest.raises(error) as caught:
        exec(statement, {})
    assert all(fragment in str(caught.value) for fragment in fragments)


def test_a_module_that_this_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.MODULES, "tools.convert.later", {"thing": ("ninferbuild.later", "thing")})  # type: ignore[arg-type]
    with compat.active(), pytest.raises(ImportError, match="thing"):
        exec("from tools.convert.later import thing", {})


def test_errors_inside_a_module_are_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_part.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(compat.MODULES, "tools.convert.broken", {"thing": ("broken_part", "thing")})  # type: ignore[arg-type]
    with compat.active(), pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        exec("from tools.convert.broken import thing", {})


def test_feature_detection_works() -> None:
    with compat.active():
        view = importlib.import_module("tools.convert.methods")
        assert not hasattr(view, "no_such_method")
        assert hasattr(view, "grouped_absmax")


def test_nothing_is_left_behind() -> None:
    with compat.active(), compat.active():
        importlib.import_module("tools.artifact.formats")
    assert not [name for name in sys.modules if name == "tools" or name.startswith("tools.")]
    with pytest.raises(ImportError):
        importlib.import_module("tools.artifact.formats")


@pytest.fixture
def real_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    kind = request.param
    if kind == "file":
        (tmp_path / "tools.py").write_text("MINE = 1\n")
    else:
        package = tmp_path / "tools"
        (package / "convert").mkdir(parents=True)
        if kind == "package":
            (package / "__init__.py").write_text("MINE = 1\n")
        (package / "convert" / "__init__.py").write_text("")
        (package / "convert" / "methods.py").write_text("THEIRS = 1\n")
        (package / "other.py").write_text("OTHER = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name == "tools" or name.startswith("tools.")]:
        del sys.modules[name]


@pytest.mark.parametrize("real_tools", ["package", "namespace", "file"], indirect=True)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_real_tools_keeps_all_but_our_two_packages(
    real_tools: Path, earlier: bool, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["real_tools"]
    before = importlib.import_module("tools") if earlier else None
    theirs = importlib.import_module("tools.convert.methods") if earlier and kind != "file" else None
    with compat.active():
        namespace: dict[str, object] = {}
        exec("from tools.convert.methods import METHODS\nfrom tools import convert\nimport tools", namespace)
        assert namespace["METHODS"] is importlib.import_module("ninferbuild.rules").METHODS
        assert compat.is_view(namespace["convert"])  # type: ignore[arg-type]
        if kind != "namespace":
            assert namespace["tools"].MINE == 1  # type: ignore[attr-defined]
        if kind != "file":
            assert importlib.import_module("tools.other").OTHER == 1
    if earlier:
        assert sys.modules["tools"] is before
    if kind != "file":
        assert importlib.import_module("tools.convert.methods").THEIRS == 1
        if theirs is not None:
            assert before is not None
            assert before.convert.methods is sys.modules["tools.convert.methods"] is theirs
    else:
        with pytest.raises(ImportError):
            importlib.import_module("tools.convert.methods")


def test_importing_the_views_loads_neither_torch_nor_anything_else() -> None:
    script = (
        "import sys\n"
        "from ninferbuild import compat\n"
        "with compat.active():\n"
        "    import tools.convert.quantization.groupwise, tools.artifact.codecs.row_split, tools.convert.methods\n"
        "    from tools.artifact.formats import get_format\n"
        "print([name for name in ('torch', 'numpy', 'ninferbuild.rules') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
