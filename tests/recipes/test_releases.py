"""Recipes for quantised releases: what each parameter becomes, and which releases and models they refuse."""

from __future__ import annotations

from collections import Counter
import json
from pathlib import Path
import shutil
import struct
from typing import Any

from fixtures import releases
import pytest

from ninferbuild import models
from ninferbuild.plan import Parent, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes import RECIPES
from ninferbuild.recipes.formats import FP8, NVFP4, Q4, Q6, Q8
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.recipes.qwen3_5_releases import _expert_source
from ninferbuild.sources.opened import Sources
from ninferbuild.sources.safetensors import SafetensorsSource

LAYERS = 60


def configure(recipe: str, base: Path, quantized: Path | None, components: str = "text") -> Recipe:
    sources = Sources(base, {} if quantized is None else {"quantized": quantized})
    model = models.build(sources["base"], components.split(","), sources=sources)
    configured = Recipe(model)
    RECIPES[recipe](model, configured, sources)
    return configured


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The dense releases and the model that they were made from."""
    root = tmp_path_factory.mktemp("dense")
    return {
        "base": releases.write_dense_base(root / "base", layers=LAYERS),
        "nvidia": releases.write_model_opt(root / "nvidia", layers=LAYERS),
        "orcarouter": releases.write_gptq(root / "orcarouter", layers=LAYERS),
    }


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return releases.write_experts(tmp_path_factory.mktemp("experts") / "release", layers=2)


def chosen(recipe: Recipe, name: str) -> tuple[str, str, str, set[str]]:
    """Format, method, store and policies of a parameter that is not split."""
    (selection,) = recipe.selections[name]
    policies = {policy for (parameter, _), policy in recipe.policies.items() if parameter == name}
    own = recipe.model.parameters[name].source
    store = "base" if selection.source is own else "quantized"
    return selection.format, selection.method.name, store, policies  # type: ignore[attr-defined]


def by_names(recipe: Recipe) -> dict[tuple[str, ...], Parent]:
    return {parent.names: parent for parent in plan_parents(recipe).parents}


def under(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names.split())


class TestNvidia:
    @pytest.fixture(scope="class")
    @classmethod
    def recipe(cls, dense: dict[str, Path]) -> Recipe:
        return configure("qwen3_8_27b_nvfp4_nvidia", dense["base"], dense["nvidia"], "text,mtp")

    def test_choices(self, recipe: Recipe) -> None:
        text = "text/layers/"
        imported_fp8 = (FP8, "import_encoded", "quantized", {"AllowA8"})
        assert chosen(recipe, "text/output_head")[:3] == (FP8, "fp8_row_maxabs", "quantized")
        assert recipe.policies["text/output_head", "text/final_hidden"] == "AllowA8"
        assert chosen(recipe, "text/token_embedding") == (FP8, "fp8_row_maxabs", "base", set())
        for layer in range(LAYERS):
            for role in ("gate", "up", "down"):
                expected = (NVFP4, "import_encoded", "quantized", {"AllowA4"})
                assert chosen(recipe, f"{text}{layer}/mlp/{role}") == expected
        assert chosen(recipe, f"{text}0/gdn/z") == imported_fp8
        assert chosen(recipe, f"{text}3/attention/query") == imported_fp8
        assert chosen(recipe, f"{text}0/gdn/a_projection") == ("bf16", "cast_direct", "quantized", {"A16Only"})
        assert chosen(recipe, f"{text}0/gdn/a_log") == ("fp32", "cast_direct", "quantized", set())
        assert chosen(recipe, "text/final_norm") == ("bf16", "cast_direct", "quantized", set())
        assert chosen(recipe, "mtp/layers/0/mlp/up") == (Q8, "grouped_absmax", "base", {"A16Only"})
        assert not recipe.separate_parameters
        assert not recipe.explicit_groups

    def test_parents(self, recipe: Recipe) -> None:
        parents = by_names(recipe)
        text = "text/layers/"
        assert under(f"{text}3/attention/", "query key gate value") in parents
        assert under(f"{text}0/gdn/", "query key value z") in parents
        assert under(f"{text}0/gdn/", "a_projection b_projection") in parents
        fused = parents[under(f"{text}59/mlp/", "gate up")]
        assert (fused.target.format, fused.target.divisors) == (NVFP4, 1)
        assert fused.checked is not None
        reciprocal = struct.pack("<f", 1.0 / struct.unpack("<f", struct.pack("<f", 0.0001 * 60))[0])
        assert fused.checked.state.weight_divisors == (reciprocal,)


class TestOrcarouter:
    @pytest.fixture(scope="class")
    @classmethod
    def recipe(cls, dense: dict[str, Path]) -> Recipe:
        return configure("qwen3_8_27b_nvfp4_orcarouter", dense["base"], dense["orcarouter"])

    def test_choices(self, recipe: Recipe) -> None:
        text = "text/layers/"
        assert chosen(recipe, "text/output_head") == (FP8, "fp8_row_maxabs", "base", {"A16Only"})
        assert chosen(recipe, "text/token_embedding") == (FP8, "fp8_row_maxabs", "base", set())
        assert chosen(recipe, f"{text}0/input_norm") == ("bf16", "cast_direct", "base", set())
        assert chosen(recipe, f"{text}0/gdn/convolution") == ("bf16", "cast_direct", "base", set())
        assert chosen(recipe, f"{text}0/gdn/b_projection") == ("bf16", "cast_direct", "quantized", {"A16Only"})
        assert chosen(recipe, f"{text}55/mlp/down") == (NVFP4, "import_encoded", "quantized", {"AllowA4"})
        assert chosen(recipe, f"{text}56/mlp/down") == (FP8, "import_encoded", "quantized", {"AllowA8"})
        assert chosen(recipe, f"{text}3/attention/output") == (FP8, "import_encoded", "quantized", {"AllowA8"})
        assert not recipe.separate_parameters

    def test_gate_and_up_of_other_divisors_stay_apart(self, recipe: Recipe) -> None:
        parents = by_names(recipe)
        assert ("text/layers/0/mlp/gate",) in parents
        assert ("text/layers/0/mlp/up",) in parents
        assert under("text/layers/56/mlp/", "gate up") in parents
        assert under("text/layers/0/gdn/", "a_projection b_projection") in parents


class TestExperts:
    @pytest.fixture(scope="class")
    @classmethod
    def recipe(cls, experts: Path) -> Recipe:
        return configure("qwen3_6_35b_a3b_nvfp4", experts, experts, "text,mtp")

    def test_choices(self, recipe: Recipe) -> None:
        layer = "text/layers/0/"
        assert chosen(recipe, "text/token_embedding")[:2] == (Q8, "grouped_absmax")
        assert chosen(recipe, "text/output_head")[:2] == (Q6, "grouped_absmax")
        for name in ("moe/experts/3/up", "moe/experts/0/down", "moe/shared/gate", "moe/shared/down"):
            assert chosen(recipe, layer + name) == (NVFP4, "import_encoded", "quantized", {"AllowA4"})
        for name in ("gdn/a_projection", "gdn/b_projection", "moe/router", "moe/shared_score"):
            assert chosen(recipe, layer + name) == ("bf16", "cast_direct", "base", {"A16Only"})
        assert chosen(recipe, f"{layer}gdn/z") == (Q8, "grouped_absmax", "base", {"A16Only"})
        assert chosen(recipe, "mtp/layers/0/moe/experts/0/gate")[:2] == (Q8, "grouped_absmax")
        assert not recipe.separate_parameters

    def test_groups_are_those_of_the_text_layers(self, recipe: Recipe) -> None:
        assert len(recipe.explicit_groups) == 6
        assert all(name.startswith("text/layers/") for names, _ in recipe.explicit_groups for name in names)

    def test_all_but_the_experts_is_as_in_the_other_recipe(self, recipe: Recipe, experts: Path) -> None:
        other = configure("qwen3_6_35b_a3b", experts, None, "text,mtp")
        for name in recipe.selections:
            if not name.startswith("text/layers/") or ("/moe/experts/" not in name and "/moe/shared/" not in name):
                assert chosen(recipe, name) == chosen(other, name), name

    def test_banks_are_stacks(self, recipe: Recipe) -> None:
        parents = by_names(recipe)
        layer = "text/layers/1/moe/"
        gate_up = parents[under(layer, " ".join(f"experts/{e}/gate experts/{e}/up" for e in range(4)))]
        assert (gate_up.target.shape, gate_up.target.divisors) == ((1024, 128), 8)
        down = parents[under(layer, " ".join(f"experts/{e}/down" for e in range(4)))]
        assert (down.target.shape, down.target.divisors) == ((512, 128), 4)
        shared = parents[under(layer, "shared/gate shared/up")]
        assert (shared.target.shape, shared.target.divisors) == ((256, 128), 2)
        assert parents[under(layer, "shared/down")].target.divisors == 1
        assert under(layer, "router shared_score") in parents
        mtp = [parent for names, parent in parents.items() if "/moe/experts/" in names[0] and names[0][0] == "m"]
        assert Counter(parent.target.format for parent in mtp) == {Q8: 2}

    def test_every_use_of_a_bank_has_an_object_with_the_smallest_divisor(self, recipe: Recipe) -> None:
        planned = plan_parents(recipe)
        tables = [parent.checked.auxiliaries for parent in planned.parents if parent.checked is not None]
        uses, objects = planned.uses(tables)
        words = [item.data for item in objects]
        assert words == [struct.pack("<f", releases.ACTIVATION_DIVISOR)] * (2 * (3 * 4 + 3))
        named = [use["auxiliaries"]["activation_input_divisor"]["object"] for use in uses if "auxiliaries" in use]
        assert len(set(named)) == len(named) == len(objects)

    def test_where_experts_are_looked_for(self, experts: Path, tmp_path: Path) -> None:
        with SafetensorsSource(experts) as store:
            source = _expert_source(store, "text/layers/0/moe/experts/3/up", (128, 128))
            assert source.label == f"{experts}:model.language_model.layers.0.mlp.experts.3.up_proj (nvfp4)"
            source = _expert_source(store, "text/layers/1/moe/shared/down", (128, 128))
            assert source.label == f"{experts}:model.language_model.layers.1.mlp.shared_expert.down_proj (nvfp4)"
            with pytest.raises(ValueError, match=r"unknown expert matrix 'bias'"):
                _expert_source(store, "text/layers/0/moe/shared/bias", (128, 128))
            missing = r"moe/experts/9/up: no NVFP4 source for mlp\.experts\.9\.up_proj in .*release"
            with pytest.raises(ValueError, match=missing):
                _expert_source(store, "text/layers/0/moe/experts/9/up", (128, 128))
        flat = releases.Release(1)
        flat.compressed_nvfp4("model.layers.0.mlp.experts.3.up_proj", 128, 128, 2.0)
        releases.synthetic.save_safetensors(tmp_path / "flat.safetensors", flat.tensors)
        with SafetensorsSource(tmp_path / "flat.safetensors") as store:
            source = _expert_source(store, "text/layers/0/moe/experts/3/up", (128, 128))
            assert source.label.endswith(":model.layers.0.mlp.experts.3.up_proj (nvfp4)")

    def test_construction_reads_no_tensor_of_an_expert(self, experts: Path) -> None:
        sources = Sources(experts, {"quantized": experts})
        model = models.build(sources["base"], ["text"], sources=sources)
        RECIPES["qwen3_6_35b_a3b_nvfp4"](model, Recipe(model), sources)
        assert sources["quantized"].bytes_read == sources["base"].bytes_read == 0


@pytest.mark.parametrize(
    ("recipe", "store"),
    [
        ("qwen3_8_27b_nvfp4_nvidia", "nvidia"),  # its head is decoded NVFP4, whose rows are no FP8 to be kept
        ("qwen3_8_27b_nvfp4_orcarouter", "base"),
        ("qwen3_6_35b_a3b_nvfp4", "experts"),
    ],
)
def test_proposal_heads_have_four_bits(
    recipe: str, store: str, dense: dict[str, Path], experts: Path, tmp_path: Path
) -> None:
    paths = {**dense, "experts": experts}
    base = experts if store == "experts" else dense["base"]
    quantized = paths["orcarouter" if store == "base" else store]
    configured = configure(recipe, base, quantized, "text,mtp")
    (tmp_path / "ranking.i64").write_bytes(struct.pack("<256q", *range(256)))
    add_official_proposal(configured, ranking=tmp_path / "ranking.i64", rows=16)
    (selection,) = configured.selections["proposal/head"]
    assert (selection.format, selection.method.name) == (Q4, "grouped_absmax")  # type: ignore[attr-defined]
    assert f"{paths[store]}:lm_head" in selection.source.label
    assert configured.policies["proposal/head", "mtp/final_hidden"] == "A16Only"


class TestRefusals:
    @pytest.mark.parametrize("recipe", ["qwen3_8_27b_nvfp4_nvidia", "qwen3_8_27b_nvfp4_orcarouter"])
    def test_dense_recipes_refuse_experts(self, recipe: str, experts: Path) -> None:
        with pytest.raises(ValueError, match=r"requires Qwen3\.5 Dense"):
            configure(recipe, experts, experts)

    def test_the_recipe_of_experts_refuses_a_dense_model(self, dense: dict[str, Path]) -> None:
        with pytest.raises(ValueError, match=r"requires Qwen3\.5 MoE"):
            configure("qwen3_6_35b_a3b_nvfp4", dense["base"], dense["nvidia"])

    def test_the_source_is_asked_for(self, dense: dict[str, Path], experts: Path) -> None:
        for recipe, base in (
            ("qwen3_8_27b_nvfp4_nvidia", dense["base"]),
            ("qwen3_8_27b_nvfp4_orcarouter", dense["base"]),
            ("qwen3_6_35b_a3b_nvfp4", experts),
        ):
            with pytest.raises(ValueError, match=r"requires source 'quantized'.*--source quantized=PATH"):
                configure(recipe, base, None)

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({}, r"<\|s0\|> \(240\), <\|s1\|> \(241\), .* and 4 more"),
            ({"added_tokens_decoder": {"240": {"content": "<|s0|>", "special": True}}}, r": <\|s2\|> \(242\), "),
        ],
    )
    def test_a_tokenizer_configuration_without_its_added_tokens(
        self, config: dict[str, Any], named: str, experts: Path, tmp_path: Path
    ) -> None:
        release = shutil.copytree(experts, tmp_path / "release")
        (release / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json lacks added_tokens .*{named}.*--resource"):
            configure("qwen3_6_35b_a3b_nvfp4", release, release)

    def test_a_release_without_processor_files(self, experts: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"--resource preprocessor_config\.json=PATH"):
            configure("qwen3_6_35b_a3b_nvfp4", experts, experts, "text,vision")
