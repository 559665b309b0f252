"""One layer whose parents go every way a built-in method reads, and the manifests of their actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
import json
import os
from pathlib import Path
import threading
from typing import Any

from fixtures import fx
from fixtures.gguf_files import write_gguf
import numpy as np
import pytest

from ninferbuild.device import Device
from ninferbuild.memo import Memo
from ninferbuild.models.model import Model, Parameter
from ninferbuild.plan import plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.resolve import Action, Resolver
from ninferbuild.sources.compressed_tensors import compressed_matrix_source, matrix_source
from ninferbuild.sources.description import Description
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_blocks import block_source
from ninferbuild.sources.logical import (
    EncodedRows,
    LogicalSource,
    StoredReader,
    array_source,
    gather_source,
    select_rows,
    transpose_source,
)
from ninferbuild.sources.safetensors import SafetensorsSource, tensor_source

NVFP4, FP8 = "nvfp4", "fp8_e4m3fn_row_bf16"

CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def words(kind: str, shape: tuple[int, ...], seed: int) -> fx.Tensor:
    """Legal words of a Safetensors element type, different for each seed."""
    i = np.arange(int(np.prod(shape)), dtype=np.int64) * 37 + 11 * seed
    data: dict[str, Callable[[], Any]] = {
        "BF16": lambda: fx.bf16_words(((i % 251 - 125) / 64).astype(np.float32)),
        "F32": lambda: ((i % 251 + 1) / 64).astype("<f4"),
        "U8": lambda: (i % 251).astype(np.uint8),
        "F8_E4M3": lambda: (i % 127).astype(np.uint8),
    }
    return kind, shape, data[kind]()


def layer_tensors() -> dict[str, fx.Tensor]:
    """Tensor → words, for one layer."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "plain.weight": ("BF16", (5, 128)),
        "gate.weight": ("BF16", (3, 128)),
        "up.weight": ("BF16", (4, 128)),
        "conv.weight": ("F32", (16, 1, 4)),
        "experts.weight": ("BF16", (3, 4, 32)),
        "four.weight_packed": ("U8", (128, 32)),
        "four.weight_scale": ("F8_E4M3", (128, 4)),
        "four.weight_global_scale": ("F32", (1,)),
        "other.weight_packed": ("U8", (128, 32)),
        "other.weight_scale": ("F8_E4M3", (128, 4)),
        "other.weight_global_scale": ("F32", (1,)),
        "eight.weight": ("F8_E4M3", (4, 32)),
        "eight.weight_scale": ("F32", (4, 1)),
        "block.weight": ("F8_E4M3", (130, 128)),
        "block.weight_scale_inv": ("F32", (2, 1)),
    }
    return {name: words(kind, shape, seed) for seed, (name, (kind, shape)) in enumerate(shapes.items(), 1)}


@dataclass(frozen=True)
class Surroundings:
    """What the result of a built-in method must not depend on.

    Attributes:
        shards: files that the tensors are spread over.
        foreign: bytes of a tensor that nobody reads, in front of the others.
        age: seconds by which the files are older than they are.
        backwards: parameters are added in the opposite order, which numbers their objects differently.
    """

    directory: str = "checkpoint"
    layer: int = 3
    shards: int = 1
    foreign: int = 0
    age: int = 0
    label: str = "made here"
    backwards: bool = False
    rows_per_chunk: int = 512
    device: str = ""
    input: str = "input"
    policy: str = "A16Only"
    divisor: float | None = None
    residency: str = "text"


