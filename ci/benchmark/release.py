"""The published NVFP4 release of the mixture of experts: the tensors of its text model, MTP block and Vision tower.

Only headers and the scalars that planning reads are worth writing: see ``write_sparse``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
import struct
from typing import Any

from benchmark.geometry import EXPERTS, Geometry, Tensor

ACTIVATION_DIVISOR = struct.pack("<f", 131.0)
"""That of every expert of the release."""

VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


@dataclass(frozen=True, slots=True)
class Release:
    """A mixture of experts as it is published: NVFP4 experts one by one, or BF16 experts in two tensors a layer."""

    geometry: Geometry = EXPERTS
    quantised: bool = True

    @property
    def vocabulary(self) -> int:
        return self.geometry.vocabulary

    def config(self) -> dict[str, Any]:
        config = self.geometry.config()
        config["vision_config"] = {**VISION, "out_hidden_size": self.geometry.hidden}
        return config

    def tensors(self) -> Iterator[Tensor]:
        """Every stored tensor, in file order."""
        for tensor in self.geometry.tensors():
            if not self.quantised or ".mlp." not in tensor.name:
                yield tensor
            elif tensor.name.endswith("experts.gate_up_proj"):
                prefix = tensor.name.removesuffix("gate_up_proj")
                for expert in range(self.geometry.experts):
                    yield from self._expert(f"{prefix}{expert}.")
            elif ".shared_expert." in tensor.name:
                yield from _nvfp4(tensor.name.removesuffix(".weight"), *tensor.shape)
            elif not tensor.name.endswith("experts.down_proj"):
                yield tensor
        yield from self._mtp()
        yield from self._vision()

    def _expert(self, prefix: str) -> Iterator[Tensor]:
        hidden, width = self.geometry.hidden, self.geometry.intermediate
        yield from _nvfp4(f"{prefix}gate_proj", width, hidden)
        yield from _nvfp4(f"{prefix}up_proj", width, hidden)
        yield from _nvfp4(f"{prefix}down_proj", hidden, width)

    def _mtp(self) -> Iterator[Tensor]:
        """One block of full attention behind a stem, all of it BF16."""
        hidden = self.geometry.hidden
        yield Tensor("mtp.fc.weight", (hidden, 2 * hidden))
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield Tensor(f"mtp.{name}.weight", (hidden,))
        deepest = f"model.language_model.layers.{self.geometry.layers - 1}."  # full attention, as the block is
        for tensor in self.geometry.tensors():
            if tensor.name.startswith(deepest):
                yield replace(tensor, name=tensor.name.replace(deepest, "mtp.layers.0."))

    def _vision(self) -> Iterator[Tensor]:
        prefix, hidden, width, patch = "model.visual.", VISION["hidden_size"], VISION["intermediate_size"], 16
        merged = hidden * VISION["spatial_merge_size"] ** 2
        yield Tensor(f"{prefix}patch_embed.proj.weight", (hidden, 3, 2, patch, patch))
        yield Tensor(f"{prefix}patch_embed.proj.bias", (hidden,))
        yield Tensor(f"{prefix}pos_embed.weight", (VISION["num_position_embeddings"], hidden))
        for layer in range(VISION["depth"]):
            block = f"{prefix}blocks.{layer}."
            yield from _affine(f"{block}norm1", hidden)
            yield from _affine(f"{block}norm2", hidden)
            yield from _affine(f"{block}attn.qkv", 3 * hidden, hidden)
            yield from _affine(f"{block}attn.proj", hidden, hidden)
            yield from _affine(f"{block}mlp.linear_fc1", width, hidden)
            yield from _affine(f"{block}mlp.linear_fc2", hidden, width)
        yield from _affine(f"{prefix}merger.norm", hidden)
        yield from _affine(f"{prefix}merger.linear_fc1", merged, merged)
        yield from _affine(f"{prefix}merger.linear_fc2", self.geometry.hidden, merged)


def _affine(prefix: str, rows: int, *columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.weight", (rows, *columns))
    yield Tensor(f"{prefix}.bias", (rows,))


def _nvfp4(prefix: str, rows: int, columns: int) -> Iterator[Tensor]:
    """Matrices differ in their weight divisors, or banks of them would store one word instead of one a matrix."""
    yield Tensor(f"{prefix}.weight_packed", (rows, columns // 2), "U8")
    yield Tensor(f"{prefix}.weight_scale", (rows, columns // 16), "F8_E4M3")
    divisor = struct.pack("<f", 1000.0 + sum(prefix.encode()))
    yield Tensor(f"{prefix}.weight_global_scale", (1,), "F32", begins=divisor)
    yield Tensor(f"{prefix}.input_global_scale", (1,), "F32", begins=ACTIVATION_DIVISOR)
