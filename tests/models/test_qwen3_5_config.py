from copy import deepcopy
import json
from typing import Any

from fixtures import fx
import pytest

from ninferbuild.models.qwen3_5 import draft_config, text_config, vision_config

Edit = dict[str, Any]
ABSENT = object()


def edited(config: dict[str, Any], edit: Edit) -> dict[str, Any]:
    """A copy with the dotted keys of ``edit`` set, or removed where the value is ``ABSENT``."""
    config = deepcopy(config)
    for key, value in edit.items():
        *path, last = key.split(".")
        target = config
        for step in path:
            target = target[step]
        if value is ABSENT:
            del target[last]
        else:
            target[last] = value
    return config


def text(edit: Edit | None = None, *, moe: bool = False, mtp: bool = False) -> dict[str, Any]:
    return text_config(edited(fx.base_config(moe=moe), edit or {}), mtp=mtp)


def test_text_config_is_stored_in_this_order() -> None:
    assert json.dumps(text(), separators=(",", ":")) == (
        '{"architectures":["Qwen3_5ForCausalLM"],"model_type":"qwen3_5_text","hidden_size":128,"vocab_size":16,'
        '"num_hidden_layers":4,"max_position_embeddings":512,"tie_word_embeddings":false,'
        '"rms_norm_eps":9.999999974752427e-07,"layer_types":["linear_attention","linear_attention",'
        '"linear_attention","full_attention"],"num_attention_heads":2,"num_key_value_heads":1,"head_dim":64,'
        '"rope_parameters":{"rope_theta":10000000.0,"partial_rotary_factor":0.25,"mrope_section":[3,3,2]},'
        '"linear_num_key_heads":1,"linear_key_head_dim":64,"linear_num_value_heads":2,"linear_value_head_dim":64,'
        '"linear_conv_kernel_dim":4,"intermediate_size":256}'
    )


def test_moe_config_has_expert_fields_instead() -> None:
    config = text(moe=True)
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["model_type"] == "qwen3_5_moe_text"
    assert list(config)[-4:] == [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ]
    assert "intermediate_size" not in config