def write(root: Path, around: Surroundings, tensors: dict[str, fx.Tensor]) -> SafetensorsSource:
    """A checkpoint of one layer."""
    directory = root / around.directory
    directory.mkdir()
    named = {f"model.layers.{around.layer}.{name}": tensor for name, tensor in tensors.items()}
    if around.foreign:
        named = {"a": words("U8", (around.foreign,), 0), **named}
    files = [f"part-{index}.safetensors" for index in range(around.shards)]
    for index, file in enumerate(files):
        fx.save(directory / file, {name: named[name] for name in list(named)[index :: around.shards]})
        old = (directory / file).stat().st_mtime_ns - around.age * 10**9
        os.utime(directory / file, ns=(old, old))
    weight_map = {name: files[index % around.shards] for index, name in enumerate(named)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    noise = (np.arange(6 * 34, dtype=np.int64) * 37 % 251).astype(np.uint8)
    write_gguf(directory / "blocks.gguf", {}, [(f"blk.{around.layer}.up", (6, 32), 8, noise.tobytes())])
    return SafetensorsSource(directory)


def opaque(label: str) -> LogicalSource:
    """Values that only a function of a recipe knows."""

    def read(begin: int, end: int) -> Any:
        import torch

        return torch.arange(begin, end, dtype=torch.float32)

    return LogicalSource((2, 64), label, read)


def opaque_words(label: str, divisor: bytes) -> LogicalSource:
    """NVFP4 words that only a function of a recipe knows."""

    def read(begin: int, end: int) -> EncodedRows:
        import torch

        rows = end - begin
        codes, scales = torch.ones((rows, 32), dtype=torch.uint8), torch.ones((rows, 4), dtype=torch.uint8)
        return EncodedRows(NVFP4, codes, scales, divisor)

    def refuse(begin: int, end: int) -> Any:
        raise AssertionError("values were read")

    return LogicalSource((128, 64), label, refuse, read, lambda: divisor)


def changed_array(dtype: str, change: Callable[[Description], Description]) -> LogicalSource:
    """What ``change`` makes of a matrix of negative values."""
    values = (-np.arange(1, 25) / 8).astype(dtype).reshape(3, 8)

    whole = array_source(values, "stored").description
    assert whole is not None
    description = change(whole)
    return LogicalSource(description.shape, "stored", StoredReader(lambda: description).read_values)


def shifted(description: Description) -> Description:
    return description.to_float32().add(-1.0).gather(1, ((4, 8), (0, 4)))


def logarithms(description: Description) -> Description:
    return description.log_negative().transpose((1, 0), (8, 3)).reshape((4, 6))


def layer_sources(store: SafetensorsSource, around: Surroundings) -> dict[str, tuple[LogicalSource, str, str]]:
    """Parameter → source, format and method."""
    prefix = f"model.layers.{around.layer}."
    plain = tensor_source(store, f"{prefix}plain.weight", (5, 128))
    conv = tensor_source(store, f"{prefix}conv.weight", (16, 1, 4))
    experts = tensor_source(store, f"{prefix}experts.weight", (4, 32), offset=128, source_shape=(3, 4, 32))
    block = matrix_source(store, f"{prefix}block.weight", (130, 128))
    ids = np.array([3, 1, 2], np.int32)
    ramp = array_source(((np.arange(256) - 128) / 64).astype("<f4").reshape(2, 128), "ramp")
    blocks = block_source(GGUFFile(store.root / "blocks.gguf"), f"blk.{around.layer}.up", (3, 32), ((4, 6), (0, 1)))
    return {
        "plain": (plain, "q4_g64_fp16", "grouped_absmax"),
        "gate": (tensor_source(store, f"{prefix}gate.weight", (3, 128)), "q6_g64_fp16", "grouped_absmax"),
        "up": (tensor_source(store, f"{prefix}up.weight", (4, 128)), "q6_g64_fp16", "grouped_absmax"),
        "rows": (select_rows(plain, ((4, 5), (0, 2))), "q8_g32_fp16", "grouped_absmax"),
        "gathered": (gather_source(plain, ids), FP8, "fp8_row_maxabs"),
        "transposed": (transpose_source(conv, (2, 0, 1), (4, 16)), "fp32", "cast_direct"),
        "turned_rows": (select_rows(transpose_source(conv, (2, 0, 1), (4, 16)), ((1, 3),)), "bf16", "cast_direct"),
        "expert": (experts, "bf16", "cast_direct"),
        "four": (compressed_matrix_source(store, f"{prefix}four", (128, 64), NVFP4), NVFP4, "import_encoded"),
        "stack": (compressed_matrix_source(store, f"{prefix}four", (128, 64), NVFP4), NVFP4, "import_encoded"),
        "ed": (compressed_matrix_source(store, f"{prefix}other", (128, 64), NVFP4), NVFP4, "import_encoded"),
        "quantised": (compressed_matrix_source(store, f"{prefix}four", (128, 64), NVFP4), NVFP4, "nvfp4_maxabs"),
        "eight": (compressed_matrix_source(store, f"{prefix}eight", (4, 32), FP8), "bf16", "cast_direct"),
        "eight_words": (compressed_matrix_source(store, f"{prefix}eight", (4, 32), FP8), FP8, "import_encoded"),
        "block": (block, "q5_g64_fp16", "grouped_absmax"),
        "block_rows": (select_rows(block, ((129, 130), (0, 1))), "q5_g64_fp16", "grouped_absmax"),
        "ggml": (blocks, "gguf_q8_0", "import_encoded"),
        "ggml_values": (blocks, "bf16", "cast_direct"),
        "searched": (ramp, "q4_g64_fp16", "grouped_search"),
        "shifted": (changed_array("<f2", shifted), "bf16", "cast_direct"),
        "logarithms": (changed_array("<f4", logarithms), "fp32", "cast_direct"),
        "ids": (array_source(ids, around.label), "int32", "cast_direct"),
        "computed": (opaque(around.label), "q8_g32_fp16", "grouped_absmax"),
        "computed_words": (opaque_words(around.label, b"\0\0\x80\x3f"), NVFP4, "import_encoded"),
    }


GROUPS = (("gate", "up"), ("stack", "ed"))


def layer_recipe(store: SafetensorsSource, around: Surroundings) -> Recipe:
    model = Model({"text": {"config": {}}})
    sources = layer_sources(store, around)
    for role in reversed(sources) if around.backwards else sources:
        name = f"{around.residency}/layers/{around.layer}/{role}"
        source = sources[role][0]
        model.add(Parameter(name, source.shape, source, inputs=(around.input,), residency=around.residency))
    recipe = Recipe(model)
    for role, (_, format, method) in sources.items():
        name = f"{around.residency}/layers/{around.layer}/{role}"
        recipe.assign(name, format=format, method=method, activation_policy=around.policy)
        if around.divisor is not None:
            recipe.use(name, around.input, auxiliaries={"activation_input_divisor": around.divisor})
    for group in GROUPS:
        recipe.group([f"{around.residency}/layers/{around.layer}/{role}" for role in group])
    return recipe


def actions_of(recipe: Recipe, device: str, *, rows_per_chunk: int = 512, asked: str = "") -> list[Action]:
    """Settled actions. ``device`` is resolved only for users' functions; ``asked`` is what requests say."""
    resolver = Resolver(None, Memo(None), device=Device(device))
    actions = resolver.actions(plan_parents(recipe, rows_per_chunk=rows_per_chunk, device=asked).parents)
    for action in actions:
        resolver.hash(action, threading.Event())
        action.settle([digest for digest in action.digests if digest is not None])
    return actions


def by_role(actions: Iterable[Action]) -> dict[str, str]:
    """The last parts of the parameters' names → manifest, for each parent."""
    return {
        "+".join(name.rpartition("/")[2] for name in parent.names): action.manifest()
        for action in actions
        for parent in action.parents
    }


def layer_manifests(
    root: Path, around: Surroundings | None = None, tensors: dict[str, fx.Tensor] | None = None
) -> dict[str, str]:
    """The manifests of :func:`layer_sources`, by parameters."""
    around = around or Surroundings()
    with write(root, around, tensors or layer_tensors()) as store:
        recipe = layer_recipe(store, around)
        actions = actions_of(recipe, "cuda:99", rows_per_chunk=around.rows_per_chunk, asked=around.device)
        return by_role(actions)


class Layer:
    """The helpers above, as one fixture."""

    Surroundings = Surroundings
    tensors = staticmethod(layer_tensors)
    manifests = staticmethod(layer_manifests)
    actions_of = staticmethod(actions_of)
    by_role = staticmethod(by_role)


@pytest.fixture(scope="session")
def layer() -> type[Layer]:
    return Layer
