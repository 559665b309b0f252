from importlib import metadata, util
import inspect
from pathlib import Path
import subprocess
import sys

import pytest

import ninferbuild.recipes
from ninferbuild.recipes import RECIPES, RecipeRegistry

OFFICIAL = [
    "qwen3_6_27b",
    "qwen3_8_27b",
    "qwen3_6_35b_a3b",
    "qwen3_6_27b_nvfp4",
    "qwen3_8_27b_nvfp4",
    "qwen3_8_27b_q6",
    "qwen3_8_27b_imatrix",
    "qwen3_6_35b_a3b_nvfp4",
    "qwen3_8_27b_nvfp4_nvidia",
    "qwen3_8_27b_nvfp4_orcarouter",
    "qwen3_8_27b_quasar",
    "qwen3_8_27b_quasar_kv",
    "qwen3_8_27b_gguf",
    "qwen3_6_35b_a3b_gguf",
    "bonsai2_27b_ternary",
]


def test_official_names() -> None:
    assert set(OFFICIAL) <= set(RECIPES)
    assert len(RECIPES) == len(list(RECIPES))
    for name in OFFICIAL:
        assert RECIPES[name].__name__ == name
        assert list(inspect.signature(RECIPES[name]).parameters) == ["model", "recipe", "sources"]
    with pytest.raises(KeyError):
        RECIPES["qwen3_6_28b"]


def test_other_distributions_register_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_recipes.py").write_text("RECIPES = {'other': print, 'qwen3_6_27b': print}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registered = [metadata.EntryPoint("other", "other_recipes", ninferbuild.recipes.ENTRY_POINTS)]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: registered)
    recipes = RecipeRegistry()
    assert recipes["other"] is print
    assert recipes["qwen3_6_27b"] is RECIPES["qwen3_6_27b"]
    assert list(recipes) == [*OFFICIAL, "other"]
    assert len(recipes) == len(OFFICIAL) + 1


def test_a_broken_family_is_named_when_it_could_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = metadata.EntryPoint("other", "a_module_that_is_not_there", ninferbuild.recipes.ENTRY_POINTS)
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [broken])
    recipes = RecipeRegistry()
    assert recipes["qwen3_6_27b"]
    with pytest.raises(ImportError, match="recipe family other"):
        recipes["other"]


def test_the_folder_is_no_package_of_its_own() -> None:
    folder = Path(ninferbuild.recipes.__file__).resolve()
    spec = util.spec_from_file_location("recipes", folder, submodule_search_locations=[str(folder.parent)])
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"ninferbuild\.recipes.*'recipes'"):
        spec.loader.exec_module(util.module_from_spec(spec))


def test_configuring_an_official_recipe_imports_no_torch(checkpoints: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from ninferbuild import models
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES, RecipeRegistry
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.sources.safetensors import SafetensorsSource
root = Path({str(checkpoints)!r})
model = models.build(SafetensorsSource(root / "dense"), ("text", "mtp"))
recipe = Recipe(model)
RECIPES["qwen3_8_27b_nvfp4"](model, recipe, {{"quantized": SafetensorsSource(root / "q8")}})
add_official_proposal(recipe, ranking=root / "rank.i64", rows=6)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
