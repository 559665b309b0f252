"""``convert``: the reference converter's function, for scripts that configure a recipe themselves.

It encodes everything on each call. Targets and the command line build incrementally instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
import os
from pathlib import Path
import time
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.schema import ResourceSpec, TensorSpec
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.artifact.writer import ArtifactWriter
from ninferbuild.device import resolve_device
from ninferbuild.publish import StagedFile
from ninferbuild.report import encode_report, report_path

if TYPE_CHECKING:
    from ninferbuild.models.model import Model
    from ninferbuild.recipe import Recipe, WeightJob


def convert(
    model: Model,
    recipe: Recipe,
    output: str | os.PathLike[str],
    *,
    name: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    device: str = "cuda",
    rows_per_chunk: int = 512,
    max_file_bytes: int | None = None,
    progress: Callable[[int, int, WeightJob], None] | None = None,
) -> dict[str, Any]:
    """Prepare a configured recipe, write the artifact and its report; the report.

    Args:
        output: entry file of the artifact.
        name: ``metadata.name``.
        provenance: the directory's ``provenance``.
        device: a torch device.
        progress: called with (index from 1, number of weights, job) before each weight.

    Raises:
        FileExistsError: the output or its report exists.
        ValueError: the device is not there, or a weight cannot be encoded; the message names its parameters.
        TypeError: a method's parameters cannot be written to the report.
    """
    began = time.perf_counter()
    entry = Path(output)
    report_file = report_path(entry)
    for path in (entry, report_file):
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists; choose another output")
    chosen = resolve_device(str(device))
    prepared = recipe.prepare(device=str(chosen), rows_per_chunk=rows_per_chunk)
    preparation_seconds = time.perf_counter() - began
    report = _report(model, recipe, prepared, name, entry, chosen, rows_per_chunk, provenance, preparation_seconds)
    encode_report(report)  # refuses what JSON cannot hold before any file exists

    specs: list[ResourceSpec | TensorSpec] = [ResourceSpec(key, len(data)) for key, data in model.resources.items()]
    specs += [weight.spec for weight in prepared.weights]
    specs += [item.spec for item in prepared.auxiliaries]
    with ArtifactWriter(
        entry,
        specs,
        components=model.components,
        bindings=prepared.bindings,
        uses=prepared.uses,
        metadata={} if name is None else {"name": name},
        provenance=dict(provenance or {}),
        max_file_bytes=max_file_bytes,
    ) as writer:
        for key, data in model.resources.items():
            writer.write_object(key, data)
        for index, weight in enumerate(prepared.weights, 1):
            if progress is not None:
                progress(index, len(prepared.weights), weight)
            _produce(writer, weight)
        for item in prepared.auxiliaries:
            writer.write_object(item.id, item.data)
        directory = writer.finish()
        artifact_id = writer.artifact_id
    report["artifact_id"] = artifact_id.hex()
    report["files"] = [
        {"path": str(entry if item.path is None else entry.with_name(item.path)), "payload_bytes": item.payload_bytes}
        for item in directory.files
    ]
    report["payload_bytes"] = directory.payload_bytes
    report["seconds"] = time.perf_counter() - began
    _publish_report(report_file, encode_report(report))
    return report


def _produce(writer: ArtifactWriter, weight: WeightJob) -> None:
    try:
        weight.prepared.produce(TensorOutput(writer, weight.spec.id))
    except Exception as error:
        shown = ", ".join(weight.parameters[:4])
        raise ValueError(f"{shown} [{weight.method_name}/{weight.spec.format}]: {error}") from error


def _report(
    model: Model,
    recipe: Recipe,
    prepared: Any,
    name: str | None,
    entry: Path,
    device: Any,
    rows_per_chunk: int,
    provenance: Mapping[str, Any] | None,
    preparation_seconds: float,
) -> dict[str, Any]:
    import torch

    return {
        "components": model.components,
        "name": name,
        "output": str(entry),
        "device": str(device),
        "torch_version": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "rows_per_chunk": rows_per_chunk,
        "provenance": dict(provenance or {}),
        "preparation_seconds": preparation_seconds,
        "parameters": len(recipe.selections),
        "uses": len(prepared.uses),
        "objects": len(model.resources) + len(prepared.weights) + len(prepared.auxiliaries),
        "formats": dict(Counter(weight.spec.format for weight in prepared.weights)),
        "methods": [
            {
                "object": weight.spec.id,
                "parameters": list(weight.parameters),
                "sources": list(weight.sources),
                "method": weight.method_name,
                "method_parameters": weight.method_parameters,
                "format": weight.spec.format,
                "layout": weight.spec.layout,
                "shape": list(weight.spec.shape),
            }
            for weight in prepared.weights
        ],
    }


def _publish_report(path: Path, text: bytes) -> None:
    staged = StagedFile(path)
    try:
        staged.write(0, text)
        staged.sync()
        os.link(staged.path, path)
    finally:
        staged.discard()
