"""``convert`` and ``inspect`` on the FX checkpoints, as the reference's command line is documented to behave.

Departures are deliberate and named where they are tested: an output that is up to date is not an error, paths and
times are in the report and not in the artifact, and failures are one line.
"""

from __future__ import annotations

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
from typing import Any

from fixtures import fx
import pytest

from ninferbuild.artifact.reader import Artifact

BASE = ("convert", "--model", "fx/dense", "--recipe", "qwen3_6_27b", "--device", "cpu")
RUN_A = (
    *(*BASE, "--components", "text,vision,mtp,dflash2", "--source", "dflash2=fx/dflash2", "--proposal"),
    *("--proposal-rows", "6", "--ranking", "fx/rank.i64", "--name", "fx-a", "--out", "A"),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fx.write_all(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def here(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory in which ``fx`` is the checkpoints."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "fx").symlink_to(checkpoints)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "work"


def outputs(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "fx" and path.suffix not in (".py", ".j"))


def test_c1_progress_and_files(here: Path, run: Callable[..., Any]) -> None:
    ran = run(*BASE, "--out", "Z", "--workers", "1")
    assert ran.code == 0, ran
    *progress, last = ran.out.splitlines()
    assert len(progress) == 51
    assert all(line.startswith("[") and "/51] " in line for line in progress)
    assert "[51/51] text/layers/3/mlp/down: q5_g64_fp16 (128, 256)" in progress
    assert "[10/51] text/layers/3/attention/query (+1): q4_g64_fp16 (192, 128)" in progress
    assert last.startswith("wrote Z: 55 objects, 1 files, ")
    assert last.endswith("s")
    assert outputs(here) == ["Z", "Z.conversion.json"]


def test_c2_again_is_up_to_date(here: Path, run: Callable[..., Any]) -> None:
    """Departure: the reference refuses its own output; here it is recognised and left alone."""
    assert run(*BASE, "--out", "Z").code == 0
    before = {name: (here / name).stat().st_mtime_ns for name in outputs(here)}
    ran = run(*BASE, "--out", "Z")
    assert ran.code == 0
    assert ran.out.splitlines()[-1].startswith("Z is up to date")
    assert {name: (here / name).stat().st_mtime_ns for name in outputs(here)} == before
    (last,) = run(*BASE, "--out", "Z", "--json").out.splitlines()
    found = json.loads(last)
    assert list(found) == ["target", "out", "artifact_id", "files", "actions", "source_bytes_read", "seconds"]
    assert found["files"] == [{"path": "Z", "bytes": (here / "Z").stat().st_size}]
    assert found["actions"] == {"total": 51, "executed": 0, "cached": 51}


def test_c2_a_foreign_output_stays(here: Path, run: Callable[..., Any]) -> None:
    (here / "Z").write_bytes(b"mine")
    run(*BASE, "--out", "Z").failed(1, "Z", "--overwrite")
    assert (here / "Z").read_bytes() == b"mine"
    assert outputs(here) == ["Z"]
    assert run(*BASE, "--out", "Z", "--overwrite").code == 0
    assert (here / "Z").read_bytes()[:4] != b"mine"


def test_c3_report(here: Path, run: Callable[..., Any]) -> None:
    """Departure: provenance in the artifact has no paths; the report has them."""
    assert run(*RUN_A).code == 0
    report = json.loads((here / "A.conversion.json").read_text())
    assert list(report)[:18] == [
        *("components", "name", "output", "device", "torch_version", "cuda_version", "rows_per_chunk", "provenance"),
        *("preparation_seconds", "parameters", "uses", "objects", "formats", "methods", "artifact_id", "files"),
        *("payload_bytes", "seconds"),
    ]
    assert list(report["formats"].items()) == [
        ("q4_g64_fp16", 11),
        ("q5_g64_fp16", 14),
        ("q8_g32_fp16", 16),
        ("bf16", 65),
        ("q6_g64_fp16", 3),
        ("fp32", 6),
        ("int32", 1),
    ]
    assert (report["parameters"], report["uses"], report["objects"]) == (146, 85, 122)
    assert (report["name"], report["output"], report["device"], report["rows_per_chunk"]) == ("fx-a", "A", "cpu", 512)
    assert report["provenance"]["recipe"] == "qwen3_6_27b"
    assert report["provenance"]["sources"] == {"base": {"path": "fx/dense"}, "dflash2": {"path": "fx/dflash2"}}
    assert report["provenance"]["ranking"] == "fx/rank.i64"
    labels = {entry["object"]: entry["sources"] for entry in report["methods"]}
    prefix = "fx/dense:model.language_model.layers.0.linear_attn."
    assert labels["weight/000000"] == [f"rows({prefix}in_proj_qkv.weight, 1 spans, 64 rows)"] * 2
    assert labels["weight/000026"] == [f"transpose({prefix}conv1d.weight[0:1024],(2, 0, 1))"]
    assert labels["weight/000114"] == ["rows(fx/dense:lm_head.weight, 6 spans, 6 rows)"]
    with Artifact("A") as artifact:
        assert "fx/" not in json.dumps(artifact.directory.provenance)
        assert list(artifact.directory.provenance["sources"]) == ["base", "dflash2"]
    assert run("init", "again", "--from", "A.conversion.json", "-f", "t.toml").code == 0
    ran = run("build", "again", "-f", "t.toml", "--json")
    assert json.loads(ran.out)["actions"]["executed"] == 0


def test_c4_unused_source(here: Path, run: Callable[..., Any]) -> None:
    line = "--source x: nothing in the recipe and the components asks for this source; it is not read"
    for command in (BASE, ("plan", *BASE[1:])):
        ran = run(*command, "--out", "Z", "--source", "x=missing/path")
        assert ran.code == 0
        assert ran.err.splitlines().count(line) == 1
        assert line not in run(*command, "--out", "Z").err
    assert "x" not in json.loads((here / "Z.conversion.json").read_text())["provenance"]["sources"]


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (("--source", "a=1", "--source", "a=2"), 2, "unique NAME=PATH"),
        (("--source", "base=p"), 2, "--model"),
        (("--components", "text,text"), 2, "must not repeat"),
        (("--components", "vision"), 2, "supported optional components"),
        (("--components", "text,foo"), 2, "supported optional components"),
        (("--components", "text,dflash2"), 1, "requires source 'dflash2'"),
        (("--resource", "foo=fx/rank.i64"), 1, "no selected consumer"),
        (("--resource", "preprocessor_config.json=fx/rank.i64"), 1, "no selected consumer"),
        (("--recipe", "recipe.py"), 1, "configure"),
        (("--recipe", "none.py"), 2, "none.py"),
        (("--recipe", "recipe.txt"), 2, "cannot load recipe file"),
        (("--recipe", "no_such_recipe"), 2, "no_such_recipe"),
    ],
)
def test_c5_to_c8_refusals(here: Path, run: Callable[..., Any], args: tuple[str, ...], code: int, part: str) -> None:
    """Departure: what is wrong with the options themselves is a usage error, 2; everything is one line."""
    (here / "recipe.py").write_text("def other(model, recipe, sources): pass\n")
    (here / "recipe.txt").write_text("")
    run(*BASE, "--out", "Z", *args).failed(code, part)
    assert outputs(here) == ["recipe.txt"]


def test_c8_c9_functions_and_helpers(here: Path, run: Callable[..., Any]) -> None:
    import sys

    (here / "folder").mkdir()
    (here / "folder" / "recipe.py").write_text(
        "import helper_beside\ndef other(model, recipe, sources):\n    helper_beside.apply(recipe)\n"
    )
    (here / "folder" / "helper_beside.py").write_text(
        "def apply(recipe):\n    recipe.assign('text/final_norm', format='fp32')\n    print('helper ran')\n"
    )
    path = list(sys.path)
    ran = run(*BASE[:3], "--recipe", "folder/recipe.py:other", "--device", "cpu", "--out", "Z")
    assert ran.code == 0, ran
    assert "helper ran" in ran.out
    assert sys.path == path
    assert "helper_beside" not in sys.modules
    ran = run("params", "*/final_norm", "--model", "fx/dense", "--recipe", "folder/recipe.py:other", "--json")
    (row,) = json.loads(ran.out)
    assert (row["name"], row["format"], row["method"]) == ("text/final_norm", "fp32", "cast_direct")
    assert "helper ran" in ran.err


def test_c11_parameters_that_cannot_be_stored(here: Path, run: Callable[..., Any]) -> None:
    recipe = "def configure(model, recipe, sources):\n    recipe.assign('text/final_norm', parameters={'a': %s})\n"
    for value in ("{1, 2}", "float('nan')"):
        (here / "recipe.py").write_text(recipe % value)
        ran = run(*BASE, "--override", "recipe.py", "--out", "Z", "-q")
        assert ran.code == 1, value
        assert ran.err.startswith("error: ")
        assert ran.err.count("\n") == 1
        assert outputs(here) == []


def test_c12_a_producer_that_fails(here: Path, run: Callable[..., Any]) -> None:
    (here / "recipe.py").write_text(
        "def failing(request):\n"
        "    def produce(output):\n"
        "        raise RuntimeError('out of luck')\n"
        "    return request.job(produce=produce)\n"
        "def configure(model, recipe, sources):\n"
        "    recipe.assign('text/layers/1/post_attention_norm', method=failing)\n"
    )
    ran = run(*BASE, "--override", "recipe.py", "--out", "Z", "-q")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    for part in ("text/layers/1/post_attention_norm", "failing/bf16", "out of luck"):
        assert part in ran.err
    assert outputs(here) == []


OWN_RECIPE = """
import torch
from tools.convert.sources.logical import array_source

def ones(request):
    def produce(output):
        for begin in range(0, request.source_offsets[-1], 100):
            end = min(begin + 100, request.source_offsets[-1])
            output.write_values(begin, request.values(begin, end).to(torch.bfloat16))
    return request.job(produce=produce)

def configure(model, recipe, sources):
    for name, parameter in model.parameters.items():
        recipe.assign(name, source=array_source(torch.ones(parameter.shape), "ones"))
    layer = "text/layers/0/"
    recipe.assign(["text/token_embedding", layer + "mlp/gate", layer + "mlp/up"], format="bf16", method=ones)
    formats = {"query": "q4_g64_fp16", "key": "q5_g64_fp16", "gate": "q6_g64_fp16", "value": "q8_g32_fp16"}
    for role, name in formats.items():
        recipe.assign(layer + "attention/" + role, format=name, method="grouped_absmax")
"""


def test_c10_a_user_s_own_weights(here: Path, run: Callable[..., Any]) -> None:
    """A checkpoint without weight files, every value from the recipe, small files."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        **fx.text_config(),
        "hidden_size": 128,
        "vocab_size": 8,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "head_dim": 8,
        "intermediate_size": 24,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
    }
    (here / "own.j").mkdir()
    tokens = {f"t{index}": index for index in range(8)}
    for name, value in {
        "config.json": config,
        "tokenizer.json": {"model": {"vocab": tokens}, "added_tokens": []},
        "tokenizer_config.json": {},
        "generation_config.json": {},
    }.items():
        (here / "own.j" / name).write_text(json.dumps(value))
    (here / "T.j").write_text("{{ messages }}!")
    (here / "recipe.py").write_text(OWN_RECIPE)
    ran = run(
        *("convert", "--model", "own.j", "--recipe", "recipe.py", "--device", "cpu", "--out", "Z"),
        *("--max-file-bytes", "16384", "--rows-per-chunk", "3", "--name", "my-training-run"),
        *("--resource", "chat_template.jinja=T.j"),
    )
    assert ran.code == 0, ran
    with Artifact("Z") as artifact:
        directory = artifact.directory
        assert len(directory.files) > 1
        assert directory.metadata == {"name": "my-training-run"}
        assert artifact.read_object("resource/text/chat_template.jinja") == b"{{ messages }}!"
        by_name = {name: binding["object"] for name, binding in directory.bindings.items() if "object" in binding}
        assert artifact.read_object(by_name["text/token_embedding"]) == b"\x80\x3f" * 1024
        attention = [by_name[f"text/layers/0/attention/{role}"] for role in ("query", "key", "gate", "value")]
        formats = [artifact.by_id[identifier].format for identifier in attention]
        assert formats == ["q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"]
        assert by_name["text/layers/0/mlp/gate"] != by_name["text/layers/0/mlp/up"]


def test_c13_parts(here: Path, run: Callable[..., Any]) -> None:
    """Where the payload is cut depends on the directory's length, and provenance differs; the rule is checked."""
    (here / "alt.py").write_text(
        "def configure(model, recipe, sources):\n"
        "    name = 'text/layers/0/mlp/down'\n"
        "    source = model.source(name, sources['alternate'])\n"
        "    recipe.assign(name, source=source, format='q6_g64_fp16')\n"
    )
    options = (*BASE, "--override", "alt.py", "--source", "alternate=fx/alt", "--max-file-bytes", "200000")
    assert run(*options, "--out", "Z").code == 0
    report = json.loads((here / "Z.conversion.json").read_text())
    files = report["files"]
    assert [file["path"] for file in files] == ["Z", "Z.part-0001", "Z.part-0002"]
    assert all((here / file["path"]).stat().st_size <= 200_000 for file in files)
    assert sum(file["payload_bytes"] for file in files) == report["payload_bytes"] == 176128 + 192512 + 41984
    payload = hashlib.sha256()
    with Artifact("Z") as artifact:
        for piece in artifact.iter_range(0, artifact.payload_bytes):
            payload.update(piece)
    assert payload.hexdigest() == "a94c12fcb1533ac1fe22dd333ac44c67f8c17dc03a68aa61bf85f2fbb80ff3bf"
    plan = json.loads(run("plan", *options[1:], "--out", "Z", "--json").out)
    assert plan["files"] == [{"path": file["path"], "bytes": (here / file["path"]).stat().st_size} for file in files]


def test_c14_inspector(here: Path, run: Callable[..., Any]) -> None:
    assert run(*RUN_A, "-q").code == 0
    facts = json.loads(run("inspect", "A", "--json").out)
    with Artifact("A") as artifact:
        assert facts["file_bytes"] - facts["payload_bytes"] == artifact.payload_offset
    assert list(facts) == [
        *("path", "version", "artifact_id", "name", "components", "file_bytes", "payload_bytes", "files", "objects"),
        *("tensors", "resources", "bindings", "uses", "formats", "layouts"),
    ]
    lines = run("inspect", "A", "--objects", "--bindings").out.splitlines()
    assert lines[0] == "path: A"
    # The documented line has the resources of the checkpoint before it; 512 is the first aligned offset behind them.
    line = "           512           8704 tensor   q4_g64_fp16/row_split_k128_v1 [128, 128]   weight/000000"
    assert line in lines
    assert lines[-1] == "}"


@pytest.mark.parametrize("content", [b"", b"not an artifact at all, but long enough for a header", None])
def test_broken_artifacts(here: Path, run: Callable[..., Any], content: bytes | None) -> None:
    if content is not None:
        (here / "broken.ninfer").write_bytes(content)
    run("inspect", "broken.ninfer").failed(1, "broken.ninfer")


def test_plan_says_what_will_run(here: Path, run: Callable[..., Any]) -> None:
    options = (*BASE[1:], "--out", "Z")

    def states(*more: str) -> dict[str, int]:
        ran = run("plan", *options, *more, "--json")
        assert ran.code == 0, ran
        found: dict[str, int] = {}
        for action in json.loads(ran.out)["actions"]:
            found[action["state"]] = found.get(action["state"], 0) + 1
        return found

    assert states() == {"run": 51}
    assert not (here.parent / "cache").exists()
    assert run("convert", *options, "--no-link").code == 0
    assert outputs(here) == []
    assert states() == {"cached": 51}
    assert states("--assign", "text/layers/3/mlp/down=q6_g64_fp16") == {"cached": 50, "run": 1}
    text = run("plan", *options).out
    assert "actions: 51 (51 cached)" in text
    dry = run("convert", *options, "--dry-run")
    assert (dry.code, dry.out) == (0, text)
    assert outputs(here) == []
