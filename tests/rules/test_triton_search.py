"""The Triton kernel makes torch's bytes: on a GPU, and step by step in Triton's interpreter where there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import os
import re
import subprocess
import sys

from fixtures.search_problems import search_problems
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.artifact.formats import QUANT_FORMATS, QuantFormat
from ninferbuild.rules import fused, scale_search
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.scale_search import search_quantize_matrix, search_tile
from ninferbuild.rules.search_trial import differing_groups

FORMATS = [format for format in QUANT_FORMATS.values() if format.bits > 2]

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def require_the_same(
    weight: torch.Tensor, format: QuantFormat, importance: torch.Tensor | None, *, negative: bool
) -> None:
    """Search on the GPU with the kernel and with torch, and on the CPU with torch."""
    found = []
    for device, slow in (("cuda", False), ("cuda", True), ("cpu", True)):
        errors = ErrorFlags(torch.device(device))
        with pytest.MonkeyPatch.context() as patch:
            if slow:
                patch.setattr(fused, "ready", lambda *arguments, **keywords: False)
                patch.setattr(scale_search.compiled, "_ready", set())
            rows = weight.to(device)
            weights = None if importance is None else importance.to(device)
            found.append(search_tile(rows, format, weights, errors, negative_scales=negative))
        errors.raise_if_any()
    kernel, *others = found
    for name, other in zip(("torch on CUDA", "torch on the CPU"), others, strict=True):
        codes = (kernel.codes.cpu() != other.codes.cpu()).any(dim=-1)
        scales = kernel.scales.cpu().view(torch.int16) != other.scales.cpu().view(torch.int16)
        count = int((codes | scales).sum())
        assert count == 0, (
            f"{name}: {count} of {scales.numel()} groups differ, {int(scales.sum())} of them in their scales; "
            f"the first is {(codes | scales).nonzero()[0].tolist()}: "
            f"{kernel.scales.cpu()[codes | scales][0]} instead of {other.scales.cpu()[codes | scales][0]}"
        )


@on_gpu
@each_format
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernel_serves(format: QuantFormat, weighted: bool) -> None:
    pytest.importorskip("triton")
    assert fused.refusal(torch.device("cuda", 0), format, weighted=weighted) is None


@on_gpu
@each_format
@given(data=st.data(), negative=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_same_scales_as_torch(format: QuantFormat, data: st.DataObject, negative: bool) -> None:
    weight, importance = data.draw(search_problems(format))
    require_the_same(weight, format, importance, negative=negative)


@on_gpu
@each_format
@pytest.mark.parametrize("negative", [False, True])
def test_words_are_rounded_as_torch_does(format: QuantFormat, negative: bool) -> None:
    """Alone in its group, a value makes every multiple a scale of its own: each magnitude, on ties and beside them."""
    words = torch.arange(1, 0x7BFF, 149, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    ties = torch.stack([words * format.qmax * (1 + 2.0**-12 * (1 + nudge)) for nudge in (0, 2.0**-10, -(2.0**-10))])
    weight = torch.zeros(ties.numel(), 128)
    weight[:, 5], weight[:, 6] = ties.flatten(), ties.flatten() / 3
    require_the_same(torch.cat([weight, -weight]), format, None, negative=negative)


@on_gpu
@each_format
def test_a_large_matrix(format: QuantFormat) -> None:
    """Several waves of blocks, and columns of unlike importance."""
    weight = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    importance = torch.rand(2048, generator=torch.Generator().manual_seed(2)).double() ** 8
    found = []
    for device in ("cuda", "cpu"):
        rows, weights = weight[:: 1 if device == "cuda" else 64].to(device), importance.to(device)
        found.append(search_quantize_matrix(rows, format.name, importance=weights, negative_scales=True, device=device))
    assert torch.equal(found[0].codes[::64].cpu(), found[1].codes)
    assert torch.equal(found[0].scales[::64].cpu(), found[1].scales)


@on_gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_invalid_numbers_are_refused_and_do_no_harm(value: float) -> None:
    weight = torch.ones(300, 640, device="cuda")
    weight[2, 150] = value
    for format in FORMATS:
        errors = ErrorFlags(weight.device)
        search_tile(weight, format, None, errors, negative_scales=True)
        with pytest.raises(ValueError, match=r"NaN or infinity|too large"):
            errors.raise_if_any()
    assert not differing_groups(fused.search, FORMATS[0], weight.device, weighted=False)


@on_gpu
def test_streams_of_several_threads() -> None:
    weight = torch.randn(512, 1280, generator=torch.Generator().manual_seed(4))
    wanted = search_quantize_matrix(weight, "q4_g64_fp16", device="cpu")

    def work(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = search_quantize_matrix(weight, "q4_g64_fp16", device="cuda")
            return torch.equal(found.codes.cpu(), wanted.codes) and torch.equal(found.scales.cpu(), wanted.scales)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


INTERPRETED = """
import sys
import torch
from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.rules import search_trial, triton_search

