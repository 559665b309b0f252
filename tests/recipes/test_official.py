from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import sha256
import json
from pathlib import Path
from typing import Any, NamedTuple

from fixtures import fx
import pytest
import torch

from ninferbuild import models
from ninferbuild.plan import PlannedRecipe, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES
from ninferbuild.recipes.formats import FP8, Q4, Q5, Q6, Q8
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.sources.opened import Sources
from ninferbuild.sources.safetensors import SafetensorsSource


class Run(NamedTuple):
    """One official conversion of FX and SHA-256 digests of the directory members it must give."""

    base: str
    recipe: str
    components: str
    sources: Mapping[str, str]
    proposal: bool
    objects: int
    parameters: int
    bindings: str
    uses: str
    records: str


RUNS = {
    "A": Run(
        base="dense",
        recipe="qwen3_6_27b",
        components="text,vision,mtp,dflash2",
        sources={"dflash2": "dflash2"},
        proposal=True,
        objects=122,
        parameters=146,
        bindings="86c79ce389fe990201068fec2259713665bc23cea497981db3e04856e740fdc5",
        uses="446f6f097468159b66fcd6d60a2786b626ef2340587cf7c85cf4a3aca8eadd52",
        records="14bf0053f1b743fe6f2f70852c66250ff48a6505df62391411ef743f93ddd4d5",
    ),
    "B": Run(
        base="moe",
        recipe="qwen3_6_35b_a3b",
        components="text,mtp,dflash",
        sources={"dflash": "dflash"},
        proposal=True,
        objects=96,
        parameters=165,
        bindings="65c2707cc68d51f3a69f30f7ee5765de8cb8be0ce7af00faa2df06a168fed09e",
        uses="e362f3ae21b756c610abd60eda0b03b6954d325aa76bdc9561300f254ade30b4",
        records="b1ad69570c2ab337b51a9153211a216e76611e20f3d5570aa9646c9409ff0e97",
    ),
    "C": Run(
        base="dense",
        recipe="qwen3_6_27b_nvfp4",
        components="text",
        sources={"quantized": "q6"},
        proposal=False,
        objects=81,
        parameters=63,
        bindings="30a98c38de377de04f3fc96b07cdad40d7eb8bbbfa3d248b5add5bef6b0b076d",
        uses="78bc8caa0959bdf50bf9160a3e312c8b6b2d1bd12048ec4ecc390e23c81dca47",
        records="35c5e59e5e99a7f5535ab018d101c9a6f9fe9b53af40a52989936b3c87b0d2ba",
    ),
    "D": Run(
        base="dense",
        recipe="qwen3_8_27b_nvfp4",
        components="text,mtp",
        sources={"quantized": "q8"},
        proposal=True,
        objects=74,
        parameters=81,
        bindings="f68c5c411dc27ec5e99ca2d5105a4f71295a3f412d0fa00a7622ada55583e9ca",
        uses="b1b4f1b0d1e3534a8141488db2a7baeefac9f90206e01ab289a8301fdb5651b3",
        records="348d96aa5fe4da97406dc859b6bef54493edfa37bdd5277de263558a55a436a6",
    ),
    "E": Run(
        base="dense",
        recipe="qwen3_8_27b",
        components="text",
        sources={},
        proposal=False,
        objects=55,
        parameters=63,
        bindings="a4c9fc881ec27f699b250b0908c75e1a383a03b5f8fc059711c30acc3fdf8b41",
        uses="6e0d3503f509752ff8a90524fe78fece19523ff651dd93bee23160a4366b0b42",
        records="35c5e59e5e99a7f5535ab018d101c9a6f9fe9b53af40a52989936b3c87b0d2ba",
    ),
}


