"""``convert``, the reference converter's function: report, refusals, progress, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
from typing import Any

from fixtures.rm4 import rm4
import pytest
import torch

from ninferbuild import compat
from ninferbuild.artifact.primitives import ArtifactError
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.method import PreparedMethod, PrepareRequest
from ninferbuild.models.model import Model
from ninferbuild.recipe import Recipe, WeightJob

REPORT = [
    "components",
    "name",
    "output",
    "device",
    "torch_version",
    "cuda_version",
    "rows_per_chunk",
    "provenance",
    "preparation_seconds",
    "parameters",
    "uses",
    "objects",
    "formats",
    "methods",
    "artifact_id",
    "files",
    "payload_bytes",
    "seconds",
]

convert: Callable[..., dict[str, Any]]
with compat.active():
    from tools.convert.pipeline import convert  # type: ignore[import-not-found, no-redef]


@pytest.fixture
def model() -> Model:
    model = rm4()
    model.resources["tokenizer.json"] = b"{}"
    return model


@pytest.fixture
def recipe(model: Model) -> Recipe:
    """query and key in four bits, gate and value in five."""
    recipe = Recipe(model)
    recipe.assign(("query", "key"), format="q4_g64_fp16", method="grouped_absmax", activation_policy="AllowA4")
    recipe.assign(("gate", "value"), format="q5_g64_fp16", method="grouped_absmax", activation_policy="AllowA8")
    recipe.use("query", "input", auxiliaries={"activation_input_divisor": 2.0})
    return recipe


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_artifact_and_report(model: Model, recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "new" / "é.ninfer"
    seen: list[tuple[int, int, tuple[str, ...]]] = []

    def progress(index: int, total: int, job: WeightJob) -> None:
        assert not out.exists()
        seen.append((index, total, job.parameters))

    provenance = {"converter": "mine"}
    report = convert(
        model, recipe, out, name="é", provenance=provenance, device="cpu", rows_per_chunk=3, progress=progress
    )
    assert seen == [(1, 2, ("query", "key")), (2, 2, ("gate", "value"))]
    assert names(out.parent) == ["é.ninfer", "é.ninfer.conversion.json"]

    with Artifact.open(out) as artifact:
        directory = artifact.directory
        payloads = [artifact.read_object(f"weight/{index:06}") for index in range(2)]
        assert artifact.read_object("tokenizer.json") == b"{}"
        assert artifact.read_object("auxiliary/000000").hex() == "00000040"
        assert report["artifact_id"] == artifact.artifact_id.hex()
        assert report["payload_bytes"] == artifact.payload_bytes
    assert [hashlib.sha256(payload).hexdigest()[:16] for payload in payloads] == [
        "ca08518d5d06cdc7",
        "d4c8371b04545130",
    ]
    assert directory.metadata == {"name": "é"}
    assert directory.provenance == provenance

    text = (out.parent / "é.ninfer.conversion.json").read_text("utf-8")
    assert text == json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    assert list(report) == REPORT
    assert {key: report[key] for key in REPORT[:4]} == {
        "components": {"text": {"config": {}}},
        "name": "é",
        "output": str(out),
        "device": "cpu",
    }
    assert report["torch_version"] == torch.__version__
    assert (report["rows_per_chunk"], report["parameters"], report["uses"], report["objects"]) == (3, 4, 4, 4)
    assert report["formats"] == {"q4_g64_fp16": 1, "q5_g64_fp16": 1}
    assert report["methods"][1] == {
        "object": "weight/000001",
        "parameters": ["gate", "value"],
        "sources": ["gate", "value"],
        "method": "grouped_absmax",
        "method_parameters": {},
        "format": "q5_g64_fp16",
        "layout": "row_split_k128_v1",
        "shape": [8, 128],
    }
    assert report["files"] == [{"path": str(out), "payload_bytes": report["payload_bytes"]}]
    assert 0 <= report["preparation_seconds"] <= report["seconds"]


def test_parts(model: Model, tmp_path: Path) -> None:
    entry = tmp_path / "a.ninfer"
    recipe = Recipe(model)
    recipe.assign("*", format="fp32", method="cast_direct")
    report = convert(model, recipe, entry, device="cpu", max_file_bytes=8192)
    files = [Path(file["path"]) for file in report["files"]]
    assert files == [entry, tmp_path / "a.ninfer.part-0001", tmp_path / "a.ninfer.part-0002"]
    assert all(file.stat().st_size <= 8192 for file in files)
    assert sum(file["payload_bytes"] for file in report["files"]) == report["payload_bytes"]


@pytest.mark.parametrize("taken", ["a.ninfer", "a.ninfer.conversion.json"])
def test_an_output_that_exists_is_left_alone(model: Model, recipe: Recipe, tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("mine")
    with pytest.raises(FileExistsError, match=taken):
        convert(model, recipe, tmp_path / "a.ninfer", device="cpu")
    assert names(tmp_path) == [taken]
    assert (tmp_path / taken).read_text() == "mine"


def test_a_part_that_exists_is_left_alone(model: Model, recipe: Recipe, tmp_path: Path) -> None:
    recipe.assign("*", format="fp32", method="cast_direct")
    (tmp_path / "a.ninfer.part-0001").write_text("mine")
    with pytest.raises(FileExistsError, match="part-0001"):
        convert(model, recipe, tmp_path / "a.ninfer", device="cpu", max_file_bytes=8192)
    assert names(tmp_path) == ["a.ninfer.part-0001"]


def written(request: PrepareRequest) -> PreparedMethod:
    def produce(output: TensorOutput) -> None:
        output.write_values(0, request.values(0, 512).to(torch.bfloat16))

    return request.job(produce=produce)


def raising(request: PrepareRequest) -> PreparedMethod:
    def produce(output: TensorOutput) -> None:
        output.write_values(0, request.values(0, 8).to(torch.bfloat16))
        raise RuntimeError("out of luck")

    return request.job(produce=produce)


def incomplete(request: PrepareRequest) -> PreparedMethod:
    return request.job(produce=lambda output: None)


@pytest.mark.parametrize(
    ("choices", "options", "error", "message"),
    [
        ({"method": raising}, {}, ValueError, r"^value \[raising/bf16\]: out of luck$"),
        ({"method": incomplete}, {}, ArtifactError, "coverage is incomplete"),
        ({"method": written, "parameters": {"a": {1}}}, {}, TypeError, "set"),
        ({"method": written, "parameters": {"a": float("nan")}}, {}, ValueError, "JSON"),
        ({}, {"max_file_bytes": 100}, ArtifactError, "maximum file bytes"),
        ({}, {"device": "abacus"}, ValueError, "no such device"),
        ({}, {"progress": lambda index, total, job: 1 // 0}, ZeroDivisionError, "division"),
    ],
)
def test_failures_leave_nothing_behind(
    model: Model,
    tmp_path: Path,
    choices: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    recipe = Recipe(model)
    if choices:
        recipe.assign("value", format="bf16", **choices)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(error, match=message):
        convert(model, recipe, out / "a.ninfer", **{"device": "cpu", **options})
    assert names(out) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(model: Model, recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CUDA is unavailable"):
        convert(model, recipe, tmp_path / "a.ninfer")


def test_a_path_among_the_parameters_is_reported_as_text(model: Model, tmp_path: Path) -> None:
    recipe = Recipe(model)
    recipe.assign("value", format="bf16", method=written, parameters={"where": Path("a/b")})
    report = convert(model, recipe, tmp_path / "a.ninfer", device="cpu")
    stored = json.loads((tmp_path / "a.ninfer.conversion.json").read_text())
    assert stored["methods"][-1]["method_parameters"] == {"where": str(Path("a/b"))}
    assert [method["parameters"] for method in report["methods"]] == [["query", "key"], ["gate"], ["value"]]
