"""A kernel that does not make torch's bytes is not used, and one that does is tried once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.rules import fused
from ninferbuild.rules.scale_search import search_by_torch

CPU = torch.device("cpu")
Q4 = QUANT_FORMATS["q4_g64_fp16"]


def right(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = search_by_torch(*arguments, **keywords)
    return found.codes, found.scales


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What stands in for the kernel, under ``"search"``; the CPU for a GPU."""
    stand_in = {"search": right}
    monkeypatch.setattr(fused, "_kernel", lambda: stand_in["search"])
    monkeypatch.setattr(fused, "find_spec", lambda name: object())
    monkeypatch.setattr(fused, "_refusals", {})
    return stand_in


@pytest.mark.parametrize("weighted", [False, True])
def test_torchs_bytes_are_trusted(weighted: bool) -> None:
    assert fused.ready(CPU, Q4, weighted=weighted)
    assert fused._refusals == {(CPU, 4, weighted): None}


@pytest.mark.parametrize("part", [0, 1])
def test_one_bit_of_codes_or_scales_is_seen(kernel: dict[str, Any], part: int) -> None:
    def wrong(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = right(*arguments, **keywords)
        found[part].view(torch.int8).view(-1)[-1] ^= 1
        return found

    kernel["search"] = wrong
    # The last group of either kind of search.
    assert fused.refusal(CPU, Q4, weighted=True) == "its results differ from torch's in 2 groups"
    assert not fused.ready(CPU, Q4, weighted=True)


def test_a_kernel_that_cannot_be_compiled_is_not_used(kernel: dict[str, Any]) -> None:
    def search(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    kernel["search"] = search
    assert fused.refusal(CPU, Q4, weighted=False) == "RuntimeError: Failed to find C compiler"


def test_a_full_gpu_says_nothing_about_the_kernel(kernel: dict[str, Any]) -> None:
    def search(*arguments: Any, **keywords: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    kernel["search"] = search
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fused.ready(CPU, Q4, weighted=False)
    kernel["search"] = right
    assert fused.ready(CPU, Q4, weighted=False)


def test_threads_wait_for_one_trial(kernel: dict[str, Any]) -> None:
    calls = []

    def search(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(keywords["negative"])
        time.sleep(0.05)
        return right(*arguments, **keywords)

    kernel["search"] = search
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: fused.ready(CPU, Q4, weighted=False), range(4)))
    assert calls == [False, True]


def test_without_triton_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, kernel: dict[str, Any]) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    kernel["search"] = None
    assert fused.refusal(CPU, Q4, weighted=False) == "triton is not installed"


def test_the_cpu_loads_no_kernel() -> None:
    text = (
        "import sys, torch\n"
        "from ninferbuild.rules.scale_search import search_quantize_matrix\n"
        "search_quantize_matrix(torch.ones(2, 64), 'q4_g64_fp16', device='cpu')\n"
        "assert 'ninferbuild.rules.triton_search' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)