triton_search.WARPS = 8  # the interpreter takes a block at a time
every = search_trial.trial_values
search_trial.trial_values = lambda format: every(format)[::8].contiguous()
for case in sys.argv[1:]:
    name, weighted = case.split()
    format, cpu = QUANT_FORMATS[name], torch.device("cpu")
    count = search_trial.differing_groups(triton_search.search, format, cpu, weighted=weighted == "weighted")
    assert count == 0, f"{case}: {count} groups differ"
values = torch.ones(1, 128)
values[0, 3], values[0, 70] = float("nan"), float("inf")
maxima = values.view(1, -1, format.group_size).abs().amax(dim=-1)
triton_search.search(values, maxima, maxima.half(), None, format, negative=True)
"""


def test_interpreted() -> None:
    """Every step of the kernel, with rows and importance of the trial that it has to pass before it is used."""
    pytest.importorskip("triton")
    cases = [*(f"{format.name} weighted" for format in FORMATS), "q5_g64_fp16 equal", "q8_g32_fp16 equal"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED, *cases],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_machine_code_rounds_each_step_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, width: int, weighted: bool
) -> None:
    """As assembly for a Hopper GPU: nothing is fused but residuals, nothing flushed, approximated or exchanged between
    threads by way of memory except the scales that are found."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ninferbuild.rules import triton_search

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    types = ["*fp32", "*fp32", "*fp16", "*fp64", "*fp64", "*i32", "*i8", "*fp16", "i32", "i32", "i32", "fp32", "fp32"]
    constants = dict(L=16, N=128 // width, W=width, FIRST=51, LATER=18, WEIGHTED=weighted)
    signature = dict(zip(triton_search.search_kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    source = ASTSource(triton_search.search_kernel, signature, constexprs=constants)
    options = {"num_warps": triton_search.WARPS, "maxnreg": triton_search.REGISTERS, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    found = re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_.]*)", code, re.MULTILINE)
    assert {name for name in found if re.match(r"(add|sub|mul|div|fma)(\.\w+)*\.f(16|32|64)", name)} <= {
        *("add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"),
        *("add.rn.f64", "sub.rn.f64", "mul.rn.f64", "div.rn.f64", "fma.rn.f64"),
    }
    assert not [name for name in found if ".ftz" in name or ".approx" in name or ".full" in name]
    assert {name for name in found if name.startswith("cvt") and re.search(r"\.f\d+\.f\d+$", name)} <= {
        *("cvt.f64.f32", "cvt.f64.f16", "cvt.f32.f16", "cvt.rn.f32.f64", "cvt.rn.f16.f32")
    }
    assert found.count("fma.rn.f64") == 2 * triton_search.LANES  # at either place where candidates are considered
    assert found.count("bar.sync") <= 1


def test_a_reciprocal_needs_no_binary64() -> None:
    scales = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)
    exactly = (1.0 / scales.astype(np.float64)).astype(np.float32)
    assert np.array_equal(np.float32(1) / scales.astype(np.float32), exactly)
