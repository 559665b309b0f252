"""``convert`` as it is typed for real models, on the FX checkpoints, down to the bytes of every object.

Departure: run D of the first converter generation, whose proposal head always came from the base checkpoint, cannot be
asked for; the later rule is the only one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import hashlib
import json
from pathlib import Path
import re
from typing import Any, NamedTuple

from fixtures import fx
from fixtures.workbench import Finished
import pytest

from ninferbuild.artifact.reader import Artifact

FORMATS = {
    "q4": "q4_g64_fp16",
    "q5": "q5_g64_fp16",
    "q6": "q6_g64_fp16",
    "q8": "q8_g32_fp16",
    "fp8": "fp8_e4m3fn_row_bf16",
}

RECIPE = """
from tools.convert.official_recipes import qwen3_6_27b


def configure(model, recipe, sources):
    qwen3_6_27b(model, recipe, sources)
    recipe.assign("text/layers/0/mlp/down", format="q6_g64_fp16", method="grouped_absmax")
"""

FP8 = """
def configure(model, recipe, sources):
    for layer, kind in enumerate(model.config["layer_types"]):
        if kind == "full_attention":
            recipe.assign(
                [f"text/layers/{layer}/attention/{role}" for role in ("query", "key", "gate", "value")],
                format="fp8_e4m3fn_row_bf16",
                layout="auto",
                method="fp8_row_maxabs",
                activation_policy="AllowA8",
            )
"""

NUMPY = """
from pathlib import Path

import numpy as np
from tools.convert.sources.logical import LogicalSource
import torch

FILE = Path(__file__).with_name("fx") / "mlp-down.npy"


def configure(model, recipe, sources):
    name = "text/layers/0/mlp/down"
    data = np.load(FILE, mmap_mode="r")
    if tuple(data.shape) != model.parameters[name].shape:
        raise ValueError("mlp-down.npy must have the logical shape")

    def read_values(begin, end):
        return torch.from_numpy(data.reshape(-1)[begin:end].astype(np.float32, copy=True))

    source = LogicalSource(tuple(data.shape), "mlp-down.npy", read_values)
    recipe.assign(name, source=source, format="q6_g64_fp16", method="grouped_absmax")
"""

CLIP = """
import math

from tools.artifact.formats import QuantFormat, get_format
from tools.convert.quantization.groupwise import quantize_matrix


def clipped_grouped(request):
    if len(request.target.shape) != 2 or not isinstance(get_format(request.target.format), QuantFormat):
        raise ValueError("clipped_grouped requires a grouped-integer matrix")
    limit = float(request.parameters["clip"])
    if not math.isfinite(limit) or limit <= 0:
        raise ValueError("clip must be positive")
    rows, columns = request.target.shape

    def produce(output):
        for begin in range(0, rows, request.rows_per_chunk):
            end = min(begin + request.rows_per_chunk, rows)
            block = request.values(begin * columns, end * columns).reshape(end - begin, columns)
            words = quantize_matrix(block.clamp(-limit, limit), request.target.format, device=request.device)
            output.write_codes(begin, words.codes, words.scales)

    return request.job(produce=produce)


def configure(model, recipe, sources):
    recipe.assign(
        "text/layers/0/mlp/down", format="q6_g64_fp16", method=clipped_grouped, parameters={"clip": 1.0}
    )
"""

ALTERNATE = """
def configure(model, recipe, sources):
    name = "text/layers/0/mlp/down"
    source = model.source(name, sources["alternate"])
    recipe.assign(name, source=source, format="q6_g64_fp16", method="grouped_absmax")
