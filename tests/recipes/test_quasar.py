"""QUASAR releases: what each parameter becomes, and a build of a small one from the command line."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
import shutil
import struct
from typing import Any

from fixtures import releases, synthetic
import numpy as np
import pytest
import torch

from ninferbuild import models
from ninferbuild.artifact.reader import Artifact
from ninferbuild.cli import main
from ninferbuild.plan import Parent, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES
from ninferbuild.recipes.formats import NVFP4, Q4, Q8
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.recipes.qwen3_8_quasar import MTP_CACHED, MTP_OTHERS
from ninferbuild.sources.artifact import objects_of
from ninferbuild.sources.opened import Sources

COMPONENTS = "text,vision,mtp"


def draft_of(root: Path, name: str, *, salt: int, cache: Path) -> Path:
    """An artifact with a DFlash2 draft for models of the size of the release."""
    text = synthetic.text_geometry(4, **releases.DENSE_GEOMETRY)
    synthetic.write_dflash2(root / f"{name}-draft", text, salt)
    out = root / f"{name}.ninfer"
    options = ("--components", "text,dflash2", "--source", f"dflash2={root / f'{name}-draft'}", "--device", "cpu")
    arguments = ("convert", "--model", str(root / "base"), "--recipe", "qwen3_8_27b", *options, "--out", str(out))
    assert main([*arguments, "-q", "--set", f"cache.dir={cache}"]) == 0
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quasar")
    releases.write_quasar(root / "release")
    releases.write_dense_base(root / "base", salt=5)
    draft_of(root, "donor", salt=6, cache=root / "cache")
    synthetic.write_ranking(root / "ranking.i64", 256, 1)
    return root


def configure(world: Path, recipe: str, components: str = COMPONENTS) -> Recipe:
    sources = Sources(world / "release", {"dflash2": world / "donor.ninfer"})
    model = models.build(sources["base"], components.split(","), sources=sources)
    configured = Recipe(model)
    RECIPES[recipe](model, configured, sources)
    return configured


def choice(recipe: Recipe, name: str) -> tuple[str, str, set[str]]:
    (selection,) = recipe.selections[name]
    policies = {policy for (parameter, _), policy in recipe.policies.items() if parameter == name}
    return selection.format, selection.method.name, policies  # type: ignore[attr-defined]


def parents_of(recipe: Recipe) -> dict[tuple[str, ...], Parent]:
    return {parent.names: parent for parent in plan_parents(recipe).parents}


@pytest.mark.parametrize(
    ("recipe", "others"), [("qwen3_8_27b_quasar", Q8), ("qwen3_8_27b_quasar_kv", "bf16")], ids=["full", "kv"]
)
def test_choices(world: Path, recipe: str, others: str) -> None:
    configured = configure(world, recipe)
    imported = (NVFP4, "import_encoded", {"AllowA4"})
    plain = ("bf16", "cast_direct", {"A16Only"})
    for layer in range(4):
        for role in ("gate", "up", "down"):
            assert choice(configured, f"text/layers/{layer}/mlp/{role}") == imported
    for role in ("query", "key", "gate", "value", "output"):
        assert choice(configured, f"text/layers/3/attention/{role}") == imported
    for role in ("query", "key", "value", "z", "output"):
        assert choice(configured, f"text/layers/0/gdn/{role}") == imported
    for role in ("a_projection", "b_projection"):
        assert choice(configured, f"text/layers/0/gdn/{role}") == plain
    for name in MTP_CACHED:
        assert choice(configured, name) == (Q8, "grouped_absmax", {"A16Only"})
    for name in MTP_OTHERS:
        assert choice(configured, name)[0] == others
    assert choice(configured, "text/layers/0/gdn/a_log")[0] == "fp32"
    for name in ("text/token_embedding", "text/final_norm", "vision/patch_embedding", "mtp/embedding_norm"):
        assert choice(configured, name)[0] == "bf16"
    assert choice(configured, "text/output_head")[:2] == (Q8, "grouped_absmax")
    assert len(MTP_OTHERS) == 7


def test_uses_of_the_heads(world: Path) -> None:
    configured = configure(world, "qwen3_8_27b_quasar")
    add_official_proposal(configured, ranking=world / "ranking.i64", rows=32)
    heads = ("text/output_head", "proposal/head")
    assert {key: policy for key, policy in configured.policies.items() if key[0] in heads} == {
        ("text/output_head", "text/final_hidden"): "A16Only",
        ("text/output_head", "mtp/final_hidden"): "A16Only",
        ("text/output_head", "dflash2/final_hidden"): "AllowA8",
        ("proposal/head", "mtp/final_hidden"): "A16Only",
        ("proposal/head", "dflash2/final_hidden"): "A16Only",
    }
    assert choice(configured, "proposal/head")[:2] == (Q4, "grouped_absmax")


def test_parents(world: Path) -> None:
    parents = parents_of(configure(world, "qwen3_8_27b_quasar"))
    gates = parents["text/layers/0/gdn/a_projection", "text/layers/0/gdn/b_projection"]
    assert (gates.target.shape, gates.target.format) == ((8, 128), "bf16")
    # Query and gate, and what one matrix of the delta net holds, have one divisor; others only if they say so.
    assert ("text/layers/0/mlp/gate", "text/layers/0/mlp/up") in parents
    assert ("text/layers/0/gdn/query", "text/layers/0/gdn/key") in parents
    for name in ("gdn/value", "gdn/z"):
        assert (f"text/layers/0/{name}",) in parents
    assert all(parent.target.divisors == 1 for parent in parents.values())


def test_gates_of_the_delta_net_are_decoded(world: Path) -> None:
    parent = parents_of(configure(world, "qwen3_8_27b_quasar"))[
        "text/layers/0/gdn/a_projection", "text/layers/0/gdn/b_projection"
    ]
    store = releases.Release(40)
    for role in "ab":
        store.compressed_nvfp4(f"model.language_model.layers.0.linear_attn.in_proj_{role}", 4, 128, 100.0)
    expected = []
    for role in "ab":
        prefix = f"model.language_model.layers.0.linear_attn.in_proj_{role}"
        packed = store.tensors[f"{prefix}.weight_packed"][2].reshape(4, 64)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(4, 128)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        scales = torch.from_numpy(store.tensors[f"{prefix}.weight_scale"][2].reshape(4, 8)).view(torch.float8_e4m3fn)
        products = table[nibbles].reshape(4, 8, 16) * scales.float().numpy()[..., None]
        expected.append((products / store.tensors[f"{prefix}.weight_global_scale"][2][0]).reshape(4, 128))
    values = parent.request.values(0, 8 * 128).reshape(8, 128)
    assert np.array_equal(values.numpy(), np.concatenate(expected))


def test_refuses_a_draft_that_is_built_and_taken(world: Path) -> None:
    with pytest.raises(ValueError, match=r"component dflash2 is built from a checkpoint, and .*donor\.ninfer is an"):
        configure(world, "qwen3_8_27b_quasar", "text,dflash2")


def test_refuses_a_tokenizer_configuration_without_its_added_tokens(world: Path, tmp_path: Path) -> None:
    release = shutil.copytree(world / "release", tmp_path / "release")
    (release / "tokenizer_config.json").write_text("{}")
    (tmp_path / "donor.ninfer").symlink_to(world / "donor.ninfer")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json lacks added_tokens .*--resource"):
        configure(tmp_path, "qwen3_8_27b_quasar")


def test_refuses_another_model_and_a_missing_draft(world: Path) -> None:
    experts = models.build(Sources(releases.write_experts(world / "experts", layers=1), {})["base"], ["text"])
    with pytest.raises(ValueError, match=r"requires Qwen3\.5 Dense"):
        RECIPES["qwen3_8_27b_quasar"](experts, Recipe(experts), {})
    sources = Sources(world / "release", {})
    model = models.build(sources["base"], ["text"])
    with pytest.raises(ValueError, match="requires source 'dflash2'; provide --source dflash2=PATH"):
        RECIPES["qwen3_8_27b_quasar"](model, Recipe(model), sources)
    wrong = Sources(world / "release", {"dflash2": world / "donor-draft"})
    with pytest.raises(ValueError, match=r"'dflash2' is taken from an artifact, and .*donor-draft is none"):
        RECIPES["qwen3_8_27b_quasar"](model, Recipe(model), wrong)


Convert = Callable[..., dict[str, Any]]


@pytest.fixture
def convert(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    def run(donor: Path, recipe: str = "qwen3_8_27b_quasar") -> dict[str, Any]:
        capsys.readouterr()
        options = ["--components", COMPONENTS, "--source", f"dflash2={donor}", "--device", "cpu", "--json"]
        options += ["--proposal", "--proposal-rows", "32", "--ranking", str(world / "ranking.i64"), "--name", "q"]
        arguments = ["convert", "--model", str(world / "release"), "--recipe", recipe, *options]
        code = main([*arguments, "--out", str(tmp_path / "q.ninfer"), "--set", f"cache.dir={tmp_path / 'cache'}"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        result = json.loads(captured.out)
        assert isinstance(result, dict)
        return result

    return run


def test_from_the_command_line(
    world: Path, tmp_path: Path, convert: Convert, capsys: pytest.CaptureFixture[str]
) -> None:
    donor = tmp_path / "donor.ninfer"
    shutil.copy(world / "donor.ninfer", donor)
    first = convert(donor)
    assert first["actions"]["executed"]
    assert main(["verify", str(tmp_path / "q.ninfer"), "--against", str(tmp_path / "q.ninfer.conversion.json")]) == 0
    second = convert(donor)
    assert (second["actions"]["executed"], second["artifact_id"]) == (0, first["artifact_id"])

    with Artifact(donor) as source, Artifact(tmp_path / "q.ninfer") as made:
        taken = [item for item in made.objects if item.id >= "weight/100000"]
        bindings = [value for name, value in source.directory.bindings.items() if name.startswith("dflash2/")]
        wanted = sorted({identifier for binding in bindings for identifier in objects_of(binding)})
        assert [made.read_object(item.id) for item in taken] == [source.read_object(name) for name in wanted]
        directory = made.directory
    assert list(directory.components) == ["text", "vision", "mtp", "dflash2"]
    divisors = [
        use["auxiliaries"]["activation_input_divisor"]["object"]
        for use in directory.uses
        if use.get("activation_policy") == "AllowA4"
    ]
    assert len(divisors) == len(set(divisors)) > 0
    with Artifact(tmp_path / "q.ninfer") as made:
        assert {struct.unpack("<f", made.read_object(item))[0] for item in divisors} == {100.0, 101.0, 102.0, 103.0}

    changed = draft_of(world, "changed", salt=7, cache=tmp_path / "cache")
    other = convert(changed)
    assert other["actions"]["executed"] == len(taken)
    scoped = convert(changed, "qwen3_8_27b_quasar_kv")
    assert 0 < scoped["actions"]["executed"] <= len(MTP_OTHERS) + len(MTP_CACHED)
