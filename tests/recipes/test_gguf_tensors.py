"""The tensor sets that exports must have."""

import pytest

from ninferbuild.recipes.gguf_geometry import QWEN_27B, QWEN_35B_A3B, Geometry
from ninferbuild.recipes.gguf_tensors import Kind, mtp_tensors, text_tensors


@pytest.mark.parametrize(("geometry", "text", "whole"), [(QWEN_27B, 851, 866), (QWEN_35B_A3B, 733, 753)])
def test_sizes_of_the_name_sets(geometry: Geometry, text: int, whole: int) -> None:
    names = text_tensors(geometry).keys()
    assert len(names) == text
    assert len(names | mtp_tensors(geometry).keys()) == whole


def test_mixers_follow_the_layers() -> None:
    text, mtp = text_tensors(QWEN_27B), mtp_tensors(QWEN_27B)
    assert "blk.0.attn_qkv.weight" in text
    assert "blk.0.attn_q.weight" not in text
    assert "blk.3.attn_q.weight" in text
    assert "blk.3.attn_qkv.weight" not in text
    assert "blk.64.attn_q.weight" in mtp  # full attention, though 64 % 4 is 0
    assert "blk.64.nextn.eh_proj.weight" in mtp
    assert not any(name.startswith("blk.64.") for name in text)
    assert {"blk.0.ssm_a", "blk.0.ssm_dt.bias"} <= text.keys()


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("token_embd.weight", (248320, 5120), Kind.MATRIX),
        ("output_norm.weight", (5120,), Kind.VECTOR),
        ("blk.0.ffn_gate.weight", (17408, 5120), Kind.MATRIX),
        ("blk.0.ffn_down.weight", (5120, 17408), Kind.MATRIX),
        ("blk.3.attn_q.weight", (12288, 5120), Kind.MATRIX),
        ("blk.3.attn_k.weight", (1024, 5120), Kind.MATRIX),
        ("blk.3.attn_output.weight", (5120, 6144), Kind.MATRIX),
        ("blk.3.attn_q_norm.weight", (256,), Kind.VECTOR),
        ("blk.0.attn_qkv.weight", (10240, 5120), Kind.MATRIX),
        ("blk.0.attn_gate.weight", (6144, 5120), Kind.MATRIX),
        ("blk.0.ssm_out.weight", (5120, 6144), Kind.MATRIX),
        ("blk.0.ssm_alpha.weight", (48, 5120), Kind.CONTROL),
        ("blk.0.ssm_a", (48,), Kind.VECTOR),
        ("blk.0.ssm_conv1d.weight", (10240, 4), Kind.VECTOR),
        ("blk.0.ssm_norm.weight", (128,), Kind.VECTOR),
    ],
)
def test_tensors_of_the_27b(name: str, shape: tuple[int, ...], kind: Kind) -> None:
    assert text_tensors(QWEN_27B)[name] == (shape, kind)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("blk.7.ffn_gate_inp.weight", (256, 2048), Kind.ROUTING),
        ("blk.7.ffn_gate_inp_shexp.weight", (2048,), Kind.ROUTING),
        ("blk.7.ffn_up_exps.weight", (256, 512, 2048), Kind.MATRIX),
        ("blk.7.ffn_down_exps.weight", (256, 2048, 512), Kind.MATRIX),
        ("blk.7.ffn_down_shexp.weight", (2048, 512), Kind.MATRIX),
        ("blk.7.attn_k.weight", (512, 2048), Kind.MATRIX),
        ("blk.0.attn_qkv.weight", (8192, 2048), Kind.MATRIX),
        ("blk.0.ssm_beta.weight", (32, 2048), Kind.CONTROL),
    ],
)
def test_tensors_of_the_35b(name: str, shape: tuple[int, ...], kind: Kind) -> None:
    assert text_tensors(QWEN_35B_A3B)[name] == (shape, kind)


def test_the_mtp_block_of_the_35b_has_a_stem() -> None:
    assert mtp_tensors(QWEN_35B_A3B)["blk.40.nextn.eh_proj.weight"] == ((2048, 4096), Kind.MATRIX)