"""

FILES = {"my_recipe.py": RECIPE, "fp8.py": FP8, "np_src.py": NUMPY, "clip.py": CLIP, "alt.py": ALTERNATE}

BASE = ("--model", "fx/dense", "--recipe", "qwen3_6_27b", "--device", "cpu")

RANKED = "--proposal --proposal-rows 6 --ranking fx/rank.i64"


class Run(NamedTuple):
    """A command line, the number of objects it makes, and SHA-256 digests: of the payload, of directory members."""

    arguments: str
    objects: int
    payload: str
    members: dict[str, str] = {}  # noqa: RUF012 - of a tuple, never changed


RUNS = {
    "A": Run(
        "--model fx/dense --recipe qwen3_6_27b --components text,vision,mtp,dflash2 --source dflash2=fx/dflash2 "
        f"{RANKED} --name fx-a",
        122,
        "eb9455c2cbde1b5e69efef09aa1271714f90aaadc5778c4eecea7d23e2636a93",
        {"objects": "83c0c5e0459826c0212021b409da9b601ae70dbbbd4548bbafc7f9950e19547b"},
    ),
    "B": Run(
        "--model fx/moe --recipe qwen3_6_35b_a3b --components text,mtp,dflash --source dflash=fx/dflash " + RANKED,
        96,
        "6a5a1f095e8210a27fc65bb617893cf62cb1976f8f07f75fb242f58d149a9e80",
        {"objects": "3a98d08580a7dfa2cdd4965b9e44c9ceee66a90b9d6039fb2e20d57c295f1a4d"},
    ),
    "C": Run(
        "--model fx/dense --recipe qwen3_6_27b_nvfp4 --source quantized=fx/q6",
        81,
        "875f4e807e169e2c312ed9063da47a31829489cbd1ff8cfaf5a1155c4d816985",
        {"objects": "5bc1975a7a69518ba43fc9bcbdd7fe93ad8196c092c6b1f76c3d2ef18d22523d"},
    ),
    "D": Run(
        f"--model fx/dense --recipe qwen3_8_27b_nvfp4 --source quantized=fx/q8 --components text,mtp {RANKED}",
        74,
        "23c5d6f2ef4a98fd18e7c21ce10df25d172522f4787d8da293eca99d2c48f9b5",
        {"objects": "2cecf2e8a15584218d30280631e1c7bedc41d8ed4a95f677a78e2c3f44bd0f96"},
    ),
    "E": Run(
        "--model fx/dense --recipe qwen3_8_27b",
        55,
        "5f0ea1b52b474f6fe24d980d1b8b7e76152c295dc7ceba840000b78c17340cbf",
        {"objects": "5b252c3a4a22a754906c007c9066bc01d2a8826c42979edd85792db64c3f968f"},
    ),
    "F": Run(
        f"--model fx/dense --recipe my_recipe.py --components text,vision,mtp {RANKED}",
        92,
        "04af7332a39888be1a783c9038854eff499095c2375784635dd7d585b95c6e11",
        {"uses": "49d402182c825f8c158aa95570061efd4b56bd51693ba027f6acaa8864769905"},
    ),
    "G": Run(
        "--model fx/dense --recipe qwen3_6_27b --override fp8.py",
        54,
        "a91dfc41327780541852ab7e036b1d8c10a350763e585a0bcaf7155b36df6cf4",
        {"uses": "a15a38838383f99c3e89ade0cdf0d981d24ff3aba6dd6dc4cc2a25fc603112ff"},
    ),
    "H": Run(
        "--model fx/dense --recipe qwen3_6_27b --override np_src.py",
        55,
        "dcc3ef793dc73bdf16500f73287b64a43c5fa2387876af39275a80d454b8ae17",
        {"objects": "b89c302d4cdb9d644f51dba27d2805d9262583b595e562947f965323d059d732"},
    ),
    "I": Run(
        "--model fx/dense --recipe qwen3_6_27b --override clip.py --rows-per-chunk 7",
        55,
        "5b73a3573ccaad6fdf293ebdfc795db6a5db3ce0d233996268a5483f44fcb724",
        {"objects": "b89c302d4cdb9d644f51dba27d2805d9262583b595e562947f965323d059d732"},
    ),
    "J": Run(
        "--model fx/dense --recipe qwen3_6_27b --override alt.py --source alternate=fx/alt --max-file-bytes 200000",
        55,
        "a94c12fcb1533ac1fe22dd333ac44c67f8c17dc03a68aa61bf85f2fbb80ff3bf",
        {"objects": "b89c302d4cdb9d644f51dba27d2805d9262583b595e562947f965323d059d732"},
    ),
}


class Weight(NamedTuple):
    """One line of ``fx_objects.txt``."""

    identifier: str
    format: str
    shape: tuple[int, ...]
    digest: str
    parameters: list[str]


def documented(run: str) -> Iterator[Weight]:
    """The weight objects that are documented for one run."""
    for line in Path(fx.__file__).with_name("fx_objects.txt").read_text().splitlines():
        if not line.startswith(f"{run} "):
            continue
        _, number, short, shape, digest, names = line.split()
        match = re.fullmatch(r"(.*)\{(.*)\}", names)
        parameters = [match[1] + part for part in match[2].split(",")] if match else [names]
        sizes = tuple(map(int, shape.split("x")))
        yield Weight(f"weight/{number}", FORMATS.get(short, short), sizes, digest, parameters)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all command lines, as a user has it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(checkpoints: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the checkpoints as ``fx`` and the recipe files."""
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "fx").symlink_to(checkpoints)
    for name, text in FILES.items():
        (directory / name).write_text(text)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("NINFERBUILD_CACHE", str(cache))
    return directory


