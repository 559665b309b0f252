"""``qwen3_8_27b_imatrix``: which matrices it searches, and that an edited vector costs what it weighs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
import json
from pathlib import Path
from typing import Any

from fixtures import fx
import numpy as np
import pytest
from safetensors.numpy import save_file

from ninferbuild import models
from ninferbuild.build import BuildResult, build, plan
from ninferbuild.errors import SourceChangedError
from ninferbuild.plan import plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES
from ninferbuild.recipes.formats import Q4, Q5, Q6, Q8
from ninferbuild.rules import grouped_absmax, grouped_search, importance
from ninferbuild.sources.opened import Sources
from ninferbuild.target import CacheSettings, Target

NAME = "qwen3_8_27b_imatrix"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty-four layers, MTP too; tensors without data in a file, and an importance file without vectors."""
    root = tmp_path_factory.mktemp("deep")
    config = fx.base_config()
    config["text_config"]["num_hidden_layers"] = 64
    (root / "config.json").write_text(json.dumps(config))
    fx.write_resources(root)
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16
    fx.save_zeros(root / "model.safetensors", fx.text_tensors(layer_types=kinds))
    save_file({}, root / "vectors.safetensors")
    return root


def configured(root: Path, components: str, named: dict[str, str | Path]) -> Recipe:
    sources = Sources(root, named)
    model = models.build(sources["base"], components.split(","), sources=sources)
    recipe = Recipe(model)
    RECIPES[NAME](model, recipe, sources)
    return recipe


def test_formats_of_sixty_four_layers(deep: Path) -> None:
    recipe = configured(deep, "text,mtp", {"imatrix": deep / "vectors.safetensors"})
    search = {"imatrix": str(deep / "vectors.safetensors"), "negative_scales": True}
    chosen = {name: selection for name, (selection,) in recipe.selections.items()}
    for name, format in {
        "text/token_embedding": Q4,
        "text/output_head": Q6,
        "text/layers/35/mlp/down": Q5,
        "text/layers/35/attention/output": Q5,
        "text/layers/36/mlp/down": Q4,
        "text/layers/36/gdn/output": Q4,
        "text/layers/39/attention/output": Q4,
        "text/layers/63/attention/value": Q5,
        "text/layers/63/attention/gate": Q5,
        "text/layers/63/attention/query": Q4,
        "text/layers/0/gdn/z": Q5,
        "text/layers/0/gdn/key": Q4,
        "text/layers/0/mlp/up": Q4,
    }.items():
        assert chosen[name].format == format, name
    for name, parameter in recipe.model.parameters.items():
        if name.startswith("text/") and len(parameter.shape) == 2 and chosen[name].format.startswith("q"):
            assert chosen[name].method is grouped_search
            assert chosen[name].parameters == search
        elif name.startswith("text/"):
            assert chosen[name].format in ("bf16", "fp32"), name
    mtp = chosen["mtp/layers/0/mlp/up"]
    assert (mtp.format, mtp.method, mtp.parameters) == (Q8, grouped_absmax, {})
    assert set(recipe.policies.values()) == {"A16Only"}


def test_parents_of_sixty_four_layers(deep: Path) -> None:
    recipe = configured(deep, "text", {"imatrix": deep / "vectors.safetensors"})
    parents = {parent.names: parent.target for parent in plan_parents(recipe).parents}
    formats = Counter((names[0].split("/", 3)[3], target.format) for names, target in parents.items() if len(names) > 1)
    assert formats == {
        ("attention/query", Q4): 16,
        ("attention/gate", Q5): 16,
        ("gdn/query", Q4): 48,
        ("gdn/value", Q5): 48,
        ("mlp/gate", Q4): 64,
    }
    for layer in (0, 62):
        for gate in ("a", "b"):
            assert parents[(f"text/layers/{layer}/gdn/{gate}_projection",)].format == "bf16"
    assert sum(target.format == Q4 for names, target in parents.items() if names[0].endswith("/mlp/down")) == 28


