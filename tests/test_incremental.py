"""A build does what changed and nothing else, whichever way it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
import os
from pathlib import Path
import shutil
from typing import Any

from fixtures import fx
from fixtures.workbench import Bench, Finished, fingerprints, ninferbuild, reshard, states
import pytest

from ninferbuild import build, load_target, plan
from ninferbuild.job import Job

DOWN = "text/layers/0/mlp/down"
LOGGED = '[targets.t]\nmodel = "{model}"\nrecipe = "recipe.py"\ndevice = "cpu"\n'
OFFICIAL = '[targets.t]\nmodel = "{model}"\nrecipe = "qwen3_6_27b"\ndevice = "cpu"\n'
ACTIONS, LOGGED_ACTIONS = 51, 59


@pytest.fixture
def own(checkpoints: Path, bench: Bench) -> Path:
    """A copy of the dense checkpoint in the bench's directory."""
    return shutil.copytree(checkpoints / "dense", bench.root / "model")


# Nothing changed


def test_second_build_in_new_processes(settled: Path, tmp_path: Path) -> None:
    """Nothing is executed or read, torch is not loaded, no file is touched, though a recipe imports torch."""
    (tmp_path / "over.py").write_text(
        "import torch\n\ndef configure(model, recipe, sources):\n    recipe.assign('text/final_norm', format='fp32')\n"
    )
    (tmp_path / "ninferbuild.toml").write_text(
        '[cache]\ndir = "cache"\n' + OFFICIAL.format(model=settled / "dense") + 'overrides = ["over.py"]\n'
    )
    first = ninferbuild("build", "--json", cwd=tmp_path)
    assert first.code == 0, first
    made = json.loads(first.out)
    assert made["actions"]["executed"] + made["actions"]["cached"] == ACTIONS
    files = sorted(path for path in tmp_path.iterdir() if path.name.startswith("t.ninfer"))
    assert [path.name for path in files] == ["t.ninfer", "t.ninfer.conversion.json"]
    before = fingerprints(files)

    # In front of the real one stands a torch that cannot be loaded.
    poison = tmp_path / "poison"
    (poison / "torch").mkdir(parents=True)
    (poison / "torch" / "__init__.py").write_text("raise RuntimeError('torch was loaded')\n")
    refused = ninferbuild("build", "--rerun", cwd=tmp_path, path=[poison])
    assert refused.code == 1
    assert "torch was loaded" in refused.err
    second = ninferbuild("build", "--json", cwd=tmp_path, path=[poison])
    assert second.code == 0, second
    again = json.loads(second.out)
    assert again["actions"] == {"total": ACTIONS, "executed": 0, "cached": ACTIONS}
    assert again["source_bytes_read"] == 0
    assert (again["files"], again["artifact_id"]) == (made["files"], made["artifact_id"])
    assert fingerprints(files) == before


def test_second_build(bench: Bench, settled: Path) -> None:
    bench.write(LOGGED.format(model=settled / "dense"))
    first = bench.build()
    assert (first.executed, len(set(bench.encoded)), first.up_to_date) == (LOGGED_ACTIONS, LOGGED_ACTIONS, False)
    paths = [path for path, _ in first.files]
    before = fingerprints(paths)
    second = bench.build()
    assert (second.executed, second.source_bytes_read, second.up_to_date) == (0, 0, True)
    assert fingerprints(paths) == before
    assert states(bench.plan()).keys() == {"cached"}


def test_an_output_that_was_removed_or_damaged_is_linked_again(bench: Bench, own: Path) -> None:
    bench.write(LOGGED.format(model="model"))
    (path, size), *_ = bench.build().files
    content = path.read_bytes()
    path.unlink()
    assert bench.build().executed == 0
    assert path.read_bytes() == content
    with path.open("r+b") as file:
        file.seek(size - 1)
        file.write(bytes([content[-1] ^ 1]))
    assert (bench.build().executed, bench.build().up_to_date) == (0, True)
    assert path.read_bytes() == content
    path.with_name(path.name + ".conversion.json").unlink()
    before = fingerprints([path])
    assert bench.build().up_to_date
    assert fingerprints([path]) == before
    assert json.loads(path.with_name(path.name + ".conversion.json").read_text())["objects"] == LOGGED_ACTIONS + 4


# One choice changed

