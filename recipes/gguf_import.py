"""Parameters of a Qwen3.5 hybrid from the tensors of an export: blocks as they are, the rest with the exporter's
conventions undone.

The exporter stores norms as ``1 + w``, ``A_log`` as ``-exp(A_log)``, the convolution without its middle axis, and value
heads tiled (:mod:`ninferbuild.recipes.gguf_geometry`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ninferbuild.auxiliaries import INPUT_COLUMNS
from ninferbuild.method import AuxiliaryValue
from ninferbuild.recipes.gguf_geometry import Experts, Geometry, Rows, rows
from ninferbuild.recipes.gguf_tensors import NEXTN_PROJECTION, block_prefix
from ninferbuild.sources.gguf_blocks import block_source
from ninferbuild.sources.gguf_direct import direct_source

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe
    from ninferbuild.sources.description import Description
    from ninferbuild.sources.gguf import GGUFFile
    from ninferbuild.sources.logical import LogicalSource

BLOCK_POLICY = "AllowA8"
"""Products with stored blocks quantise their activations."""

MTP_LAYER = "mtp/layers/0/"


class Importer:
    """Assigns the parameters of one model from one file, which has been checked, and groups them into parents.

    Attributes:
        assigned: parameters that have been given a source.
    """

    def __init__(self, model: Model, recipe: Recipe, gguf: GGUFFile, geometry: Geometry):
        self._model = model
        self._recipe = recipe
        self._gguf = gguf
        self._geometry = geometry
        self._formats: dict[str, str] = {}
        self._columns = AuxiliaryValue("int32", (geometry.value_dim,), geometry.input_columns)
        self.assigned: set[str] = set()

    def text(self) -> None:
        """The text model."""
        geometry = self._geometry
        self._matrix("text/token_embedding", "token_embd.weight")
        self._matrix("text/output_head", "output.weight")
        self._norm("text/final_norm", "output_norm.weight")
        for layer in range(geometry.layers):
            prefix, tensors = f"text/layers/{layer}/", block_prefix(layer)
            self._block(prefix, tensors, full_attention=geometry.full_attention(layer))

    def mtp(self) -> None:
        """The MTP block, which follows the text layers in the file."""
        tensors = block_prefix(self._geometry.layers)
        self._matrix("mtp/input_projection", tensors + NEXTN_PROJECTION)
        for name, tensor in (("embedding", "enorm"), ("hidden", "hnorm"), ("final", "shared_head_norm")):
            self._norm(f"mtp/{name}_norm", f"{tensors}nextn.{tensor}.weight")
        self._block(MTP_LAYER, tensors, full_attention=True)

    def _block(self, prefix: str, tensors: str, *, full_attention: bool) -> None:
        self._norm(prefix + "input_norm", tensors + "attn_norm.weight")
        self._norm(prefix + "post_attention_norm", tensors + "post_attention_norm.weight")
        mixer = self._attention if full_attention else self._delta_net
        mixer(prefix, tensors)
        feed_forward = self._geometry.feed_forward
        if isinstance(feed_forward, Experts):
            self._mixture(prefix + "moe/", tensors, feed_forward)
        else:
            self._mlp(prefix + "mlp/", tensors)

    def _attention(self, prefix: str, tensors: str) -> None:
        geometry, prefix = self._geometry, prefix + "attention/"
        self._matrix(prefix + "query", tensors + "attn_q.weight", geometry.attention_rows())
        self._matrix(prefix + "gate", tensors + "attn_q.weight", geometry.attention_rows(gate=True))
        self._matrix(prefix + "key", tensors + "attn_k.weight")
        self._matrix(prefix + "value", tensors + "attn_v.weight")
        self._matrix(prefix + "output", tensors + "attn_output.weight")
        self._norm(prefix + "query_norm", tensors + "attn_q_norm.weight")
        self._norm(prefix + "key_norm", tensors + "attn_k_norm.weight")
        self._group_attention(prefix)

    def _group_attention(self, prefix: str) -> None:
        if isinstance(self._geometry.feed_forward, Experts):
            self._group(prefix, "query", "gate")
            self._group(prefix, "key", "value")
        else:
            self._group(prefix, "query", "key", "gate", "value")

    def _delta_net(self, prefix: str, tensors: str) -> None:
        geometry, prefix = self._geometry, prefix + "gdn/"
        keys = geometry.key_dim
        self._matrix(prefix + "query", tensors + "attn_qkv.weight", rows(keys))
        self._matrix(prefix + "key", tensors + "attn_qkv.weight", rows(keys, keys))
        self._matrix(prefix + "value", tensors + "attn_qkv.weight", geometry.untiled_rows(2 * keys))
        self._matrix(prefix + "z", tensors + "attn_gate.weight", geometry.untiled_rows())
        self._matrix(prefix + "output", tensors + "ssm_out.weight")
        self._use_columns(prefix + "output")
        for gate, tensor in (("a_projection", "ssm_alpha.weight"), ("b_projection", "ssm_beta.weight")):
            self._gate(prefix + gate, tensors + tensor)
        channels = geometry.channel_rows()
        self._values(prefix + "a_log", tensors + "ssm_a", lambda stored: geometry.untile(stored).log_negative())
        self._values(prefix + "dt_bias", tensors + "ssm_dt.bias", geometry.untile)
        self._values(
            prefix + "convolution",
            tensors + "ssm_conv1d.weight",
            lambda stored: stored.select_rows(channels).transpose((1, 0), (geometry.taps, geometry.channels)),
        )
        self._values(prefix + "norm", tensors + "ssm_norm.weight")
        self._group_delta_net(prefix)
        gates = (prefix + "a_projection", prefix + "b_projection")
        if isinstance(geometry.feed_forward, Experts):
            self._recipe.group(gates)
        else:
            self._recipe.separate(gates)

    def _use_columns(self, output: str) -> None:
        """Tell the uses of the delta net's output matrix that its columns are tiled."""
        for name in self._model.parameters[output].inputs:
            self._recipe.use(output, name, auxiliaries={INPUT_COLUMNS: self._columns})

    def _group_delta_net(self, prefix: str) -> None:
        if not self._group(prefix, "query", "key", "value", "z"):
            self._group(prefix, "query", "key", "value")

    def _mlp(self, prefix: str, tensors: str) -> None:
        for name in ("gate", "up", "down"):
            self._matrix(prefix + name, f"{tensors}ffn_{name}.weight")
        self._group(prefix, "gate", "up")

    def _mixture(self, prefix: str, tensors: str, experts: Experts) -> None:
        for name in ("gate", "up", "down"):
            self._experts(prefix, name, f"{tensors}ffn_{name}_exps.weight", experts.count)
        names = [f"experts/{expert}/" for expert in range(experts.count)]
        if not self._group(prefix, *(name + half for name in names for half in ("gate", "up"))):
            self._group(prefix, *(name + "gate" for name in names))
            self._group(prefix, *(name + "up" for name in names))
        self._group(prefix, *(name + "down" for name in names))
        score = prefix + "shared_score"
        self._values(prefix + "router", tensors + "ffn_gate_inp.weight")
        shape = self._model.parameters[score].shape
        self._values(score, tensors + "ffn_gate_inp_shexp.weight", lambda stored: stored.reshape(shape))
        self._recipe.group((prefix + "router", score))
        for name in ("gate", "up", "down"):
            self._matrix(f"{prefix}shared/{name}", f"{tensors}ffn_{name}_shexp.weight")
        self._group(prefix, "shared/gate", "shared/up")

    def _experts(self, prefix: str, name: str, tensor: str, count: int) -> None:
        """One projection of every expert: consecutive matrices of one tensor."""
        for expert in range(count):
            parameter = f"{prefix}experts/{expert}/{name}"
            height = self._model.parameters[parameter].shape[0]
            self._matrix(parameter, tensor, rows(height, expert * height))

    def _gate(self, name: str, tensor: str) -> None:
        """A gate of the delta net: BF16 words stay what they are, other values are rounded to BF16."""
        if self._gguf.tensors[tensor].type.format is None:
            self._values(name, tensor, self._geometry.untile)
        else:
            shape, heads = self._model.parameters[name].shape, self._geometry.untiled_rows(head_rows=1)
            self._assign(name, block_source(self._gguf, tensor, (shape[0], shape[1]), heads))

    def _norm(self, name: str, tensor: str) -> None:
        self._values(name, tensor, lambda stored: stored.add(-1.0))

    def _values(self, name: str, tensor: str, change: Callable[[Description], Description] | None = None) -> None:
        """A parameter of the values of a tensor, or of what ``change`` makes of their description."""
        self._assign(name, direct_source(self._gguf, tensor, self._model.parameters[name].shape, change))

    def _assign(self, name: str, source: LogicalSource) -> None:
        format = self._model.parameters[name].direct_format
        self._recipe.assign(name, format=format, method="cast_direct", source=source)
        self.assigned.add(name)

    def _matrix(self, name: str, tensor: str, stored: Rows | None = None) -> None:
        """A parameter of rows of blocks, all rows of the tensor by default."""
        shape = self._model.parameters[name].shape
        info = self._gguf.tensors[tensor]
        assert info.type.format is not None
        self._formats[name] = info.type.format
        self._recipe.assign(
            name,
            format=info.type.format,
            method="import_encoded",
            source=block_source(self._gguf, tensor, (shape[0], shape[1]), stored or rows(shape[0])),
            activation_policy=BLOCK_POLICY,
        )
        self.assigned.add(name)

    def _group(self, prefix: str, *names: str) -> bool:
        """Store parameters as one parent if their blocks are of one format."""
        members = [prefix + name for name in names]
        if len({self._formats[name] for name in members}) > 1:
            return False
        self._recipe.group(members)
        return True
