"""Comparing what this project makes of a file with what llama.cpp makes of it, and with the checkpoint behind it.

Every function yields a line for each difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from fixtures import gguf_export

from llama import checkpoint
from llama.alias import text_alias, vision_alias
from llama.checkpoint import Checkpoint
from llama.command import ninferbuild
from llama.reference import PLAIN, Reference, equal, nearly_equal, package_values
from ninferbuild import models
from ninferbuild.artifact.codecs.gguf_blocks import decode_gguf_blocks, dequantize_gguf_blocks
from ninferbuild.artifact.formats import GGUF_FORMATS
from ninferbuild.artifact.reader import Artifact
from ninferbuild.models.model import Model
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_source import GGUFSource, HFAliasSource
from ninferbuild.sources.opened import Sources

Differences = Iterator[str]

RECIPE = """
from ninferbuild.recipes.gguf_geometry import Experts, Geometry
from ninferbuild.recipes.qwen3_5_gguf import dense_blocks, mixture_blocks

GEOMETRY = {geometry!r}


def dense(model, recipe, sources):
    dense_blocks(model, recipe, sources, Geometry(**GEOMETRY, feed_forward={width}))


def mixture(model, recipe, sources):
    mixture_blocks(model, recipe, sources, Geometry(**GEOMETRY, feed_forward=Experts(**{experts!r})))
"""

GEOMETRY = {
    "hidden": checkpoint.HIDDEN,
    "layers": checkpoint.LAYERS,
    "vocabulary": checkpoint.VOCABULARY,
    "attention_heads": checkpoint.HEADS,
    "key_value_heads": checkpoint.KEY_VALUE_HEADS,
    "attention_dim": checkpoint.HEAD_DIM,
    "key_heads": checkpoint.KEY_HEADS,
    "value_heads": checkpoint.VALUE_HEADS,
    "gdn_dim": checkpoint.DELTA_DIM,
    "taps": checkpoint.TAPS,
}
EXPERTS = {"count": checkpoint.EXPERTS, "width": checkpoint.EXPERT_WIDTH, "shared_width": checkpoint.EXPERT_WIDTH}

TILED = "/gdn/output"
"""Parameters that keep their columns as the exporter moved them; their uses say where each belongs."""


def reader(path: Path, reference: Reference) -> Differences:
    """Header, entries, stored bytes and values of every tensor."""
    with GGUFFile(path) as file, GGUFSource(path) as source:
        if file.kv != reference.kv:
            changed = sorted(key for key in {*file.kv, *reference.kv} if file.kv.get(key) != reference.kv.get(key))
            yield f"keys and values: {', '.join(changed)}"
        if list(file.tensors) != list(reference.tensors):
            yield "names of tensors, or their order"
            return
        for name, entry in reference.tensors.items():
            info = file.info(name)
            found = (info.shape, info.type_name, file.data_offset + info.offset, info.nbytes)
            if found != (entry.shape, entry.type, entry.begin, entry.size):
                yield f"{name}: entry {found}"
                continue
            if file.tensor_bytes(name).tobytes() != reference.raw(name).tobytes():
                yield f"{name}: stored bytes"
            yield from _values(name, source, file, reference)


def _values(name: str, source: GGUFSource, file: GGUFFile, reference: Reference) -> Differences:
    entry, expected = reference.tensors[name], reference.values(name)
    found = source.read_flat(name).numpy()
    if not equal(found.reshape(entry.shape), expected):
        yield f"{name}: values that ggml decodes"
    begin, end = expected.size // 3, expected.size // 3 + 301
    if not equal(source.read_flat(name, begin, min(end, expected.size)).numpy(), expected.reshape(-1)[begin:end]):
        yield f"{name}: values of a range"
    if entry.type in PLAIN:
        if not equal(file.read_direct(name), expected):
            yield f"{name}: plain values"
        return
    rows = prod(entry.shape[:-1])
    if file.read_blocks(name, rows // 2).tobytes() != reference.raw(name).reshape(rows, -1)[rows // 2 :].tobytes():
        yield f"{name}: rows of blocks"
    package = package_values(entry.type, reference.raw(name), entry.shape)
    if package is not None and not equal(package, expected):
        yield f"{name}: values that the package gguf decodes"


def aliases(path: Path, reference: Reference, saved: Checkpoint) -> Differences:
    """The values under the names of a dense checkpoint are those that an exporter makes the file's values of."""
    if saved.mixture:
        return
    left = set(reference.tensors)
    with GGUFSource(path) as source:
        alias = text_alias(source, mixture=False)
        for name, tensor in saved.tensors.items():
            if name.startswith("model.visual."):
                continue
            values = alias.read_flat(name).numpy().reshape(tuple(tensor.shape))
            stored, exported = gguf_export.text_tensor(name, values, checkpoint.TEXT)
            same = nearly_equal if name.endswith("A_log") else equal
            if not same(exported, reference.values(stored)):
                yield f"{name}: values of {stored} under the checkpoint's name"
            left.discard(stored)
    for name in sorted(left):
        yield f"{name}: no name in the checkpoint"


def exported(path: Path, saved: Checkpoint) -> Differences:
    """A file in F32 gives the checkpoint's own values."""
    with GGUFSource(path) as source:
        vision = source.metadata()["general.architecture"] == "clip"
        alias = vision_alias(source) if vision else text_alias(source, mixture=saved.mixture)
        for name, tensor in saved.tensors.items():
            if name.startswith("model.visual.") != vision:
                continue
            same = nearly_equal if name.endswith("A_log") else equal
            found = alias.read_flat(name).numpy().reshape(alias.describe(name).shape)
            if not same(found, tensor.numpy()):
                yield f"{name}: values of the checkpoint"