PAIR = ["text/layers/1/mlp/gate", "text/layers/1/mlp/up"]
OUTPUTS = [f"text/layers/{layer}/gdn/output" for layer in range(3)]
CHANGES = {
    "a matrix": ([DOWN], "q6_g64_fp16", [DOWN]),
    "a packed pair": (PAIR, "q8_g32_fp16", [" ".join(PAIR)]),
    "a pattern": (["text/layers/*/gdn/output"], "q8_g32_fp16", OUTPUTS),
    "a vector": (["text/final_norm"], "fp32", ["text/final_norm"]),
}
"""Name → selectors, their new format, and the parents that are touched."""


@pytest.mark.parametrize("change", CHANGES)
def test_one_assign(bench: Bench, own: Path, change: str) -> None:
    select, format_name, touched = CHANGES[change]
    bench.write(LOGGED.format(model="model"))
    before = bench.build()
    bench.write(LOGGED.format(model="model") + f'[[targets.t.assign]]\nselect = {select}\nformat = "{format_name}"\n')
    expected = states(bench.plan())
    assert expected["run"] == touched
    result = bench.build()
    assert sorted(bench.encoded) == sorted(touched)
    assert result.executed == len(touched)
    assert result.artifact_id != before.artifact_id
    bench.write(LOGGED.format(model="model"))
    back = bench.build()
    assert (back.executed, back.artifact_id) == (0, before.artifact_id)


@pytest.mark.parametrize("change", [*CHANGES, "half of a pair"])
def test_one_assign_with_built_in_methods(own: Path, tmp_path: Path, change: str) -> None:
    select, format_name, touched = (CHANGES | {"half of a pair": (PAIR[:1], "q6_g64_fp16", PAIR)})[change]
    file = tmp_path / "ninferbuild.toml"
    text = '[cache]\ndir = "cache"\n' + OFFICIAL.format(model=own)
    file.write_text(text)
    build(load_target(file=file))
    file.write_text(text + f'[[targets.t.assign]]\nselect = {select}\nformat = "{format_name}"\n')
    assert states(plan(load_target(file=file)))["run"] == touched
    result = build(load_target(file=file))
    assert result.executed == len(touched)
    report = json.loads((tmp_path / "t.ninfer.conversion.json").read_text())
    ran = [" ".join(entry["parameters"]) for entry in report["methods"] if entry["state"] == "executed"]
    assert ran == touched


def test_options_that_change_no_payload(bench: Bench, own: Path) -> None:
    """Names, policies and where files are cut are the linker's business alone."""
    bench.write(LOGGED.format(model="model"))
    plain = bench.build()
    for change in ("name=other", "max_file_bytes=200000"):
        result = bench.build(sets=[change])
        assert result.executed == 0
        assert result.artifact_id != plain.artifact_id
    assert len(bench.build(sets=["max_file_bytes=200000"]).files) == 3
    assert bench.build().artifact_id == plain.artifact_id
    assert sorted(path.name for path in bench.root.iterdir() if ".part-" in path.name) == []


# The same tensors elsewhere


def moved(bench: Bench) -> None:
    (bench.root / "elsewhere").mkdir()
    (bench.root / "model").rename(bench.root / "elsewhere" / "m")


def copied(bench: Bench) -> None:
    shutil.copytree(bench.root / "model", bench.root / "elsewhere" / "m")
    shutil.rmtree(bench.root / "model")


def touched(bench: Bench) -> None:
    (bench.root / "elsewhere").mkdir()
    os.symlink(bench.root / "model", bench.root / "elsewhere" / "m")
    for path in (bench.root / "model").iterdir():
        os.utime(path, (1, 1))


def sharded(bench: Bench) -> None:
    (bench.root / "elsewhere").mkdir()
    reshard(bench.root / "model", bench.root / "elsewhere" / "m", 3)
    shutil.rmtree(bench.root / "model")


def sharded_otherwise(bench: Bench) -> None:
    (bench.root / "elsewhere").mkdir()
    reshard(bench.root / "model", bench.root / "elsewhere" / "m", 7, reverse=True)
    shutil.rmtree(bench.root / "model")


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        *((OFFICIAL, change) for change in (moved, copied, touched, sharded, sharded_otherwise)),
        *((LOGGED, change) for change in (moved, sharded_otherwise)),
    ],
    ids=lambda value: value.__name__ if callable(value) else ("logged" if value == LOGGED else "official"),
)
def test_the_same_tensors_elsewhere(bench: Bench, own: Path, recipe: str, change: Callable[[Bench], None]) -> None:
    bench.write(recipe.format(model="model"))
    target = load_target(file=bench.root)
    first = build(target)
    calls = bench.log.lines()
    before = fingerprints([path for path, _ in first.files])
    change(bench)
    second = build(replace(target, model=bench.root / "elsewhere" / "m"))
    assert (second.executed, second.artifact_id, second.up_to_date) == (0, first.artifact_id, True)
    assert bench.log.lines() == calls
    assert fingerprints([path for path, _ in first.files]) == before


