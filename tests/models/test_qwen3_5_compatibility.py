from collections.abc import Callable
from copy import deepcopy
import json
from pathlib import Path
from typing import Any

from fixtures import fx
import pytest
import torch

from ninferbuild.models.qwen3_5 import COMPONENTS, build_model
from ninferbuild.models.qwen3_5.compatibility import Compatibility, has_model_config
from ninferbuild.sources.safetensors import SafetensorsSource

OpenFx = Callable[[str], SafetensorsSource]

HALF_ROPE = {**fx.text_config()["rope_parameters"], "partial_rotary_factor": 0.125}
"""As many rotary pairs with twice the head size."""


def config_store(directory: Path, config: dict[str, Any]) -> SafetensorsSource:
    """A checkpoint without tensors."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return SafetensorsSource(directory)


@pytest.fixture
def check(open_fx: OpenFx, tmp_path: Path) -> Callable[..., None]:
    """``check(name, config)``: whether a checkpoint with ``config`` may provide the parameter of FX dense or MoE."""

    def check(name: str, config: dict[str, Any], *, base: str = "dense") -> None:
        companions = {draft: open_fx(draft) for draft in ("dflash", "dflash2")}
        model = build_model(open_fx(base), components=COMPONENTS, companions=companions)
        assert name in model.parameters
        store = config_store(tmp_path / f"store{len(list(tmp_path.iterdir()))}", config)
        model.source(name, store)

    return check


def text_config(**changes: Any) -> dict[str, Any]:
    config = fx.base_config()
    config["text_config"] |= changes
    return config


def test_a_flat_fine_tune_with_other_rope_provides_text(open_fx: OpenFx) -> None:
    alt = open_fx("alt")
    alt.config["rope_parameters"]["rope_theta"] = 1234  # type: ignore[index]
    alt.config["max_position_embeddings"] = 99  # type: ignore[index]
    model = build_model(open_fx("dense"))
    name = "text/layers/0/mlp/down"
    source = model.source(name, alt)
    assert source.label.endswith(":model.layers.0.mlp.down_proj.weight")
    assert source.shape == model.parameters[name].shape
    assert not torch.equal(source.values(), model.parameters[name].source.values())
    assert model.source("text/output_head", alt).label.endswith(":lm_head.weight")


def test_a_nested_checkpoint_provides_a_flat_model(open_fx: OpenFx, tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3_5ForCausalLM"], **fx.text_config()}
    flat = config_store(tmp_path / "flat", config)
    fx.write_resources(flat.root)
    model = build_model(flat)
    name = "text/layers/1/gdn/query"
    assert ":model.layers.1.linear_attn" in model.parameters[name].source.label
    assert f":{fx.TEXT_PREFIX}layers.1.linear_attn" in model.source(name, open_fx("dense")).label
    assert ":model.layers.1.linear_attn" in model.source(name, config_store(tmp_path / "tensors", {})).label


def test_mere_tensors_keep_the_base_names(open_fx: OpenFx) -> None:
    quantized = open_fx("q8")
    assert not has_model_config(quantized)
    source = build_model(open_fx("dense")).source("text/layers/3/attention/query", quantized)
    assert f":{fx.TEXT_PREFIX}layers.3.self_attn.q_proj.weight" in source.label


@pytest.mark.parametrize(
    "key", ["quantization_config", "_name_or_path", "transformers_version", "torch_dtype", "dtype"]
)
def test_bookkeeping_is_no_model_config(key: str, tmp_path: Path) -> None:
    assert not has_model_config(config_store(tmp_path / "a", {key: {}}))
    assert has_model_config(config_store(tmp_path / "b", {key: {}, "hidden_size": 1}))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("text/layers/3/attention/query", {"head_dim": 128, "rope_parameters": HALF_ROPE}, "head_dim"),
        ("text/layers/3/attention/key", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("text/layers/0/gdn/z", {"linear_num_value_heads": 4}, "linear_num_value_heads"),
        ("text/layers/0/gdn/convolution", {"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim"),
        ("text/layers/0/mlp/up", {"intermediate_size": 128}, "intermediate_size"),
        ("text/layers/0/input_norm", {"hidden_size": 64}, "hidden_size"),
        ("text/token_embedding", {"vocab_size": 17}, "vocab_size"),
        ("text/output_head", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("mtp/layers/0/attention/key", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_text_fields_that_matter(check: Callable[..., None], name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"additional source {field} differs"):
        check(name, text_config(**changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("text/layers/0/gdn/z", {"linear_conv_kernel_dim": 5}),
        ("text/layers/0/mlp/up", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 99}),
        ("text/token_embedding", {"tie_word_embeddings": True}),
        ("text/layers/3/attention/query", {"intermediate_size": 8}),
    ],
)
def test_text_fields_that_do_not(check: Callable[..., None], name: str, changes: dict[str, Any]) -> None:
    check(name, text_config(**changes))


def test_experts_and_router(check: Callable[..., None]) -> None:
    config = fx.base_config(moe=True)
    config["text_config"]["num_experts"] = 5
    for name in ("moe/router", "moe/experts/2/up"):
        with pytest.raises(ValueError, match="additional source num_experts differs"):
            check(f"text/layers/0/{name}", config, base="moe")
    check("text/layers/0/moe/shared/up", config, base="moe")
    config["text_config"]["shared_expert_intermediate_size"] = 8
    with pytest.raises(ValueError, match="shared_expert_intermediate_size differs"):
        check("text/layers/0/moe/shared/down", config, base="moe")
    with pytest.raises(ValueError, match="additional source moe_intermediate_size differs"):
        check("text/layers/0/moe/experts/0/up", fx.base_config(), base="moe")


def test_layers_must_be_of_one_kind(check: Callable[..., None]) -> None:
    other = text_config(full_attention_interval=2)
    check("text/layers/3/attention/query", other)
    check("text/layers/0/gdn/z", other)
    with pytest.raises(ValueError, match="layer topology differs"):
        check("text/layers/1/mlp/up", other)
    with pytest.raises(ValueError, match="layer topology differs"):
        check("text/layers/3/mlp/up", text_config(num_hidden_layers=3, full_attention_interval=4))


def test_vision_fields(check: Callable[..., None]) -> None:
    def vision(**changes: Any) -> dict[str, Any]:
        config = fx.base_config()
        config["vision_config"] |= changes
        return config

    for name, changes, field in (
        ("vision/layers/0/norm1_bias", {"hidden_size": 128}, "hidden_size"),
        ("vision/layers/0/attention/query", {"num_heads": 2}, "num_heads"),
        ("vision/layers/0/mlp/fc1", {"intermediate_size": 8}, "intermediate_size"),
        ("vision/patch_embedding", {"patch_size": 4}, "patch_size"),
        ("vision/merger/fc1", {"spatial_merge_size": 1}, "spatial_merge_size"),
        ("vision/position_embedding", {"num_position_embeddings": 25}, "num_position_embeddings"),
    ):
        with pytest.raises(ValueError, match=f"additional source {field} differs"):
            check(name, vision(**changes))
    check("vision/merger/norm_weight", vision(spatial_merge_size=1, num_heads=2, depth=7))
    with pytest.raises(ValueError, match="in_channels"):
        check("vision/merger/fc1", vision(in_channels=4))


def test_layers_beyond_the_other_vision_encoder(open_fx: OpenFx, tmp_path: Path) -> None:
    config = fx.base_config()
    config["vision_config"]["depth"] = 2
    deep = config_store(tmp_path / "deep", config)
    fx.write_resources(deep.root)
    model = build_model(deep, components=("text", "vision"))
    model.source("vision/layers/0/mlp/fc1", open_fx("dense"))
    with pytest.raises(ValueError, match="layer topology differs"):
        model.source("vision/layers/1/mlp/fc1", open_fx("dense"))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("dflash2/feature_projection", {"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ("dflash2/layers/0/mlp_conv/base_kernel", {"conv_kernel_size": 3}, "conv_kernel_size"),
        ("dflash2/layers/0/mlp_conv/kernel_projection", {"conv_group_size": 32}, "conv_group_size"),
        ("dflash2/candidate_selector/successor_codebook", {"selector_rank": 4}, "selector_rank"),
    ],
)
def test_draft_fields(check: Callable[..., None], name: str, changes: dict[str, Any], field: str) -> None:
    config = fx.draft_config("dflash2")
    config["dflash_config"] |= changes
    with pytest.raises(ValueError, match=f"{field} differs"):
        check(name, config)
    check("dflash2/context_norm", config)


def test_draft_blocks(check: Callable[..., None]) -> None:
    config = fx.draft_config("dflash")
    config["dflash_config"] |= {"mask_token_id": 3}
    check("dflash/layers/0/attention/query", config)
    for name, key in (("attention/query", "num_attention_heads"), ("mlp/up", "intermediate_size")):
        other = deepcopy(config)
        other[key] *= 2
        with pytest.raises(ValueError, match=f"additional source {key} differs"):
            check(f"dflash/layers/0/{name}", other)
    other = deepcopy(config)
    other["layer_types"] = ["full_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer topology differs"):
        check("dflash/layers/0/mlp/up", other)
    check("dflash/layers/1/mlp/up", other)


def test_a_draft_checkpoint_with_other_top_k_is_fine(check: Callable[..., None]) -> None:
    config = fx.draft_config("dflash2")
    config["dflash_config"]["selector_top_k"] = 9
    check("dflash2/candidate_selector/hidden_projection", config)


def test_a_store_is_read_once_for_a_component(open_fx: OpenFx, monkeypatch: pytest.MonkeyPatch) -> None:
    from ninferbuild.models.qwen3_5 import compatibility, config

    calls = []

    def counted(source: Any, *, mtp: bool) -> dict[str, Any]:
        calls.append(mtp)
        return config.text_config(source, mtp=mtp)

    monkeypatch.setattr(compatibility, "text_config", counted)
    checks = Compatibility({"text": config.text_config(fx.base_config(), mtp=False)})
    store = open_fx("alt")
    for layer in range(3):
        checks.check(f"text/layers/{layer}/gdn/z", store)
    assert calls == [False]
