"""The name maps: which tensors, and what their transforms make of values in the exporter's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ninferbuild.sources.alias_transforms import Transform
from ninferbuild.sources.gguf_maps import (
    qwen35_linear_attention_name_map,
    qwen35_mtp_name_map,
    qwen35_vision_name_map,
    standard_dense_name_map,
)

HEADS: dict[str, Any] = {"num_k_heads": 2, "num_v_heads": 6, "head_k_dim": 4, "head_v_dim": 4}
GDN = "model.language_model.layers.3.linear_attn."


class TestDense:
    def test_names_of_two_layers(self) -> None:
        names, transforms, shapes = standard_dense_name_map(2)
        prefix = "model.language_model."
        assert len(names) == 3 + 22
        assert shapes == {}
        assert names["lm_head.weight"] == "output.weight"
        assert names[f"{prefix}embed_tokens.weight"] == "token_embd.weight"
        assert names[f"{prefix}norm.weight"] == "output_norm.weight"
        assert names[f"{prefix}layers.1.self_attn.q_proj.weight"] == "blk.1.attn_q.weight"
        assert names[f"{prefix}layers.0.post_attention_layernorm.weight"] == "blk.0.post_attention_norm.weight"
        assert set(transforms) == {name for name in names if names[name].endswith("norm.weight")}
        assert len(transforms) == 9

    def test_norms_lose_one(self) -> None:
        _, transforms, _ = standard_dense_name_map(2)
        for transform in transforms.values():
            values, shape = transform(torch.zeros(5), (5,))
            assert values.tolist() == [-1] * 5
            assert values.dtype == torch.float32
            assert shape == (5,)

    def test_norm_values(self) -> None:
        _, transforms, _ = standard_dense_name_map(0, text_prefix="")
        values, _ = transforms["norm.weight"](torch.tensor([1, 1.5, 0, 1.00390625, 0.998046875, 1.1]), (6,))
        words = values.to(torch.bfloat16).view(torch.int16).tolist()
        assert [word & 0xFFFF for word in words] == [0x0000, 0x3F00, 0xBF80, 0x3B80, 0xBB00, 0x3DCD]

    def test_tied_and_prefix(self) -> None:
        names, _, _ = standard_dense_name_map(1, tie_word_embeddings=True, text_prefix="model.")
        assert "lm_head.weight" not in names
        assert names["model.embed_tokens.weight"] == "token_embd.weight"
        assert names["model.layers.0.mlp.down_proj.weight"] == "blk.0.ffn_down.weight"


class TestLinearAttention:
    def test_names(self) -> None:
        names, transforms, shapes = qwen35_linear_attention_name_map(3, **HEADS)
        assert {name.removeprefix(GDN): gguf.removeprefix("blk.3.") for name, gguf in names.items()} == {
            "in_proj_qkv.weight": "attn_qkv.weight",
            "in_proj_z.weight": "attn_gate.weight",
            "in_proj_a.weight": "ssm_alpha.weight",
            "in_proj_b.weight": "ssm_beta.weight",
            "conv1d.weight": "ssm_conv1d.weight",
            "A_log": "ssm_a",
            "dt_bias": "ssm_dt.bias",
            "norm.weight": "ssm_norm.weight",
            "out_proj.weight": "ssm_out.weight",
        }
        assert {name: shape((10, 4)) for name, shape in shapes.items()} == {f"{GDN}conv1d.weight": (10, 1, 4)}
        assert set(names) - set(transforms) == {f"{GDN}norm.weight"}

    def test_heads_go_back_and_the_logarithm_comes_after(self) -> None:
        _, transforms, _ = qwen35_linear_attention_name_map(3, **HEADS)
        a_log = torch.tensor([0.5, -1, 2, 0.25, -3, 1])
        exported = -torch.exp(a_log)[[0, 3, 1, 4, 2, 5]]
        values, shape = transforms[f"{GDN}A_log"](exported, (6,))
        assert torch.allclose(values, a_log, rtol=0, atol=1e-6)
        assert shape == (6,)

    @pytest.mark.parametrize(
        ("name", "shape", "axis", "first", "width"),
        [
            ("in_proj_qkv.weight", (40, 2), 0, 16, 4),
            ("in_proj_z.weight", (24, 2), 0, 0, 4),
            ("in_proj_a.weight", (6, 2), 0, 0, 1),
            ("in_proj_b.weight", (6, 2), 0, 0, 1),
            ("conv1d.weight", (40, 3), 0, 16, 4),
            ("dt_bias", (6,), 0, 0, 1),
            ("out_proj.weight", (2, 24), 1, 0, 4),
        ],
    )
    def test_each_transform_undoes_the_exporters_order(
        self, name: str, shape: tuple[int, ...], axis: int, first: int, width: int
    ) -> None:
        _, transforms, _ = qwen35_linear_attention_name_map(3, **HEADS)
        grouped = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        # head k*R + r of the checkpoint lies at r*Hk + k
        tiled = [first + (k * 3 + r) * width + i for r in range(3) for k in range(2) for i in range(width)]
        exported = grouped.index_select(axis, torch.tensor([*range(first), *tiled]))
        values, found = transforms[f"{GDN}{name}"](exported.reshape(-1), shape)
        assert found == shape
        assert torch.equal(values.reshape(shape), grouped)

    def test_columns_of_the_output(self) -> None:
        _, transforms, _ = qwen35_linear_attention_name_map(3, num_k_heads=2, num_v_heads=6, head_k_dim=2, head_v_dim=2)
        stored = torch.tensor([0.0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11])
        values, _ = transforms[f"{GDN}out_proj.weight"](stored, (1, 12))
        assert values.tolist() == list(range(12))

    def test_as_many_value_heads_as_key_heads(self) -> None:
        names, transforms, shapes = qwen35_linear_attention_name_map(3, **{**HEADS, "num_v_heads": 2})
        assert set(transforms) == {f"{GDN}A_log"}
        assert set(shapes) == {f"{GDN}conv1d.weight"}
        assert len(names) == 9
        values, _ = transforms[f"{GDN}A_log"](torch.tensor([-1.0, -2.0]), (2,))
        assert values.view(torch.int32).tolist() == [0, 0x3F317218]

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="num_v_heads 5 is not a multiple of num_k_heads 2"):
            qwen35_linear_attention_name_map(3, **{**HEADS, "num_v_heads": 5})


class TestMtp:
    @pytest.mark.parametrize("prefix", ["mtp.", ""])
    def test_names(self, prefix: str) -> None:
        names, transforms, shapes = qwen35_mtp_name_map(64, hf_prefix=prefix)
        assert len(names) == 15
        assert (transforms, shapes) == ({}, {})
        assert names[f"{prefix}fc.weight"] == "blk.64.nextn.eh_proj.weight"
        assert names[f"{prefix}pre_fc_norm_embedding.weight"] == "blk.64.nextn.enorm.weight"
        assert names[f"{prefix}pre_fc_norm_hidden.weight"] == "blk.64.nextn.hnorm.weight"
        assert names[f"{prefix}norm.weight"] == "blk.64.nextn.shared_head_norm.weight"
        assert names[f"{prefix}layers.0.self_attn.k_norm.weight"] == "blk.64.attn_k_norm.weight"
        assert names[f"{prefix}layers.0.mlp.up_proj.weight"] == "blk.64.ffn_up.weight"

    @pytest.mark.parametrize("prefix", ["mtp.", ""])
    def test_norms_that_were_stored_with_one_added(self, prefix: str) -> None:
        names, transforms, _ = qwen35_mtp_name_map(64, hf_prefix=prefix, norm_offset=True)
        assert {names[name].removeprefix("blk.64.") for name in transforms} == {
            "nextn.enorm.weight",
            "nextn.hnorm.weight",
            "nextn.shared_head_norm.weight",
            "attn_norm.weight",
            "post_attention_norm.weight",
            "attn_q_norm.weight",
            "attn_k_norm.weight",
        }
        values, _ = transforms[f"{prefix}norm.weight"](torch.tensor([1.5]), (1,))
        assert values.tolist() == [0.5]


class TestVision:
    def test_names(self) -> None:
        names, transforms, shapes, composites = qwen35_vision_name_map(2, hidden_size=8, patch_size=2)
        assert (transforms, shapes) == ({}, {})
        assert len(names) == 8 + 24
        assert set(composites) == {"model.visual.patch_embed.proj.weight"}
        assert names["model.visual.patch_embed.proj.bias"] == "v.patch_embd.bias"
        assert names["model.visual.pos_embed.weight"] == "v.position_embd.weight"
        assert names["model.visual.merger.norm.bias"] == "v.post_ln.bias"
        assert names["model.visual.merger.linear_fc2.weight"] == "mm.2.weight"
        assert names["model.visual.blocks.1.attn.qkv.bias"] == "v.blk.1.attn_qkv.bias"
        assert names["model.visual.blocks.0.mlp.linear_fc1.weight"] == "v.blk.0.ffn_up.weight"
        assert names["model.visual.blocks.0.norm2.weight"] == "v.blk.0.ln2.weight"

    def test_another_number_of_frames(self) -> None:
        with pytest.raises(ValueError, match=r"temporal_patch_size must be 2.*not 3"):
            qwen35_vision_name_map(2, hidden_size=8, patch_size=2, temporal_patch_size=3)


def test_every_transform_of_a_map_can_be_described() -> None:
    maps = (
        standard_dense_name_map(2)[1],
        qwen35_linear_attention_name_map(0, **HEADS)[1],
        qwen35_mtp_name_map(2, norm_offset=True)[1],
    )
    assert all(isinstance(transform, Transform) for found in maps for transform in found.values())
