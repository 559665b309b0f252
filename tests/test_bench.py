"""The benchmark, on a model of a few megabytes: it runs, says what it should, cleans up, and its ratios are right."""

from __future__ import annotations

from importlib.util import find_spec
import json
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "ci" / "bench"


@pytest.fixture(scope="module", autouse=True)
def benchmark_modules():
    sys.path.insert(0, str(ROOT / "ci"))
    yield
    sys.path.remove(str(ROOT / "ci"))


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(BENCH), *map(str, arguments)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What a whole run prints, what it writes as JSON, and the directory that it worked in."""
    parent = tmp_path_factory.mktemp("bench")
    found = parent / "bench.json"
    arguments = ["--scale", 40, "--gigabytes", 0.004, "--dir", parent / "made" / "here", "--json", found]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(found.read_text()), parent


def test_a_run_prints_every_scenario_and_leaves_nothing(tiny):
    from benchmark import arithmetic
    from benchmark.scenarios import SCENARIOS

    text, found, parent = tiny
    starts = [line.split(maxsplit=1)[0] for line in text.splitlines() if line]
    assert [name for name in starts if name in SCENARIOS] == list(SCENARIOS)
    assert list(found["scenarios"]) == list(SCENARIOS)
    ways = ["torch", "compiled"] if find_spec("numba") else ["torch"]
    expected = [(way, format) for way in ways for format in arithmetic.GROUPED]
    assert [(item["way"], item["format"]) for item in found["searches"]] == expected
    for item in found["searches"]:
        assert f"search {item['format']} ({item['way']}): " in text
        assert item["ratio"] == item["rate"] / item["plain"]
        assert item["floor_fraction"] == item["rate"] / item["floor"]
    assert [path.name for path in parent.iterdir()] == ["bench.json"]


def test_the_gpu_floor_counts_binary64_instructions(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from benchmark import throughput
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"TURNS": throughput.TURNS, "ELEMENTS": throughput.ELEMENTS}
    signature = {"out_at": "*fp64", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(throughput.chains, signature, constexprs=constants)
    options = {"num_warps": throughput.WARPS, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    for name in ("mul.rn.f64", "add.rn.f64"):
        assert code.count(name) == 8 * throughput.UNROLLED.value
    assert "fma" not in code


def test_a_search_that_makes_other_bytes_is_no_result(monkeypatch):
    from benchmark import arithmetic, search

    from ninferbuild import platform_io

    right = arithmetic.grouped_search

    def other(rows, format, importance):
        *planes, scales = right(rows, format, importance)
        scales[-1] ^= 1
        return *planes, scales

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(platform_io, "keep_freed_memory", lambda size: None)
    monkeypatch.setattr(arithmetic, "grouped_search", other)
    monkeypatch.setattr(search, "_ways", lambda device: ["torch"])
    with pytest.raises(ValueError, match=r"torch and the plain search .* of q4_g64_fp16: \[0, 1\] of"):
        search.measure("cpu", 1, 40)


def test_the_figures_of_a_run_belong_together(tiny):
    _, found, _ = tiny
    scenarios = found["scenarios"]
    cold = scenarios["cold"]
    assert cold["source_bytes_read"] == cold["source_bytes"] > 0
    assert cold["ratio"] == pytest.approx(scenarios["baseline"]["seconds"] / cold["seconds"])
    assert 0 < cold["stages"]["encode"] + cold["stages"]["link"] < cold["net_seconds"] < cold["seconds"]
    for name in ("method", "format"):
        assert 0 < scenarios[name]["source_bytes_read"] == scenarios[name]["source_bytes"] < cold["source_bytes"]
    for name in ("noop", "link"):
        assert scenarios[name]["source_bytes_read"] == 0
        assert scenarios[name]["stages"]["encode"] < cold["stages"]["encode"]
    for name in ("noop", "plan-dense", "plan-experts", "plan-75k"):
        assert scenarios[name]["torch"] is False
    assert cold["peak_rss"] > cold["anonymous"]
    assert {"read warm", "write"} <= found["rates"].keys()


def test_sparse_checkpoints_build_with_an_action_for_every_parent(tmp_path):
    from benchmark.checkpoint import write_sparse
    from benchmark.geometry import DENSE

    from ninferbuild.build import build
    from ninferbuild.target import convert_target

    geometry = DENSE.scaled(40)
    write_sparse(tmp_path / "model", geometry, marked=True)
    settings = {
        "model": str(tmp_path / "model"),
        "recipe": "qwen3_6_27b",
        "components": ["text"],
        "out": str(tmp_path / "out.ninfer"),
        "device": "cpu",
    }
    target = convert_target(settings, sets=[f"cache.dir={tmp_path / 'cache'}"])
    assert build(target).executed == len(target_parents(target))


def target_parents(target):
    from ninferbuild.configure import configured
    from ninferbuild.plan import plan_parents

    with configured(target) as ready:
        return plan_parents(ready.recipe).parents


def test_an_interrupted_run_removes_its_files(tmp_path):
    directory = tmp_path / "work"
    process = subprocess.Popen(
        command("--scale", 40, "--gigabytes", 0.004, "--dir", directory, "--only", "cold"), stderr=subprocess.PIPE
    )
    while not directory.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode in (130, -signal.SIGTERM), errors
    assert not directory.exists() or not list(directory.iterdir())


def test_the_baseline_computes_what_the_methods_do():
    from benchmark import arithmetic

    from ninferbuild.rules.error_flags import ErrorFlags
    from ninferbuild.rules.fp8_words import encode_matrix as encode_fp8
    from ninferbuild.rules.groupwise import encode_matrix, grouped_format

    rows = torch.randn(33, 200, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    rows[3] = 0
    rows[4, :64] = 1e-9
    errors = ErrorFlags(rows.device)
    for format in arithmetic.GROUPED:
        expected = encode_matrix(rows, grouped_format(format), errors)
        assert all(map(torch.equal, arithmetic.grouped_absmax(rows, format), expected))
    expected = encode_fp8(rows, errors)
    assert all(map(torch.equal, arithmetic.fp8_row_maxabs(rows, arithmetic.FP8), expected))
    errors.raise_if_any()


def measured(name, seconds, *, initialise=0.0, **fields):
    from benchmark.process import Usage
    from benchmark.results import Measurement

    usage = Usage(
        seconds=seconds,
        stages={"initialise": initialise, "encode": seconds / 2},
        torch=True,
        peak_rss=900,
        peak_anonymous=500,
        peak_gpu=0,
        gpu=None,
        output="",
    )
    return Measurement(name, seconds, usage=usage, **fields)


def test_ratios_and_the_floor():
    from benchmark.results import StartUp, row

    start_up = StartUp(seconds=2.0, anonymous=200)
    baseline = measured("baseline", 22.0, initialise=2.0, source_bytes=4000, written_bytes=1000, read_rate=2000.0)
    cold = measured("cold", 7.0, initialise=2.0, source_bytes=4000, written_bytes=1000, read_rate=2000.0)
    found = row(cold, baseline, start_up, write_rate=250.0)
    assert found.net_seconds == 5.0
    assert found.rate == 4000 / 7
    assert found.ratio == 22 / 7
    assert found.net_ratio == 20 / 5
    assert found.floor_seconds == 4.0  # writing takes longer than reading
    assert found.floor_fraction == 4 / 5
    assert found.anonymous == 300
    assert row(cold, baseline, start_up, write_rate=1000.0).floor_seconds == 2.0  # reading does
    alone = row(cold, None, start_up, write_rate=None)
    assert alone.ratio is None
    assert alone.floor_seconds == 2.0


def test_a_slow_baseline_voids_a_run():
    from benchmark.results import void_reason

    fast = measured("baseline", 10.0, initialise=2.0, source_bytes=int(0.97e9))
    slow = measured("baseline", 10.0, initialise=2.0, source_bytes=int(0.95e9))
    assert void_reason(fast, "cpu") is None
    assert "0.119 GB/s" in void_reason(slow, "cpu")
    assert "0.6 GB/s" in void_reason(fast, "cuda:0")


def test_the_geometry_is_the_real_one_and_fits_the_size():
    from benchmark.geometry import DENSE, LAYERS

    whole = {tensor.name: tensor for tensor in DENSE.tensors()}
    assert whole["lm_head.weight"].shape == (248320, 5120)
    assert whole[f"{LAYERS}63.self_attn.q_proj.weight"].shape == (12288, 5120)
    assert whole[f"{LAYERS}0.linear_attn.in_proj_qkv.weight"].shape == (10240, 5120)
    assert whole[f"{LAYERS}0.mlp.down_proj.weight"].shape == (5120, 17408)
    for gigabytes in (2, 8, 30):
        size = sum(tensor.bytes for tensor in DENSE.fitted(gigabytes * 10**9).tensors())
        assert size == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert DENSE.fitted(10**12) == DENSE


def test_random_checkpoints_repeat_no_block():
    from benchmark.checkpoint import BLOCK_WORDS, STEP_WORDS
    from benchmark.geometry import DENSE

    tensors = len(list(DENSE.fitted(60 * 10**9).tensors()))
    starts = {index * STEP_WORDS % BLOCK_WORDS for index in range(tensors)}
    assert len(starts) == tensors


@pytest.mark.parametrize("recipe", ["qwen3_6_35b_a3b_nvfp4", "qwen3_6_35b_a3b"])
def test_sizes_are_accounted_for_to_the_byte(recipe, tmp_path):
    from dataclasses import replace

    from benchmark.geometry import EXPERTS
    from benchmark.sizes import REST, planned, report

    small = replace(EXPERTS.scaled(40), intermediate=128, shared_intermediate=128, experts=2)
    classes = planned(tmp_path, recipe, small)
    quantised = recipe.endswith("nvfp4")
    size = 4 * 128 * 128 * 9 // 16 + 4 * 4 if quantised else 4 * 128 * 128 * 17 // 32
    assert classes["routed experts, gate and up"] == (small.layers, small.layers * size)
    assert classes["activation divisors"][0] == (small.layers * 9 if quantised else 0)
    assert classes["tokenizer and processor files"][0] == 6
    total = sum(size for _, size in classes.values())
    assert 0 < classes[REST][1] < total
    lines = report(recipe, classes, total + 1000)
    assert lines[-1].split() == ["file", f"{total:,}", f"{total + 1000:,}", "1,000"]
    assert [line.split()[0] for line in lines if line.endswith(" 1,000")] == ["tokenizer", "file"]