def artifact(path: Path, mmproj: Path, reference: Reference, saved: Checkpoint) -> Differences:
    """An artifact of the blocks, verified, with the rows, the values and the order that the file says."""
    out, sources = path.with_suffix(".ninfer"), {"gguf": path, "vision": mmproj}
    failed = _convert(sources, out, saved) or ninferbuild("verify", str(out))
    if failed is not None:
        yield failed
        return
    with Sources(saved.directory, sources) as opened, Artifact(out) as stored, GGUFSource(path) as source:
        model = models.build(opened["base"], ("text", "vision", "mtp"), sources=opened)
        yield from _stored_values(model, stored, text_alias(source, mixture=saved.mixture))
        yield from _stored_rows(stored, reference)
    out.unlink()
    out.with_name(f"{out.name}.conversion.json").unlink(missing_ok=True)


def refused(path: Path, mmproj: Path, reference: Reference, saved: Checkpoint) -> Differences:
    """A file with blocks that no artifact keeps can be looked at, and the recipe says what it does not take."""
    with GGUFFile(path) as file:
        if file.kv != reference.kv:
            yield "keys and values"
        found = {name: (info.shape, file.data_offset + info.offset) for name, info in file.tensors.items()}
    if found != {name: (entry.shape, entry.begin) for name, entry in reference.tensors.items()}:
        yield "entries"
    failed = _convert({"gguf": path, "vision": mmproj}, path.with_suffix(".ninfer"), saved)
    kinds = {entry.type for entry in reference.tensors.values()}
    told = (failed or "").replace(str(path), "")
    if "\n" in told or not any(kind in told for kind in kinds - PLAIN.keys()):
        yield f"the recipe says: {failed}"


def _convert(sources: Mapping[str, Path], out: Path, saved: Checkpoint) -> str | None:
    """Build the artifact of a file's blocks; why it failed, or None."""
    recipe = saved.directory.with_name("recipe.py")
    recipe.write_text(RECIPE.format(geometry=GEOMETRY, width=checkpoint.INTERMEDIATE, experts=EXPERTS))
    function = "mixture" if saved.mixture else "dense"
    named = [part for name, file in sources.items() for part in ("--source", f"{name}={file}")]
    options = ["--components", "text,vision,mtp", *named, "--device", "cpu", "--out", str(out), "--overwrite", "-q"]
    return ninferbuild("convert", "--model", str(saved.directory), "--recipe", f"{recipe}:{function}", *options)


def _stored_values(model: Model, stored: Artifact, alias: HFAliasSource) -> Differences:
    """Each parameter against the values that the other route gives: decoded, under the checkpoint's names."""
    import torch

    columns = _input_columns(stored)
    for name, binding in stored.directory.bindings.items():
        if name.startswith("vision/"):
            continue
        shape = model.parameters[name].shape
        expected = model.source(name, alias).values(0, prod(shape)).reshape(shape)
        pieces = [_piece(stored, part) for part in binding.get("parts") or [binding]]
        found = torch.cat(pieces).reshape(shape)
        if name.endswith(TILED):
            expected = expected[:, columns[name]]
        if not torch.equal(found, expected.to(found.dtype)):
            yield f"{name}: stored values"


def _piece(stored: Artifact, part: Mapping[str, Any]) -> Any:
    """The elements that a part of a binding names, 1-D; FP32 where they are blocks."""
    import torch

    item = stored.object(part["object"])
    data = stored.read_object(item.id)
    if item.format in GGUF_FORMATS:
        values = dequantize_gguf_blocks(data, item.format, item.shape, dtype=torch.float32).reshape(-1)
    else:
        values = torch.frombuffer(bytearray(data), dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[item.format])
    begin, end = part.get("range") or (0, values.numel())
    return values[begin:end]


def _input_columns(stored: Artifact) -> dict[str, Any]:
    """Parameter → the column of the checkpoint that each stored column is."""
    import torch

    found = {}
    for use in stored.directory.uses:
        for binding in use.get("auxiliaries", {}).values():
            data = stored.read_object(binding["object"])
            found[use["parameter"]] = torch.frombuffer(bytearray(data), dtype=torch.int32).to(torch.int64)
    return found


def _stored_rows(stored: Artifact, reference: Reference) -> Differences:
    """Every row of blocks of the file lies in the artifact exactly once, byte for byte, and no other does."""
    expected: Counter[tuple[str, bytes]] = Counter()
    for name, entry in reference.tensors.items():
        if entry.type not in PLAIN and not name.endswith(("ssm_alpha.weight", "ssm_beta.weight")):
            rows = reference.raw(name).reshape(prod(entry.shape[:-1]), -1)
            expected.update((f"gguf_{entry.type.lower()}", row.tobytes()) for row in rows)
    found: Counter[tuple[str, bytes]] = Counter()
    for item in stored.objects:
        format = getattr(item, "format", None)
        if format in GGUF_FORMATS:
            rows = decode_gguf_blocks(stored.read_object(item.id), format, item.shape)
            found.update((format, row.numpy().tobytes()) for row in rows)
    if found != expected:
        yield f"rows of blocks: {(expected - found).total()} missing, {(found - expected).total()} more"