CURIOUS = """
from dataclasses import replace

from ninferbuild.rules import grouped_absmax


def curious(request):
    label = request.source.label
    with open({log!r}, "a") as log:
        log.write(label + "\\n")
    return grouped_absmax(replace(request, target=replace(request.target, divisors=1)))


def configure(model, recipe, sources):
    recipe.assign("text/layers/1/mlp/down", method=curious)
"""


def test_a_method_that_looks_at_the_path(bench: Bench, own: Path) -> None:
    """Labels of sources hold the path of the checkpoint; a method that looks at one runs again when it changes."""
    log = bench.root / "labels.log"
    (bench.root / "over.py").write_text(CURIOUS.format(log=str(log)))
    bench.write(OFFICIAL.format(model="model") + 'overrides = ["over.py"]\n')
    target = load_target(file=bench.root)
    first = build(target)
    assert build(target).executed == 0
    calls = log.read_text().splitlines()
    assert calls == [f"{own}:{fx.TEXT_PREFIX}layers.1.mlp.down_proj.weight"]
    copied(bench)
    second = build(replace(target, model=bench.root / "elsewhere" / "m"))
    assert (second.executed, second.artifact_id) == (1, first.artifact_id)
    assert len(log.read_text().splitlines()) == 2
    assert "elsewhere" in log.read_text()


def test_one_tensor_changed(bench: Bench, own: Path) -> None:
    """A changed element, with the file's length and modification time as they were."""
    bench.write(LOGGED.format(model="model"))
    bench.build()
    file = own / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    data = bytearray(file.read_bytes())
    (length,) = memoryview(data)[:8].cast("Q")
    entry = json.loads(data[8 : 8 + length])[fx.TEXT_PREFIX + "layers.2.mlp.down_proj.weight"]
    data[8 + length + entry["data_offsets"][0]] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=times)
    assert states(bench.plan(hash_sources=True))["run"] == ["text/layers/2/mlp/down"]
    assert bench.build().executed == 1
    assert bench.encoded == ["text/layers/2/mlp/down"]


# A user's own code and data

CLIPPED = """
import helper


def clipped(request):
    rows, width = request.target.shape

    def produce(output):
        with open({log!r}, "a") as log:
            log.write(request.inputs[0].parameter + "\\n")
        output.write_codes(0, *helper.encode(request, rows, width))

    return request.job(produce=produce)


def configure(model, recipe, sources):
    recipe.assign("text/layers/1/mlp/down", format="q6_g64_fp16", method=clipped)
"""

HELPER = """
from ninferbuild.rules.groupwise import quantize_matrix

LIMIT = 1.0


def encode(request, rows, width):
    block = request.values(0, rows * width).reshape(rows, width)
    words = quantize_matrix(block.clamp(-LIMIT, LIMIT), request.target.format, device=request.device)
    return words.codes, words.scales


def unrelated():
    return 1
"""

NUMPY = """
from pathlib import Path

import numpy as np
from tools.convert.sources.logical import LogicalSource
import torch

FILE = Path(__file__).with_name("down.npy")


def configure(model, recipe, sources):
    data = np.load(FILE, mmap_mode="r")

    def read_values(begin, end):
        return torch.from_numpy(np.array(data.reshape(-1)[begin:end]))

    source = LogicalSource(tuple(data.shape), "down.npy", read_values)
    recipe.assign("text/layers/0/mlp/down", source=source, format="q6_g64_fp16", method="{method}")
"""


def same_size_and_second(path: Path, old: str, new: str) -> None:
    """Edit a file so that its length and the whole second of its modification time stay."""
    assert len(old) == len(new)
    stat = path.stat()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns // 10**9 * 10**9 + 5))