def digest(member: object) -> str:
    return sha256(json.dumps(member, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


@pytest.fixture
def configure(checkpoints: Path) -> Callable[..., Recipe]:
    """Builds an FX model and runs an official recipe on it."""

    def configure(
        recipe: str, base: str = "dense", components: str = "text", sources: Mapping[str, str] | None = None
    ) -> Recipe:
        paths = {name: checkpoints / directory for name, directory in (sources or {}).items()}
        opened = Sources(checkpoints / base, paths)
        model = models.build(opened["base"], components.split(","), sources=opened)
        configured = Recipe(model)
        RECIPES[recipe](model, configured, opened)
        return configured

    return configure


def parents(planned: PlannedRecipe) -> dict[tuple[str, ...], str]:
    """Parameters of each parent → its format."""
    return {tuple(parent.names): parent.target.format for parent in planned.parents}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_directory_members(run: Run, configure: Callable[..., Recipe], checkpoints: Path) -> None:
    recipe = configure(run.recipe, run.base, run.components, run.sources)
    if run.proposal:
        add_official_proposal(recipe, ranking=checkpoints / "rank.i64", rows=6)
    planned = plan_parents(recipe)
    auxiliary_tables = [parent.checked.auxiliaries for parent in planned.parents if parent.checked is not None]
    uses, auxiliaries = planned.uses(auxiliary_tables)
    assert digest(recipe.model.components) == run.records
    assert digest(planned.bindings) == run.bindings
    assert digest(uses) == run.uses
    assert len(recipe.model.parameters) == run.parameters
    assert len(recipe.model.resources) + len(planned.parents) + len(auxiliaries) == run.objects


STORED_AS_THEY_ARE = {
    "A": {
        "text/final_norm": "3f78134503989608",
        "text/layers/0/gdn/a_log": "b2dccfcf8232a8e8",
        "text/layers/2/gdn/dt_bias": "e88c8c556417dbac",
        "text/layers/0/gdn/convolution": "791df4d62e3cd14c",
        "text/layers/1/gdn/b_projection": "891f42d54b01dbea",
        "mtp/hidden_norm": "1f7a55a15be61040",
        "vision/position_embedding": "12f37d36b3de3b54",
        "vision/merger/fc1_bias": "73452fe3674ee975",
        "dflash2/layers/0/attention_conv/base_kernel": "7f387a75137aa4b3",
        "dflash2/layers/1/mlp_conv/kernel_projection": "edf4d68aae12d2b2",
        "dflash2/candidate_selector/successor_codebook": "39018ecc49a6691d",
        "proposal/token_ids": "d07f9f8024a58d03",
    },
    "C": {
        "text/layers/3/attention/output": "7ebbf5b3899d3074",
        "text/layers/0/gdn/a_projection": "a6af6199dc18b661",
    },
    "D": {
        "text/final_norm": "d6637bd39177ba4e",
        "text/layers/0/input_norm": "2e26e4c5853c9d8c",
        "text/layers/0/gdn/a_log": "bbaac401625f2245",
        "text/layers/0/gdn/convolution": "66dee8352f3362e0",
    },
}
"""Run → parameters in a direct format → first digits of the SHA-256 of their objects, which are their values."""


@pytest.mark.parametrize("run", STORED_AS_THEY_ARE)
def test_values_of_direct_objects(run: str, configure: Callable[..., Recipe], checkpoints: Path) -> None:
    chosen = RUNS[run]
    recipe = configure(chosen.recipe, chosen.base, chosen.components, chosen.sources)
    if chosen.proposal:
        add_official_proposal(recipe, ranking=checkpoints / "rank.i64", rows=6)
    for name, expected in STORED_AS_THEY_ARE[run].items():
        values = recipe.selections[name][0].source.values()
        stored = values.contiguous().view(torch.uint8).numpy().tobytes()
        assert sha256(stored).hexdigest()[:16] == expected, name


def test_formats_of_a_dense_run(configure: Callable[..., Recipe], checkpoints: Path) -> None:
    recipe = configure("qwen3_6_27b", "dense", "text,vision,mtp,dflash2", {"dflash2": "dflash2"})
    add_official_proposal(recipe, ranking=checkpoints / "rank.i64", rows=6)
    formats = Counter(parents(plan_parents(recipe)).values())
    assert formats == {Q4: 11, Q5: 14, Q8: 16, "bf16": 65, Q6: 3, "fp32": 6, "int32": 1}


def test_sixty_four_layers(tmp_path: Path) -> None:
    config = fx.base_config()
    config["text_config"]["num_hidden_layers"] = 64
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    fx.write_resources(tmp_path)
    fx.save_zeros(tmp_path / "model.safetensors", fx.text_tensors(layer_types=kinds))
    model = models.build(SafetensorsSource(tmp_path))
    recipe = Recipe(model)
    RECIPES["qwen3_6_27b"](model, recipe, {})
    names = list(parents(plan_parents(recipe)))
    layers = Counter(int(group[0].split("/")[2]) for group in names if group[0].startswith("text/layers/"))
    assert [layers[layer] for layer in range(64)] == [9 if kind == "full_attention" else 13 for kind in kinds]
    assert len(names) == 3 + 48 * 13 + 16 * 9 == 771


def test_later_layers_of_the_mixture_keep_more_bits(tmp_path: Path) -> None:
    config = fx.base_config(moe=True)
    config["text_config"]["num_hidden_layers"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    fx.write_resources(tmp_path)
    model = models.build(SafetensorsSource(tmp_path))
    recipe = Recipe(model)
    RECIPES["qwen3_6_35b_a3b"](model, recipe, {})
    for layer in range(40):
        prefix = f"text/layers/{layer}/moe/"
        down = Q6 if layer in (34, 38, 39) else Q5
        assert recipe.selections[f"{prefix}experts/2/down"][0].format == down
        assert recipe.selections[f"{prefix}experts/2/up"][0].format == Q4
        assert recipe.selections[f"{prefix}shared/down"][0].format == Q8
        assert recipe.selections[f"{prefix}router"][0].format == "bf16"


def test_q6_recipe_differs_in_gate_and_up(configure: Callable[..., Recipe]) -> None:
    base, changed = (
        {name: selections[0].format for name, selections in configure(recipe, "dense", "text,mtp").selections.items()}
        for recipe in ("qwen3_8_27b", "qwen3_8_27b_q6")
    )
    differing = {name for name in base if base[name] != changed[name]}
    assert differing == {f"text/layers/{layer}/mlp/{role}" for layer in range(4) for role in ("gate", "up")}
    assert {changed[name] for name in differing} == {Q6}


@pytest.fixture(scope="module")
def deep_quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Base and companion of sixty layers, without tensors: enough to configure, not to plan."""
    root = tmp_path_factory.mktemp("deep")
    config = fx.base_config()
    config["text_config"]["num_hidden_layers"] = 60
    for name in ("base", "quantized"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    fx.write_resources(root / "base")
    return root / "base", root / "quantized"


def configured_deep(recipe: str, deep: tuple[Path, Path]) -> Recipe:
    sources = Sources(deep[0], {"quantized": deep[1]})
    model = models.build(sources["base"], sources=sources)
    configured = Recipe(model)
    RECIPES[recipe](model, configured, sources)
    return configured


def test_which_layers_qwen3_6_nvfp4_leaves_in_bf16(deep_quantized: tuple[Path, Path]) -> None:
    recipe = configured_deep("qwen3_6_27b_nvfp4", deep_quantized)

    def format_of(name: str) -> str:
        return recipe.selections[f"text/layers/{name}"][0].format

    attention = range(3, 60, 4)
    for role in ("query", "key", "gate", "value"):
        assert {n for n in attention if format_of(f"{n}/attention/{role}") == "bf16"} == {3, 7, 11, 15, 19, 23}
    assert {n for n in attention if format_of(f"{n}/attention/output") == "bf16"} == {3, 7}
    delta_net = [n for n in range(60) if n not in attention]
    assert {n for n in delta_net if format_of(f"{n}/gdn/output") == "bf16"} == {4}
    assert all(format_of(f"{n}/mlp/down") == "nvfp4" for n in range(60))
    assert recipe.policies["text/layers/3/attention/query", "text/layers/3/mixer_input"] == "A16Only"
    assert recipe.policies["text/layers/27/attention/query", "text/layers/27/mixer_input"] == "AllowA4"


def test_which_layers_qwen3_8_nvfp4_takes_in_fp8(deep_quantized: tuple[Path, Path]) -> None:
    recipe = configured_deep("qwen3_8_27b_nvfp4", deep_quantized)
    for layer in range(60):
        chosen = recipe.selections[f"text/layers/{layer}/mlp/gate"][0]
        assert chosen.format == ("nvfp4" if layer < 56 else FP8)
        policy = recipe.policies[f"text/layers/{layer}/mlp/gate", f"text/layers/{layer}/ffn_input"]
        assert policy == ("AllowA4" if layer < 56 else "AllowA8")
    assert recipe.policies["text/output_head", "text/final_hidden"] == "AllowA8"
    own = recipe.model.parameters["text/token_embedding"].source
    for name, selections in recipe.selections.items():
        assert (selections[0].source is own) == (name == "text/token_embedding")
        assert (str(deep_quantized[1]) in selections[0].source.label) == (name != "text/token_embedding")
    assert not recipe.separate_parameters


DENSE = sorted(name for name in RECIPES if "27b" in name)
MOE = sorted(name for name in RECIPES if "35b" in name)


@pytest.mark.parametrize("recipe", DENSE)
def test_dense_recipes_refuse_a_mixture(recipe: str, configure: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match=r"requires (Qwen3\.5 Dense|the Qwen3\.8-27B Dense geometry)"):
        configure(recipe, "moe")


@pytest.mark.parametrize("recipe", MOE)
def test_mixture_recipes_refuse_a_dense_model(recipe: str, configure: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match=r"requires Qwen3\.5 MoE"):
        configure(recipe, "dense")


@pytest.mark.parametrize("recipe", ["qwen3_6_27b_nvfp4", "qwen3_8_27b_nvfp4"])
def test_nvfp4_recipes_require_their_source(recipe: str, configure: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match=r"requires source.*quantized"):
        configure(recipe)


def test_drafts_share_context_keys_and_values(configure: Callable[..., Recipe]) -> None:
    recipe = configure("qwen3_6_35b_a3b", "moe", "text,dflash,dflash2", {"dflash": "dflash", "dflash2": "dflash2"})
    assert list(recipe.aliases.items()) == [
        (f"{draft}/layers/{layer}/attention/context_{role}", f"{draft}/layers/{layer}/attention/{role}")
        for draft in ("dflash", "dflash2")
        for layer in range(2)
        for role in ("key", "value")
    ]
    formats: dict[str, Any] = {name: selections[0].format for name, selections in recipe.selections.items()}
    for name in ("attention_conv/kernel_projection", "mlp_conv/kernel_projection", "attention_conv/base_kernel"):
        assert formats[f"dflash2/layers/0/{name}"] == "bf16"
    assert formats["dflash2/candidate_selector/hidden_projection"] == "bf16"
    assert formats["dflash2/feature_projection"] == Q8