def test_a_flat_config_describes_the_text_itself() -> None:
    flat = {"architectures": ["Qwen3_5ForCausalLM"], **fx.text_config()}
    assert text_config(flat, mtp=False) == text()


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "unsupported Qwen text architecture"),
        ({"architectures": "Qwen3_5ForCausalLM"}, "unsupported Qwen text architecture"),
        ({"architectures": ["Qwen3_5ForCausalLM"] * 2}, "unsupported Qwen text architecture"),
        ({"architectures": ABSENT}, "unsupported Qwen text architecture"),
        ({"text_config": None}, "text_config: expected an object"),
        ({"text_config.hidden_act": "relu"}, "hidden_act: expected 'silu'"),
        ({"text_config.attention_bias": True}, "attention_bias: expected False"),
        ({"text_config.attn_output_gate": False}, "attn_output_gate: expected True"),
        ({"text_config.hidden_size": ABSENT}, "text.hidden_size: expected a positive integer"),
        ({"text_config.vocab_size": True}, "text.vocab_size: expected a positive integer"),
        ({"text_config.tie_word_embeddings": 0}, "must be boolean"),
        ({"text_config.rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a real value"),
        ({"text_config.layer_types": ["full_attention"]}, "must describe every block"),
        ({"text_config.layer_types": ["full_attention", "x", "full_attention", "full_attention"]}, "every block"),
        ({"text_config.full_attention_interval": 0}, "full_attention_interval: expected a positive integer"),
        ({"text_config.num_key_value_heads": 3}, "divisible by KV heads"),
        ({"text_config.mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: expected 'float32'"),
        ({"text_config.linear_num_key_heads": 3}, "divisible by key heads"),
        ({"text_config.rope_parameters.mrope_section": [3, 3]}, "three nonnegative integers"),
        ({"text_config.rope_parameters.mrope_section": ABSENT}, "three nonnegative integers"),
        ({"text_config.rope_parameters.mrope_section": [3, 3, True]}, "three nonnegative integers"),
        ({"text_config.rope_parameters.mrope_section": [3, 3, 3]}, "rotary width disagree"),
        ({"text_config.rope_parameters.partial_rotary_factor": 2}, "rotary width disagree"),
        ({"text_config.rope_parameters.partial_rotary_factor": 0.01}, "rotary width disagree"),
        ({"text_config.head_dim": 60}, "rotary width disagree"),
        ({"text_config.rope_parameters.mrope_section": [1, 4, 3]}, "exceed the interleaved axis ranges"),
        ({"text_config.rope_parameters.mrope_interleaved": False}, "mrope_interleaved: expected True"),
        ({"text_config.intermediate_size": ABSENT}, "intermediate_size: expected a positive integer"),
    ],
)
def test_unsuitable_text_is_refused(edit: Edit, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        text(edit)


def test_active_experts_fit_the_experts() -> None:
    with pytest.raises(ValueError, match="exceed expert count"):
        text({"text_config.num_experts_per_tok": 4}, moe=True)


@pytest.mark.parametrize(
    ("raw", "whole", "expected"),
    [(True, False, True), (False, True, False), (ABSENT, True, True), (ABSENT, ABSENT, False)],
)
def test_tying_is_looked_for_in_the_text_first(raw: object, whole: object, expected: bool) -> None:
    edit: Edit = {"text_config.tie_word_embeddings": raw}
    if whole is not ABSENT:
        edit["tie_word_embeddings"] = whole
    assert text(edit)["tie_word_embeddings"] is expected


def test_layers_come_from_the_interval_unless_listed() -> None:
    linear, full = "linear_attention", "full_attention"
    assert text({"text_config.full_attention_interval": 2})["layer_types"] == [linear, full, linear, full]
    listed = [full, linear, full, linear]
    assert text({"text_config.layer_types": listed})["layer_types"] == listed
    assert text({"text_config.layer_types": None})["layer_types"] == [linear, linear, linear, full]


def test_only_mixers_that_occur_are_described() -> None:
    linear = text({"text_config.layer_types": ["linear_attention"] * 4, "text_config.head_dim": ABSENT})
    assert "head_dim" not in linear
    assert "rope_parameters" not in linear
    full = text({"text_config.layer_types": ["full_attention"] * 4, "text_config.linear_conv_kernel_dim": ABSENT})
    assert "linear_conv_kernel_dim" not in full


def test_mtp_needs_attention_in_any_case() -> None:
    edit: Edit = {"text_config.layer_types": ["linear_attention"] * 4}
    assert text(edit, mtp=True)["head_dim"] == 64
    for key, value in (("mtp_num_hidden_layers", 3), ("mtp_use_dedicated_embeddings", True)):
        assert text({f"text_config.{key}": value})
        with pytest.raises(ValueError, match=key):
            text({f"text_config.{key}": value}, mtp=True)


def test_rope_scaling_may_carry_plain_rope() -> None:
    rope = fx.text_config()["rope_parameters"]
    plain = {**{key: value for key, value in rope.items() if key != "rope_type"}, "type": "default"}
    moved: Edit = {"text_config.rope_parameters": ABSENT, "text_config.rope_scaling": plain}
    assert text(moved) == text()
    with pytest.raises(ValueError, match="rope_type"):
        text({**moved, "text_config.rope_scaling": {**plain, "rope_type": "linear"}})
    with pytest.raises(ValueError, match="factor"):
        text({**moved, "text_config.rope_scaling": {**plain, "factor": 2}})


def test_rope_fields_default_to_the_text_and_then_to_the_family() -> None:
    bare: Edit = {
        "text_config.rope_parameters.rope_theta": ABSENT,
        "text_config.rope_parameters.partial_rotary_factor": ABSENT,
    }
    assert text(bare)["rope_parameters"] == {
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    }
    named = text({**bare, "text_config.rope_theta": 500, "text_config.partial_rotary_factor": 0.25})
    assert named["rope_parameters"]["rope_theta"] == 500.0


def vision(edit: Edit | None = None, *, moe: bool = False) -> dict[str, Any]:
    return vision_config(edited(fx.base_config(moe=moe), edit or {}), text(moe=moe))


def test_vision_config_is_stored_in_this_order() -> None:
    assert list(vision().items()) == [
        ("model_type", "qwen3_5_vision"),
        ("depth", 1),
        ("hidden_size", 64),
        ("intermediate_size", 96),
        ("num_heads", 4),
        ("patch_size", 2),
        ("temporal_patch_size", 2),
        ("spatial_merge_size", 2),
        ("num_position_embeddings", 16),
    ]
    assert vision(moe=True)["model_type"] == "qwen3_5_moe_vision"


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        ({"vision_config": ABSENT}, "Vision requires vision_config"),
        ({"vision_config": None}, "Vision requires vision_config"),
        ({"vision_config": []}, "Vision requires vision_config"),
        ({"vision_config.in_channels": 99}, "in_channels"),
        ({"vision_config.hidden_act": "silu"}, "hidden_act"),
        ({"vision_config.deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"),
        ({"vision_config.out_hidden_size": 64}, "out_hidden_size: expected 128"),
        ({"vision_config.depth": 0}, "vision.depth"),
        ({"vision_config.num_heads": 3}, "position geometry is invalid"),
        ({"vision_config.num_heads": 32}, "position geometry is invalid"),
        ({"vision_config.num_position_embeddings": 15}, "position geometry is invalid"),
    ],
)
def test_unsuitable_vision_is_refused(edit: Edit, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        vision(edit)


def draft(edit: Edit | None = None, backend: str = "dflash2") -> dict[str, Any]:
    return draft_config(edited(fx.draft_config(backend), edit or {}), text(), backend)


def test_draft_config_is_stored_in_this_order() -> None:
    assert json.dumps(draft(), separators=(",", ":")) == (
        '{"architectures":["DFlash2DraftModel"],"model_type":"qwen3","intermediate_size":192,"num_attention_heads":4,'
        '"num_key_value_heads":2,"head_dim":32,"num_hidden_layers":2,"max_position_embeddings":256,'
        '"rms_norm_eps":9.999999974752427e-07,"rope_parameters":{"rope_theta":1000000.0},'
        '"layer_types":["sliding_attention","full_attention"],"sliding_window":32,'
        '"dflash_config":{"target_layer_ids":[1,3],"mask_token_id":11,"conv_kernel_size":2,"conv_group_size":16,'
        '"selector_rank":8,"selector_top_k":4}}'
    )
    assert draft(backend="dflash")["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 11}


def test_draft_layer_ids_keep_their_order() -> None:
    assert draft({"dflash_config.target_layer_ids": [3, 1]})["dflash_config"]["target_layer_ids"] == [3, 1]


def test_draft_layers_come_from_the_window_unless_listed() -> None:
    windowed: Edit = {"layer_types": ABSENT, "num_hidden_layers": 6, "use_sliding_window": True}
    assert draft({**windowed, "max_window_layers": 5})["layer_types"] == ["full_attention"] * 5 + ["sliding_attention"]
    all_full = draft({**windowed, "sliding_window": ABSENT})
    assert all_full["layer_types"] == ["full_attention"] * 6
    assert "sliding_window" not in all_full
    disabled = draft({**windowed, "use_sliding_window": False, "max_window_layers": 0})
    assert disabled["layer_types"] == ["full_attention"] * 6


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "architectures"),
        ({"model_type": "qwen2"}, "model_type"),
        ({"is_causal": True}, "is_causal"),
        ({"hidden_size": 64}, "hidden_size: expected 128"),
        ({"vocab_size": 17}, "vocab_size: expected 16"),
        ({"num_target_layers": 5}, "num_target_layers: expected 4"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "invalid attention geometry"),
        ({"head_dim": 33}, "invalid attention geometry"),
        ({"layer_types": ["full_attention"]}, "invalid layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "invalid layer_types"),
        ({"layer_types": None, "use_sliding_window": 1}, "must be boolean"),
        ({"layer_types": None, "max_window_layers": -1}, "must be nonnegative"),
        ({"sliding_window": ABSENT}, "sliding_window: expected a positive integer"),
        ({"dflash_config": None}, "dflash_config: expected an object"),
        ({"dflash_config": ABSENT}, "invalid target_layer_ids"),
        ({"dflash_config.target_layer_ids": []}, "invalid target_layer_ids"),
        ({"dflash_config.target_layer_ids": [1, 1]}, "invalid target_layer_ids"),
        ({"dflash_config.target_layer_ids": [1, 4]}, "invalid target_layer_ids"),
        ({"dflash_config.target_layer_ids": [1, True]}, "invalid target_layer_ids"),
        ({"dflash_config.mask_token_id": 16}, "mask token outside"),
        ({"dflash_config.mask_token_id": True}, "mask token outside"),
        ({"dflash_config.selector_rank": 0}, "selector_rank"),
        ({"dflash_config.conv_group_size": 24}, "divisible by conv_group_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"dflash_config.input_embedding_scale": 2.0}, "input_embedding_scale"),
        ({"dflash_config.output_multiplier": 0.5}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "must be disabled"),
    ],
)
def test_unsuitable_draft_is_refused(edit: Edit, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        draft(edit)


def test_switched_off_draft_features_pass() -> None:
    off: Edit = {"final_logit_softcapping": 0, "dflash_config.final_logit_softcapping": None, "output_multiplier": 1}
    assert draft(off) == draft()
    assert draft({"sample_from_anchor": True}, "dflash") == draft(backend="dflash")