def convert(run: Callable[..., Finished], arguments: str, out: str = "O") -> dict[str, Any]:
    """Run ``convert --json``; its result."""
    ran = run("convert", *arguments.split(), "--out", out, "--device", "cpu", "--json")
    assert ran.code == 0, ran
    result: dict[str, Any] = json.loads(ran.out)
    assert list(result) == ["target", "out", "artifact_id", "files", "actions", "source_bytes_read", "seconds"]
    assert result["out"] == out
    assert result["actions"]["executed"] + result["actions"]["cached"] == result["actions"]["total"]
    for file in result["files"]:
        assert Path(file["path"]).stat().st_size == file["bytes"]
    return result


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", RUNS)
def test_documented_runs(name: str, here: Path, run: Callable[..., Finished]) -> None:
    chosen = RUNS[name]
    result = convert(run, chosen.arguments)
    report = json.loads(Path("O.conversion.json").read_text())
    parameters = {entry["object"]: entry["parameters"] for entry in report["methods"]}
    weights = list(documented(name))
    assert weights
    with Artifact("O") as artifact:
        assert len(artifact.objects) == chosen.objects
        for weight in weights:
            stored = artifact.by_id[weight.identifier]
            assert (stored.format, stored.shape) == (weight.format, weight.shape), weight
            assert parameters[weight.identifier] == weight.parameters
            assert sha256(artifact.read_object(weight.identifier))[:16] == weight.digest, weight
        assert sha256(artifact.read_range(0, artifact.payload_bytes)) == chosen.payload
        directory = artifact.directory.to_json()
    for member, digest in chosen.members.items():
        assert sha256(json.dumps(directory[member], separators=(",", ":"), ensure_ascii=False).encode()) == digest
    again = convert(run, chosen.arguments)
    assert (again["actions"]["executed"], again["artifact_id"]) == (0, result["artifact_id"])


def test_auxiliaries_of_imported_rows(here: Path, run: Callable[..., Finished]) -> None:
    """Each use of an imported matrix has the divisor that its own source holds."""
    convert(run, RUNS["C"].arguments)
    layers = [
        ["00000040"] * 4 + ["0000b040"] + ["00002040"] * 2 + ["00006040"],
        ["00000040"] * 4 + ["0000b040", "00002040", "00009040", "00009040"],
        ["00000040"] * 3 + ["00004040", "0000b040"] + ["00002040"] * 2 + ["0000b040"],
        ["00002040"] * 2 + ["0000d040"],
    ]
    with Artifact("O") as artifact:
        found = [artifact.read_object(f"auxiliary/{index:06}").hex() for index in range(27)]
        assert sum(item.id.startswith("auxiliary/") for item in artifact.objects) == 27
    assert found == [word for layer in layers for word in layer]


def test_report_of_a_custom_method(here: Path, run: Callable[..., Finished]) -> None:
    convert(run, RUNS["I"].arguments)
    report = json.loads(Path("O.conversion.json").read_text())
    (entry,) = [entry for entry in report["methods"] if entry["object"] == "weight/000024"]
    assert (entry["method"], entry["method_parameters"]) == ("clipped_grouped", {"clip": 1.0})
    assert report["rows_per_chunk"] == 7


