"""The tensors that an exported Qwen3.5 hybrid must hold: names, shapes and kinds, from its geometry."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ninferbuild.recipes.gguf_geometry import Experts, Geometry


class Kind(Enum):
    """What a tensor is; a recipe says which stored types it takes for each kind."""

    MATRIX = "matrix"
    VECTOR = "vector or norm"
    """A norm, a bias, or another small tensor that the exporter keeps in full precision."""
    CONTROL = "gate of the delta net"
    """Decay and write gates of the delta net."""
    ROUTING = "router"
    """Scores that choose among experts."""


class Tensor(NamedTuple):
    """Row-major shape, and kind."""

    shape: tuple[int, ...]
    kind: Kind


Entries = Iterator[tuple[str, Tensor]]

NEXTN_PROJECTION = "nextn.eh_proj.weight"
"""The tensor, after its block's prefix, that says that a file holds the MTP block."""


def block_prefix(index: int) -> str:
    """What the tensor names of a block begin with; the MTP block follows the text layers."""
    return f"blk.{index}."


def text_tensors(geometry: Geometry) -> dict[str, Tensor]:
    """Name → tensor of the text model."""
    return dict(_text(geometry))


def mtp_tensors(geometry: Geometry) -> dict[str, Tensor]:
    """Name → tensor of the MTP block, which is full attention whatever its index."""
    return dict(_mtp(geometry))


def _text(geometry: Geometry) -> Entries:
    vocabulary = (geometry.vocabulary, geometry.hidden)
    yield "token_embd.weight", Tensor(vocabulary, Kind.MATRIX)
    yield "output.weight", Tensor(vocabulary, Kind.MATRIX)
    yield "output_norm.weight", Tensor((geometry.hidden,), Kind.VECTOR)
    for layer in range(geometry.layers):
        yield from _block(geometry, block_prefix(layer), full_attention=geometry.full_attention(layer))


def _mtp(geometry: Geometry) -> Entries:
    hidden, prefix = geometry.hidden, block_prefix(geometry.layers)
    yield from _block(geometry, prefix, full_attention=True)
    yield prefix + NEXTN_PROJECTION, Tensor((hidden, 2 * hidden), Kind.MATRIX)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        yield f"{prefix}nextn.{norm}.weight", Tensor((hidden,), Kind.VECTOR)


def _block(geometry: Geometry, prefix: str, *, full_attention: bool) -> Entries:
    for norm in ("attn_norm", "post_attention_norm"):
        yield f"{prefix}{norm}.weight", Tensor((geometry.hidden,), Kind.VECTOR)
    mixer = _attention if full_attention else _delta_net
    feed_forward = geometry.feed_forward
    for name, tensor in mixer(geometry):
        yield prefix + name, tensor
    for name, tensor in (
        _experts(geometry.hidden, feed_forward)
        if isinstance(feed_forward, Experts)
        else _dense(geometry.hidden, feed_forward)
    ):
        yield prefix + name, tensor


def _attention(geometry: Geometry) -> Entries:
    hidden, cached = geometry.hidden, (geometry.key_value_rows, geometry.hidden)
    yield "attn_q.weight", Tensor((2 * geometry.query_rows, hidden), Kind.MATRIX)
    yield "attn_k.weight", Tensor(cached, Kind.MATRIX)
    yield "attn_v.weight", Tensor(cached, Kind.MATRIX)
    yield "attn_output.weight", Tensor((hidden, geometry.query_rows), Kind.MATRIX)
    for norm in ("attn_q_norm", "attn_k_norm"):
        yield f"{norm}.weight", Tensor((geometry.attention_dim,), Kind.VECTOR)


def _delta_net(geometry: Geometry) -> Entries:
    hidden, heads = geometry.hidden, geometry.value_heads
    yield "attn_qkv.weight", Tensor((geometry.channels, hidden), Kind.MATRIX)
    yield "attn_gate.weight", Tensor((geometry.value_dim, hidden), Kind.MATRIX)
    yield "ssm_out.weight", Tensor((hidden, geometry.value_dim), Kind.MATRIX)
    yield "ssm_alpha.weight", Tensor((heads, hidden), Kind.CONTROL)
    yield "ssm_beta.weight", Tensor((heads, hidden), Kind.CONTROL)
    yield "ssm_a", Tensor((heads,), Kind.VECTOR)
    yield "ssm_dt.bias", Tensor((heads,), Kind.VECTOR)
    yield "ssm_conv1d.weight", Tensor((geometry.channels, geometry.taps), Kind.VECTOR)
    yield "ssm_norm.weight", Tensor((geometry.gdn_dim,), Kind.VECTOR)


def _dense(hidden: int, width: int) -> Entries:
    yield "ffn_gate.weight", Tensor((width, hidden), Kind.MATRIX)
    yield "ffn_up.weight", Tensor((width, hidden), Kind.MATRIX)
    yield "ffn_down.weight", Tensor((hidden, width), Kind.MATRIX)


def _experts(hidden: int, experts: Experts) -> Entries:
    yield "ffn_gate_inp.weight", Tensor((experts.count, hidden), Kind.ROUTING)
    yield "ffn_gate_inp_shexp.weight", Tensor((hidden,), Kind.ROUTING)
    yield "ffn_gate_exps.weight", Tensor((experts.count, experts.width, hidden), Kind.MATRIX)
    yield "ffn_up_exps.weight", Tensor((experts.count, experts.width, hidden), Kind.MATRIX)
    yield "ffn_down_exps.weight", Tensor((experts.count, hidden, experts.width), Kind.MATRIX)
    yield "ffn_gate_shexp.weight", Tensor((experts.shared_width, hidden), Kind.MATRIX)
    yield "ffn_up_shexp.weight", Tensor((experts.shared_width, hidden), Kind.MATRIX)
    yield "ffn_down_shexp.weight", Tensor((hidden, experts.shared_width), Kind.MATRIX)
