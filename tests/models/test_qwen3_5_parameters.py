from collections.abc import Callable, Iterable
from hashlib import sha256
import json
from pathlib import Path
from typing import Any

from fixtures import fx
import numpy as np
import pytest
import torch

from ninferbuild.models import Model
from ninferbuild.models.qwen3_5 import COMPONENTS, build_model
from ninferbuild.sources.safetensors import SafetensorsSource

OpenFx = Callable[[str], SafetensorsSource]


def build(open_fx: OpenFx, base: str = "dense", components: Iterable[str] = COMPONENTS) -> Model:
    companions = {name: open_fx(name) for name in ("dflash", "dflash2") if name in components}
    return build_model(open_fx(base), components=components, companions=companions)


@pytest.mark.parametrize(
    ("base", "parameters", "groups", "digest"),
    [("dense", 173, 33, "339dcc4f21150aa7"), ("moe", 228, 48, "9e4ae97ad4a8a9b7")],
)
def test_all_components(open_fx: OpenFx, base: str, parameters: int, groups: int, digest: str) -> None:
    model = build(open_fx, base)
    assert len(model.parameters) == parameters
    assert len(model.packing_groups) == groups
    assert sha256("\n".join(model.parameters).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("base", ["dense", "moe"])
def test_every_stored_tensor_is_a_parameter_of_its_shape(open_fx: OpenFx, base: str) -> None:
    """Describing a source checks the tensor's name and shape; together the parameters use every tensor."""
    model = build(open_fx, base)
    used = set()
    for parameter in model.parameters.values():
        description = parameter.source.description
        assert description is not None, parameter.name
        assert description.shape == parameter.shape
        assert description.dtype in ("BF16", "F32")
        label = parameter.source.label
        used.update(name for name in _stored_names(open_fx, base) if f":{name}" in label)
    assert used == _stored_names(open_fx, base)


def _stored_names(open_fx: OpenFx, base: str) -> set[str]:
    return {name for store in (base, "dflash", "dflash2") for name in open_fx(store).weight_map}


def test_component_records(open_fx: OpenFx) -> None:
    model = build(open_fx, components=COMPONENTS[::-1])
    assert list(model.components) == ["text", "vision", "mtp", "dflash", "dflash2"]
    assert list(model.components["text"]) == ["config", "resources"]
    assert list(model.components["vision"]) == ["config", "target", "resources"]
    assert model.components["mtp"] == {"config": {"architectures": ["Qwen3_5MTP"]}, "target": "text"}
    assert build(open_fx, "moe", ("text", "mtp")).components["mtp"]["config"] == {"architectures": ["Qwen3_5MoeMTP"]}
    assert list(model.components["dflash"]) == ["config", "target"]
    assert (model.token_count, model.special_token_ids) == (12, (10,))
    assert model.config is model.components["text"]["config"]


@pytest.mark.parametrize("components", [(), ("vision",), ("text", "audio")])
def test_component_sets(open_fx: OpenFx, components: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="supported optional components"):
        build(open_fx, components=components)


def test_drafts_require_their_source(open_fx: OpenFx) -> None:
    with pytest.raises(ValueError, match="dflash2 requires its source"):
        build_model(open_fx("dense"), components=("text", "dflash2"))


def test_inputs_residency_and_formats(open_fx: OpenFx) -> None:
    parameters = build(open_fx).parameters
    finals = ("text/final_hidden", "mtp/final_hidden", "dflash/final_hidden", "dflash2/final_hidden")
    assert parameters["text/output_head"].inputs == finals
    assert parameters["text/token_embedding"].inputs == ()
    assert not parameters["text/final_norm"].projection
    assert build(open_fx, components=("text", "mtp")).parameters["text/output_head"].inputs == finals[:2]
    for name, inputs in (
        ("text/layers/3/attention/output", "text/layers/3/attention/gated_output"),
        ("text/layers/0/gdn/a_projection", "text/layers/0/mixer_input"),
        ("text/layers/0/gdn/output", "text/layers/0/gdn/gated_output"),
        ("text/layers/0/mlp/up", "text/layers/0/ffn_input"),
        ("text/layers/0/mlp/down", "text/layers/0/mlp/product"),
        ("mtp/input_projection", "mtp/stem_input"),
        ("vision/patch_embedding", "vision/patch_input"),
        ("vision/layers/0/attention/key", "vision/layers/0/attention_input"),
        ("vision/layers/0/attention/output", "vision/layers/0/attention_output"),
        ("vision/layers/0/mlp/fc2", "vision/layers/0/mlp_activation"),
        ("vision/merger/fc1", "vision/merger/input"),
        ("dflash/layers/1/attention/key", "dflash/layers/1/query_projection_input"),
        ("dflash/layers/1/attention/context_key", "dflash/context_input"),
        ("dflash/layers/0/mlp/down", "dflash/layers/0/mlp_product"),
        ("dflash2/layers/0/mlp_conv/kernel_projection", "dflash2/layers/0/mlp_conv_input"),
        ("dflash2/candidate_selector/hidden_projection", "dflash2/final_hidden"),
    ):
        assert parameters[name].inputs == (inputs,), name
    assert {p.name for p in parameters.values() if p.direct_format == "fp32"} == {
        f"text/layers/{layer}/gdn/{name}" for layer in range(3) for name in ("a_log", "dt_bias")
    }
    assert all(p.direct_format in ("bf16", "fp32") for p in parameters.values())
    assert all(p.residency == name.split("/")[0] for name, p in parameters.items())


def test_packing_groups_of_the_experts_interleave_gate_and_up(open_fx: OpenFx) -> None:
    groups = build(open_fx, "moe", ("text",)).packing_groups
    layer = [tuple(n.removeprefix("text/layers/0/") for n in g) for g in groups if g[0].startswith("text/layers/0/")]
    assert layer == [
        ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
        ("gdn/query", "gdn/key"),
        ("gdn/value", "gdn/z"),
        ("gdn/a_projection", "gdn/b_projection"),
        ("moe/router", "moe/shared_score"),
        tuple(f"moe/experts/{expert}/{role}" for expert in range(3) for role in ("gate", "up")),
        tuple(f"moe/experts/{expert}/down" for expert in range(3)),
        ("moe/shared/gate", "moe/shared/up"),
    ]


def test_source_labels(open_fx: OpenFx, checkpoints: Path) -> None:
    parameters = build(open_fx, "moe", ("text",)).parameters
    layer = f"{checkpoints / 'moe'}:{fx.TEXT_PREFIX}layers.0."
    conv = f"transpose({layer}linear_attn.conv1d.weight[0:1024],(2, 0, 1))"
    assert parameters["text/layers/0/gdn/convolution"].source.label == conv
    rows = f"rows({layer}linear_attn.in_proj_qkv.weight, 1 spans, 64 rows)"
    assert parameters["text/layers/0/gdn/key"].source.label == rows
    assert parameters["text/output_head"].source.label == f"{checkpoints / 'moe'}:lm_head.weight"
    gate = f"{layer}mlp.experts.gate_up_proj[0:8192]"
    assert parameters["text/layers/0/moe/experts/0/gate"].source.label == gate


def test_tied_head_is_a_parameter_of_its_own(open_fx: OpenFx, tmp_path: Path) -> None:
    config = fx.base_config()
    config["tie_word_embeddings"] = True
    del config["text_config"]["tie_word_embeddings"]
    store = _write(tmp_path / "tied", config, {f"{fx.TEXT_PREFIX}embed_tokens.weight": (fx.VOCAB, fx.HIDDEN)})
    model = build_model(store)
    head, embedding = model.parameters["text/output_head"], model.parameters["text/token_embedding"]
    assert head.source.label == embedding.source.label
    assert head.inputs
    assert not embedding.inputs


def test_nothing_of_unselected_components_is_validated(open_fx: OpenFx, tmp_path: Path) -> None:
    config = fx.base_config()
    config["vision_config"] = {"in_channels": 99}
    config["text_config"]["mtp_num_hidden_layers"] = 3
    store = _write(tmp_path / "odd", config, {})
    assert build_model(store).components.keys() == {"text"}
    with pytest.raises(ValueError, match="in_channels"):
        build_model(store, components=("text", "vision"))
    with pytest.raises(ValueError, match="mtp_num_hidden_layers"):
        build_model(store, components=("text", "mtp"))


def test_selector_fits_the_token_domain(open_fx: OpenFx, tmp_path: Path) -> None:
    config = fx.draft_config("dflash2")
    config["dflash_config"]["selector_top_k"] = 13
    draft = _write(tmp_path / "draft", config, {})
    with pytest.raises(ValueError, match="selector_top_k exceeds"):
        build_model(open_fx("dense"), components=("text", "dflash2"), companions={"dflash2": draft})


def test_mtp_may_come_from_a_companion_file(open_fx: OpenFx, tmp_path: Path) -> None:
    path = tmp_path / "mtp.safetensors"
    fx.save(path, {name: fx.float_tensor(name, shape, name + "#mtp") for name, shape in fx.mtp_tensors()})
    companion = SafetensorsSource(path)
    assert companion.config == {}
    own = build(open_fx, components=("text", "mtp"))
    model = build_model(open_fx("dense"), components=("text", "mtp"), companions={"mtp": companion})
    assert list(model.parameters) == list(own.parameters)
    assert model.components == own.components
    for name, parameter in model.parameters.items():
        if name.startswith("mtp/"):
            assert f"{path}:mtp." in parameter.source.label
            assert not torch.equal(parameter.source.values(), own.parameters[name].source.values())
        else:
            assert parameter.source.label == own.parameters[name].source.label


# Where values come from, on a model small enough to write the numbers down


def _write(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> SafetensorsSource:
    """A checkpoint whose tensors count upwards in F32."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    fx.write_resources(directory)
    tensors: dict[str, fx.Tensor] = {
        name: ("F32", shape, np.arange(np.prod(shape), dtype="<f4")) for name, shape in shapes.items()
    }
    fx.save(directory / "model.safetensors", tensors)
    return SafetensorsSource(directory)


@pytest.fixture
def tiny(tmp_path: Path) -> SafetensorsSource:
    """Hidden size 16, a linear and a full-attention layer, three experts."""
    config = fx.base_config(moe=True)
    config["text_config"] |= {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "head_dim": 8,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 3,
        "moe_intermediate_size": 8,
    }
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 0, 0]
    config["vision_config"] |= {"hidden_size": 8, "num_heads": 2, "temporal_patch_size": 1}
    layers = fx.TEXT_PREFIX + "layers."
    store = _write(
        tmp_path / "tiny",
        config,
        {
            layers + "0.linear_attn.in_proj_qkv.weight": (16, 16),
            layers + "0.linear_attn.conv1d.weight": (16, 1, 3),
            layers + "1.self_attn.q_proj.weight": (32, 16),
            layers + "0.mlp.experts.gate_up_proj": (3, 16, 16),
            layers + "0.mlp.experts.down_proj": (3, 16, 8),
            "model.visual.patch_embed.proj.weight": (8, 3, 1, 2, 2),
            "model.visual.blocks.0.attn.qkv.weight": (24, 8),
            "model.visual.blocks.0.attn.qkv.bias": (24,),
        },
    )
    processor = json.dumps({"patch_size": 2, "temporal_patch_size": 1, "merge_size": 2})
    for role in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / "tiny" / role).write_text(processor)
    return store


def _values(model: Model, name: str) -> torch.Tensor:
    parameter = model.parameters[name]
    return parameter.source.values().reshape(parameter.shape)


def test_values_of_small_tensors(tiny: SafetensorsSource) -> None:
    model = build_model(tiny, components=("text", "vision"))
    query_and_gate = torch.arange(512.0).reshape(32, 16)
    attention = "text/layers/1/attention/"
    assert torch.equal(_values(model, attention + "query"), query_and_gate[[*range(8), *range(16, 24)]])
    assert torch.equal(_values(model, attention + "gate"), query_and_gate[[*range(8, 16), *range(24, 32)]])

    mixed = torch.arange(256.0).reshape(16, 16)
    assert torch.equal(_values(model, "text/layers/0/gdn/query"), mixed[:4])
    assert torch.equal(_values(model, "text/layers/0/gdn/key"), mixed[4:8])
    assert torch.equal(_values(model, "text/layers/0/gdn/value"), mixed[8:])
    convolution = torch.arange(48.0).reshape(16, 1, 3)[:, 0, :].T
    assert torch.equal(_values(model, "text/layers/0/gdn/convolution"), convolution)

    assert torch.equal(_values(model, "vision/patch_embedding"), torch.arange(96.0).reshape(8, 12))
    assert torch.equal(_values(model, "vision/layers/0/attention/key_bias"), torch.arange(8.0, 16.0))
    assert torch.equal(_values(model, "vision/layers/0/attention/value"), torch.arange(128.0, 192.0).reshape(8, 8))

    gate_up, down = torch.arange(768.0).reshape(3, 16, 16), torch.arange(384.0).reshape(3, 16, 8)
    for expert in range(3):
        prefix = f"text/layers/0/moe/experts/{expert}/"
        assert torch.equal(_values(model, prefix + "gate"), gate_up[expert, :8])
        assert torch.equal(_values(model, prefix + "up"), gate_up[expert, 8:])
        assert torch.equal(_values(model, prefix + "down"), down[expert])


def test_a_store_may_keep_each_expert_on_its_own(tiny: SafetensorsSource, tmp_path: Path) -> None:
    experts = fx.TEXT_PREFIX + "layers.0.mlp.experts."
    store = _write(
        tmp_path / "split",
        dict(tiny.config),
        {f"{experts}1.gate_proj.weight": (8, 16), f"{experts}gate_up_proj": (3, 16, 16)},
    )
    model = build_model(store)
    own, fused = (model.parameters[f"text/layers/0/moe/experts/{expert}/gate"].source for expert in (1, 2))
    assert own.label == f"{store.path}:{experts}1.gate_proj.weight"
    assert torch.equal(own.values(), torch.arange(128.0))
    assert own.read_encoded is not None
    assert fused.label == f"{store.path}:{experts}gate_up_proj[512:640]"


def test_only_matrices_offer_encoded_rows(tiny: SafetensorsSource) -> None:
    model = build_model(tiny)
    assert model.source("text/layers/1/attention/query", tiny, "nvfp4").read_encoded is not None
    with pytest.raises(ValueError, match="transpose source requires value access"):
        model.source("text/layers/0/gdn/convolution", tiny, "nvfp4")
    with pytest.raises(ValueError, match="provide an explicit encoded source mapping"):
        model.source("text/layers/0/moe/experts/0/gate", tiny, "nvfp4")
    with pytest.raises(ValueError, match="explicit encoded source mapping"):
        model.source("text/final_norm", tiny, "nvfp4")


def test_missing_tensors_surface_when_they_are_used(tiny: SafetensorsSource) -> None:
    source = build_model(tiny).parameters["text/layers/0/gdn/z"].source
    with pytest.raises(ValueError, match=r"linear_attn\.in_proj_z\.weight"):
        source.values()