def test_helper_of_a_method(bench: Bench, own: Path) -> None:
    """A sibling module is part of the method; what it does not use, and comments, are not."""
    log = bench.root / "clipped.log"
    (bench.root / "clip.py").write_text(CLIPPED.format(log=str(log)))
    helper = bench.root / "helper.py"
    helper.write_text(HELPER)
    bench.write(OFFICIAL.format(model="model") + 'overrides = ["clip.py"]\n')

    def executed() -> list[str]:
        before = log.read_text().splitlines() if log.exists() else []
        result = build(load_target(file=bench.root))
        calls = log.read_text().splitlines()[len(before) :]
        report = json.loads((bench.root / "t.ninfer.conversion.json").read_text())
        if not result.up_to_date:
            ran = [entry["parameters"][0] for entry in report["methods"] if entry["state"] == "executed"]
            assert len(ran) == result.executed
            assert [name for name in ran if name == "text/layers/1/mlp/down"] == calls
        return calls if result.executed == len(calls) else [f"{result.executed} actions"]

    executed()
    assert executed() == []
    same_size_and_second(helper, "LIMIT = 1.0", "LIMIT = 0.5")
    assert executed() == ["text/layers/1/mlp/down"]
    assert executed() == []
    helper.write_text(helper.read_text().replace("return 1", "return 2") + "# a comment\n")
    assert executed() == []
    same_size_and_second(helper, "LIMIT = 0.5", "LIMIT = 1.0")
    assert executed() == []  # back to what is cached