def test_what_it_requires(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="selected recipe requires source 'imatrix'; provide --source imatrix=PATH"):
        configured(deep, "text", {})
    (tmp_path / "config.json").write_text(json.dumps(fx.base_config(moe=True)))
    fx.write_resources(tmp_path)
    with pytest.raises(ValueError, match=r"this official recipe requires Qwen3\.5 Dense mathematics"):
        configured(tmp_path, "text", {})


# A small model, built


QUERY, KEY = "text/layers/3/attention/query", "text/layers/3/attention/key"
DOWN, UP = "text/layers/1/mlp/down", "text/layers/2/mlp/up"
WIDTHS = {QUERY: 128, KEY: 128, DOWN: 256, UP: 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base") / "model"
    fx.write_dense(root)
    return root


class Project:
    """A target of the recipe, and its importance file."""

    def __init__(self, root: Path, model: Path):
        self.file = root / "vectors.safetensors"
        generator = np.random.default_rng(1)
        self.vectors = {name: generator.random(width).astype(np.float32) for name, width in WIDTHS.items()}
        self.save()
        self.target = Target(
            name="t",
            identity=str(root),
            file=None,
            model=model,
            recipe=NAME,
            components=("text",),
            sources={"imatrix": self.file},
            out=root / "t.ninfer",
            device="cpu",
            cache=CacheSettings(dir=root / "cache"),
        )

    def save(self) -> None:
        save_file(self.vectors, self.file)

    def write_target_file(self) -> None:
        """The same target as ``ninferbuild.toml`` beside its importance file."""
        (self.file.parent / "ninferbuild.toml").write_text(
            f'[cache]\ndir = "cache"\n[targets.t]\nmodel = "{self.target.model}"\nrecipe = "{NAME}"\n'
            f'components = ["text"]\nsources = {{ imatrix = "{self.file}" }}\n'
        )

    def build(self) -> BuildResult:
        return build(self.target, explain=True)

    def report(self) -> list[dict[str, Any]]:
        methods: list[dict[str, Any]] = json.loads(Path(f"{self.target.out}.conversion.json").read_text())["methods"]
        return methods


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Project:
    return Project(tmp_path, model)


def explained(result: BuildResult) -> dict[str, tuple[str, ...]]:
    assert result.explanations is not None
    return {item.name: item.lines for item in result.explanations}


def test_an_edited_vector_runs_what_it_weighs(project: Project) -> None:
    first = project.build()
    assert first.executed == first.total
    project.vectors[DOWN] = project.vectors[DOWN][::-1].copy()
    project.save()
    (planned,) = [action for action in plan(project.target).actions if action.state == "run"]
    assert planned.parameters == (DOWN,)
    edited = project.build()
    assert explained(edited) == {DOWN: ("importance vector changed",)}
    assert edited.executed == 1
    assert edited.artifact_id != first.artifact_id
    project.vectors[KEY] = project.vectors[KEY] * 3
    project.save()
    assert explained(project.build()) == {f"{QUERY} (+1)": ("importance vector changed",)}
    del project.vectors[UP]
    project.save()
    assert [*explained(project.build()).values()] == [("importance vector: … → none",)]


def test_the_rest_of_the_file_and_its_place_run_nothing(project: Project, tmp_path: Path) -> None:
    first = project.build()
    project.vectors = {"text/layers/9/mlp/up": np.ones(7, np.float32), **project.vectors}
    project.save()
    assert project.build().executed == 0
    moved = tmp_path / "elsewhere.safetensors"
    project.file.rename(moved)
    project.target = replace(project.target, sources={"imatrix": moved})
    again = project.build()
    assert again.executed == 0
    assert again.artifact_id == first.artifact_id


def test_the_report_holds_the_parameters(project: Project) -> None:
    project.build()
    expected = {"imatrix": str(project.file), "negative_scales": True}
    for entry in project.report():
        searched = entry["method"] == "grouped_search"
        assert entry["method_parameters"] == (expected if searched else {})
        assert searched == entry["format"].startswith("q")


def test_a_file_that_changes_between_planning_and_encoding(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from ninferbuild.job import Job

    execute = Job.execute

    def edited(job: Job) -> None:
        project.vectors[DOWN] += 1
        project.save()
        monkeypatch.setattr(Job, "execute", execute)
        execute(job)

    monkeypatch.setattr(Job, "execute", edited)
    with pytest.raises(SourceChangedError, match="importance matrix changed while it was in use"):
        build(project.target)
    assert not project.target.out.exists()
    assert importance.open_importance(str(project.file)).vector(DOWN) is not None
    assert project.build().executed > 0


def test_a_file_that_changes_while_everything_is_cached(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from ninferbuild.job import Job

    before, after = project.vectors[DOWN], project.vectors[DOWN] + 1
    for project.vectors[DOWN] in (after, before):
        project.save()
        project.build()
    project.target.out.unlink()
    execute = Job.execute

    def edited(job: Job) -> None:
        execute(job)
        assert not job.executed
        project.vectors[DOWN] = after
        project.save()

    monkeypatch.setattr(Job, "execute", edited)
    with pytest.raises(
        SourceChangedError, match=r"vectors\.safetensors: the importance matrix changed while it was in"
    ):
        project.build()
    assert not project.target.out.exists()


@pytest.mark.parametrize("last", [False, True])
def test_a_file_that_changes_while_parents_are_planned(
    project: Project, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    looked = importance.ImportanceFile.vector
    seen = []

    def edited(file: importance.ImportanceFile, name: str) -> Any:
        vector = looked(file, name)
        if name == (UP if last else DOWN) and not seen:
            seen.append(name)
            project.vectors["more"] = np.ones(3, np.float32)
            project.save()
        return vector

    monkeypatch.setattr(importance.ImportanceFile, "vector", edited)
    for look in (plan, build):
        seen.clear()
        with pytest.raises(SourceChangedError, match="importance matrix changed while it was in use"):
            look(project.target)
        project.vectors.pop("more")
        project.save()


def test_a_file_without_any_of_the_names(project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from ninferbuild.cli import main

    project.write_target_file()
    toml = str(tmp_path / "ninferbuild.toml")
    line = f"{project.file}: no parameter has a vector in this importance matrix, so all columns weigh alike"
    for _ in range(2):
        assert main(["plan", "-f", toml]) == 0
        captured = capsys.readouterr()
        assert "no parameter" not in captured.err
        assert f"importance: {project.file} has vectors for {len(WIDTHS)} of " in captured.out
    project.vectors = {"model.layers.3.self_attn.q_proj": np.ones(128, np.float32)}
    project.save()
    for command in (["plan"], ["build"], ["build"]):
        assert main([*command, "-f", toml]) == 0
        captured = capsys.readouterr()
        assert captured.err.count(line) == 1
        assert "names like 'model.layers.3.self_attn.q_proj', parameters like 'text/" in captured.err
    (use,) = plan(project.target).to_json()["importance"]
    assert (use["path"], use["matched"]) == (str(project.file), 0)


def test_a_matrix_that_was_not_imported(project: Project) -> None:
    project.file.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match="imported with `ninferbuild imatrix`"):
        project.build()
    renamed = project.file.with_suffix(".gguf")
    project.file.rename(renamed)
    project.target = replace(project.target, sources={"imatrix": renamed})
    with pytest.raises(ValueError, match=r"vectors\.gguf"):
        project.build()


def test_planning_imports_no_torch(project: Project, tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys\n"
        "from ninferbuild.cli import main\n"
        f"code = main(['plan', '-f', {str(tmp_path / 'ninferbuild.toml')!r}])\n"
        "assert code == 0 and 'torch' not in sys.modules\n"
    )
    project.write_target_file()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