@pytest.fixture
def model(here: Path, checkpoints: Path) -> Path:
    """``M``: the dense checkpoint with a ranking file of its own; ``T``: another chat template."""
    directory = here / "M"
    directory.mkdir()
    for file in (checkpoints / "dense").iterdir():
        (directory / file.name).symlink_to(file)
    fx.write_ranking(directory / "ranking.i64")
    (here / "T").write_text("{{ messages }} once more")
    return directory


OFFICIAL = "--model M --recipe qwen3_6_27b --components text,vision,mtp --resource chat_template.jinja=T --proposal"
QUANTIZED = (
    "--model M --recipe qwen3_8_27b_nvfp4 --source quantized=fx/q8 --source dflash2=fx/dflash2 "
    "--components text,vision,mtp,dflash2 --resource chat_template.jinja=T --proposal"
)


@pytest.mark.parametrize("arguments", [OFFICIAL, QUANTIZED], ids=["official", "quantized"])
def test_a_whole_model(arguments: str, here: Path, model: Path, run: Callable[..., Finished]) -> None:
    """The ranking is found beside the model. A vocabulary this small needs fewer rows than the default."""
    arguments += " --name qwen3.6-27b"
    refused = run("convert", *arguments.split(), "--out", "O", "--device", "cpu", "-q")
    assert refused.code == 1
    assert "131072" in refused.err
    assert not Path("O").exists()
    result = convert(run, f"{arguments} --proposal-rows 6")
    assert result["files"] == [{"path": "O", "bytes": Path("O").stat().st_size}]
    report = json.loads(Path("O.conversion.json").read_text())
    assert Path(report["provenance"]["ranking"]).name == "ranking.i64"
    components = ["text", "mtp", "vision"] + (["dflash2"] if "dflash2" in arguments else [])
    with Artifact("O") as artifact:
        assert artifact.directory.metadata == {"name": "qwen3.6-27b"}
        assert sorted(artifact.directory.components) == sorted(components)
        assert artifact.directory.components["text"]["proposal"] == {"domain": "indexed", "rows": 6}
        assert artifact.read_object("resource/text/chat_template.jinja") == b"{{ messages }} once more"
        ids = artifact.directory.bindings["proposal/token_ids"]["object"]
        assert sha256(artifact.read_object(ids))[:16] == "d07f9f8024a58d03"


def test_no_ranking(here: Path, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_ROOT", str(here / "root"))
    ran = run("convert", *BASE, "--proposal", "--out", "O", "-q")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    for place in ("fx/dense/ranking.i64", "ranking.train.counts.i64", str(here / "root")):
        assert place in ran.err


def test_options_of_a_run(here: Path, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--no-link``, ``--rerun``, ``--assign`` and ``--set`` mean to ``convert`` what they mean to ``build``."""
    monkeypatch.delenv("NINFERBUILD_CACHE")

    def counts(*more: str) -> tuple[int, int]:
        ran = run("convert", *BASE, "--set", "cache.dir=own", "--out", "P", "--json", *more)
        assert ran.code == 0, ran
        actions = json.loads(ran.out)["actions"]
        return actions["executed"], actions["cached"]

    assert counts("--no-link") == (51, 0)
    assert Path("own").is_dir()
    assert not Path("P").exists()
    assert counts() == (0, 51)
    first = Path("P").read_bytes()
    assert counts("--rerun") == (51, 0)
    assert Path("P").read_bytes() == first
    assert counts("--assign", "text/layers/*/mlp/down=q6_g64_fp16:grouped_absmax") == (4, 47)
    assert Path("P").read_bytes() != first
    assert counts("--set", "rows_per_chunk=3", "--set", "name=x") == (0, 51)


def test_plan_agrees(here: Path, run: Callable[..., Finished]) -> None:
    """What ``plan`` says of sizes is what is written."""
    arguments = RUNS["A"].arguments.split()
    planned = json.loads(run("plan", *arguments, "--out", "O", "--json").out)
    result = convert(run, RUNS["A"].arguments)
    assert planned["files"] == result["files"]
    facts = json.loads(run("inspect", "O", "--json").out)
    assert planned["payload_bytes"] == facts["payload_bytes"]
    assert {name: entry["objects"] for name, entry in planned["formats"].items()} == facts["formats"]