@pytest.mark.parametrize("method", ["grouped_absmax", "logged_absmax"])
def test_file_behind_a_source(bench: Bench, own: Path, checkpoints: Path, method: str) -> None:
    matrix = bench.root / "down.npy"
    shutil.copy(checkpoints / "mlp-down.npy", matrix)
    (bench.root / "np_src.py").write_text(NUMPY.replace("{method}", method))
    bench.write(OFFICIAL.format(model="model") + 'overrides = ["np_src.py"]\n')

    def executed() -> int:
        before = len(bench.log.lines())
        result = build(load_target(file=bench.root))
        calls = bench.log.lines()[before:]
        if method == "logged_absmax":
            assert calls == ([DOWN] if result.executed else [])
        return result.executed

    assert executed() == ACTIONS
    assert executed() == 0
    stat = matrix.stat()
    with matrix.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\x20\x41")
    os.utime(matrix, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert executed() == 1
    report = json.loads((bench.root / "t.ninfer.conversion.json").read_text())
    assert [entry["parameters"] for entry in report["methods"] if entry["state"] == "executed"] == [[DOWN]]
    assert executed() == 0


# Several targets, one cache

TWO = """
[defaults]
model = "model"
recipe = "recipe.py"
device = "cpu"

[targets.small]

[targets.large]
extends = "small"
components = ["text", "mtp"]

[[targets.large.assign]]
select = "text/layers/3/mlp/down"
format = "q8_g32_fp16"
"""


def test_targets_share_a_cache(bench: Bench, own: Path) -> None:
    bench.write(TWO)
    assert bench.build("small").executed == LOGGED_ACTIONS
    large = bench.build("large")
    again = {name for name in bench.encoded if not name.startswith("mtp/")}
    # A method that is not built in can see that MTP uses the output head too.
    assert again == {"text/layers/3/mlp/down", "text/output_head"}
    assert large.executed == large.total - LOGGED_ACTIONS + len(again)
    assert {path.name for path in bench.root.glob("*.ninfer")} == {"small.ninfer", "large.ninfer"}
    assert (bench.build("small").executed, bench.build("large").executed) == (0, 0)


def test_targets_share_a_cache_on_the_command_line(
    own: Path, bench: Bench, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(TWO.replace('"recipe.py"', '"qwen3_6_27b"'), header='default = ["small", "large"]\n')
    monkeypatch.chdir(bench.root)
    ran = run("build", "--json")
    assert ran.code == 0, ran
    small, large = map(json.loads, ran.out.splitlines())
    assert (small["target"], large["target"]) == ("small", "large")
    assert small["actions"]["total"] == ACTIONS
    assert small["actions"]["executed"] + small["actions"]["cached"] == ACTIONS
    fresh = large["actions"]["total"] - ACTIONS + 1
    assert 0 < large["actions"]["executed"] <= fresh
    ran = run("build", "--json", "large", "small")
    names = [(line["target"], line["actions"]["executed"]) for line in map(json.loads, ran.out.splitlines())]
    assert names == [("large", 0), ("small", 0)]


# Options of a run


def test_rerun_and_no_link(bench: Bench, own: Path) -> None:
    bench.write(LOGGED.format(model="model"))
    filled = bench.build(link=False)
    assert (filled.executed, filled.out, filled.files, filled.artifact_id) == (LOGGED_ACTIONS, None, (), None)
    assert not list(bench.root.glob("t.ninfer*"))
    linked = bench.build()
    assert (linked.executed, linked.up_to_date) == (0, False)
    before = fingerprints([path for path, _ in linked.files])
    rerun = bench.build(rerun=True)
    assert (rerun.executed, rerun.artifact_id, rerun.up_to_date) == (LOGGED_ACTIONS, linked.artifact_id, True)
    assert fingerprints([path for path, _ in linked.files]) == before
    assert bench.build().executed == 0


def test_json_of_build(bench: Bench, own: Path, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(LOGGED.format(model="model"))
    (bench.root / "recipe.py").write_text((bench.root / "recipe.py").read_text() + "    print('the recipe ran')\n")
    monkeypatch.chdir(bench.root)

    def line(*args: str) -> dict[str, Any]:
        before = len(bench.log.lines())
        ran = run("build", "--json", *args)
        assert ran.code == 0, ran
        assert "the recipe ran" in ran.err
        found: dict[str, Any] = json.loads(ran.out)
        assert ran.out.count("\n") == 1
        assert list(found) == ["target", "out", "artifact_id", "files", "actions", "source_bytes_read", "seconds"]
        assert len(bench.log.lines()) - before == found["actions"]["executed"]
        return found

    out = bench.root / "t.ninfer"
    first = line("--no-link")
    assert (first["target"], first["out"], first["artifact_id"], first["files"]) == ("t", None, None, [])
    assert first["source_bytes_read"] > 0
    assert first["actions"] == {"total": LOGGED_ACTIONS, "executed": LOGGED_ACTIONS, "cached": 0}
    second = line()
    assert second["out"] == str(out)
    assert second["files"] == [{"path": str(out), "bytes": out.stat().st_size}]
    assert second["actions"] == {"total": LOGGED_ACTIONS, "executed": 0, "cached": LOGGED_ACTIONS}
    assert isinstance(second["seconds"], float)
    assert len(bytes.fromhex(second["artifact_id"])) == 16
    changed = line("--assign", f"{DOWN}=q8_g32_fp16")
    assert changed["actions"]["executed"] == 1
    assert changed["artifact_id"] != second["artifact_id"]
    method = line("--assign", "text/layers/3/mlp/*=q8_g32_fp16:logged_absmax")
    assert method["actions"]["executed"] == 2
    renamed = line("--set", "name=other", "--set", "out=other.ninfer")
    assert (renamed["actions"]["executed"], renamed["out"]) == (0, str(bench.root / "other.ninfer"))
    assert json.loads(run("inspect", "other.ninfer", "--json").out)["name"] == "other"
    assert line("--rerun")["actions"]["executed"] == LOGGED_ACTIONS


def test_exit_codes(bench: Bench, own: Path, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(LOGGED.format(model="model"))
    monkeypatch.chdir(bench.root)
    before = bench.log.lines()
    refused = run("build", "-q", "--assign", "text/no_such_thing=bf16")
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert "text/no_such_thing" in refused.err
    assert run("build", "-q", "--set", "no_such_key=1").code == 2
    assert run("build", "nothing").code == 2
    assert run("build", "--no-such-option").code == 2
    (bench.root / "t.ninfer").write_bytes(b"somebody else's")
    foreign = run("build", "-q")
    assert foreign.code == 1
    assert "t.ninfer" in foreign.err
    assert "--overwrite" in foreign.err
    assert bench.log.lines() == before
    assert (bench.root / "t.ninfer").read_bytes() == b"somebody else's"
    assert run("build", "-q", "--overwrite").code == 0
    assert len(bench.log.lines()) - len(before) == LOGGED_ACTIONS

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "execute", interrupt)
    assert run("build", "-q").code == 130


def test_finished_actions_are_kept(bench: Bench, own: Path) -> None:
    """One parent cannot be encoded: the others are cached, nothing is linked, and the next build makes only it."""
    from safetensors.torch import load_file, save_file
    import torch

    name = fx.TEXT_PREFIX + "layers.2.mlp.down_proj.weight"
    bench.write(LOGGED.format(model="model"))
    tensors = load_file(own / "model.safetensors")
    sound = tensors[name].clone()
    tensors[name][0, 0] = torch.nan
    save_file(tensors, own / "model.safetensors")
    before = len(bench.log.lines())
    with pytest.raises(ValueError, match=r"text/layers/2/mlp/down.*logged_absmax/q5_g64_fp16"):
        build(load_target(file=bench.root), keep_going=True)
    assert len(bench.log.lines()) - before == LOGGED_ACTIONS
    assert not list(bench.root.glob("*t.ninfer*"))
    tensors[name] = sound
    save_file(tensors, own / "model.safetensors")
    bench.build()
    assert bench.encoded == ["text/layers/2/mlp/down"]
