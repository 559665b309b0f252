"""A checkpoint written by ``transformers`` itself."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fixtures import fx
from fixtures.workbench import Finished
import pytest

from ninferbuild.artifact.reader import Artifact

if TYPE_CHECKING:
    import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

EXACT = {
    "text/token_embedding": "model.language_model.embed_tokens.weight",
    "text/final_norm": "model.language_model.norm.weight",
    "text/layers/3/attention/output": "model.language_model.layers.3.self_attn.o_proj.weight",
    "text/layers/0/gdn/b_projection": "model.language_model.layers.0.linear_attn.in_proj_b.weight",
    "vision/position_embedding": "model.visual.pos_embed.weight",
    "vision/merger/fc1_bias": "model.visual.merger.linear_fc1.bias",
    "vision/layers/0/mlp/fc2": "model.visual.blocks.0.mlp.linear_fc2.weight",
}
"""Parameter → the tensor whose values it has, unchanged."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, saved in several shards, with the resources a tokenizer would add."""
    import torch

    configuration = fx.base_config()
    text = configuration["text_config"] | {"hidden_act": "silu", "layer_types": list(fx.LAYER_TYPES)}
    vision = configuration["vision_config"] | {"out_hidden_size": fx.HIDDEN, "deepstack_visual_indexes": []}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(7)
    model = transformers.Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    directory = tmp_path_factory.mktemp("transformers") / "tiny"
    model.save_pretrained(directory, max_shard_size="300KB")
    fx.write_resources(directory)
    return directory


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, read by the library that wrote it."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_what_was_saved(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


def test_text_and_vision(
    checkpoint: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    run: Callable[..., Finished],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    options: list[str] = ["--model", str(checkpoint), "--recipe", "qwen3_6_27b", "--components", "text,vision"]
    exact = [part for name in EXACT for part in ("--assign", f"{name}=bf16:cast_direct")]

    def convert(*more: str) -> dict[str, Any]:
        ran = run("convert", *options, "--device", "cpu", "--out", "tiny.ninfer", "--json", *more)
        assert ran.code == 0, ran
        found: dict[str, Any] = json.loads(ran.out)
        return found

    first = convert()
    assert first["actions"]["executed"] > 0
    changed = convert(*exact)
    assert 0 < changed["actions"]["executed"] < first["actions"]["executed"]
    with Artifact("tiny.ninfer") as artifact:
        assert sorted(artifact.directory.components) == ["text", "vision"]
        for name, tensor in EXACT.items():
            stored = artifact.by_id[artifact.directory.bindings[name]["object"]]
            values = torch.frombuffer(bytearray(artifact.read_object(stored.id)), dtype=torch.bfloat16)
            assert tensors[tensor].dtype == torch.bfloat16
            assert torch.equal(values.view(torch.int16), tensors[tensor].reshape(-1).view(torch.int16)), name
        with_bits = artifact.by_id[artifact.directory.bindings["text/layers/0/mlp/down"]["object"]]
        assert_close_to(artifact, with_bits, tensors["model.language_model.layers.0.mlp.down_proj.weight"])


def assert_close_to(artifact: Artifact, stored: Any, tensor: torch.Tensor) -> None:
    """Five bits with a scale for 64 values: each value within half a step, a thirtieth of the largest."""
    import torch

    from ninferbuild.artifact.codecs.row_split import dequantize_row_split

    values = dequantize_row_split(artifact.read_object(stored.id), stored.format, stored.shape, dtype=torch.float32)
    original = tensor.float().reshape(stored.shape[0], -1, 64)
    step = original.abs().amax(-1, keepdim=True) / 15
    assert ((values.reshape_as(original) - original).abs() <= step * 0.51).all()
