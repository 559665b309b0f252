"""Warming up encodes a block of each kind of work once, and never gets in the way of a build."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ninferbuild import warming
from ninferbuild.warming import ROWS, warm_up

CPU = torch.device("cpu")


class Rule:
    """Notes what it is asked to encode."""

    def __init__(self, name: str, *, reads: str = "values", surveys: bool = False, fails: bool = False):
        self.name, self.reads, self.surveys, self.fails = name, reads, surveys, fails
        self.encoded: list[tuple[int, ...]] = []

    def encode(self, block: torch.Tensor, target: Any, checked: Any, first_row: int, device: torch.device) -> None:
        self.encoded.append(tuple(block.shape))
        if self.fails:
            raise RuntimeError("no kernel image is available")


def parent(rule: Rule | None, format: str, *shape: int) -> Any:
    return SimpleNamespace(
        rule=rule, checked=object(), request=SimpleNamespace(target=SimpleNamespace(format=format, shape=shape))
    )


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = SimpleNamespace(stream=lambda stream: nullcontext(), Stream=lambda device: None)
    monkeypatch.setattr(
        warming, "torch", SimpleNamespace(cuda=streams, zeros=torch.zeros, bfloat16=torch.bfloat16, device=torch.device)
    )


def finish(parents: list[Any]) -> None:
    for thread in warm_up([CPU], parents):
        thread.join()


def test_each_kind_once() -> None:
    rule = Rule("grouped_absmax")
    finish(
        [parent(rule, "q4_g64_fp16", 512, 256), parent(rule, "q4_g64_fp16", 9, 9), parent(rule, "q5_g64_fp16", 3, 64)]
    )
    assert rule.encoded == [(ROWS, 256), (3, 64)]


def test_what_no_gpu_encodes_is_left_alone() -> None:
    rules = [Rule("import_encoded", reads="encoded"), Rule("nvfp4_maxabs", surveys=True), Rule("cast_direct")]
    finish([parent(None, "q4_g64_fp16", 8, 64), *(parent(rule, "bf16", 8, 64) for rule in rules)])
    assert not any(rule.encoded for rule in rules)


def test_a_failure_is_left_to_the_encoding_itself() -> None:
    failing, other = Rule("fails", fails=True), Rule("other")
    finish([parent(failing, "q4_g64_fp16", 8, 64), parent(other, "q4_g64_fp16", 8, 64)])
    assert failing.encoded
    assert other.encoded
