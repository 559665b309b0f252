"""``gguf ls``."""

from __future__ import annotations

import json
from pathlib import Path
import subprocess
import sys
from typing import Any

from fixtures.gguf_files import write_gguf
import pytest

TENSORS = [
    ("token_embd.weight", (2, 32), 8, bytes(68)),
    ("blk.0.attn_norm.weight", (5120,), 0, bytes(4 * 5120)),
    ("blk.0.odd", (2, 3, 4), 99, bytes(7)),
    ("blk.1.old", (2, 32), 3, bytes(40)),
]

LINES = (
    "blk.0.attn_norm.weight\t(5120,)\tF32\n"
    "blk.0.odd\t(2, 3, 4)\t99\n"
    "blk.1.old\t(2, 32)\tQ4_1\n"
    "token_embd.weight\t(2, 32)\tQ8_0\n"
)

WITHOUT = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "gguf"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refused())
from ninferbuild.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", {"general.architecture": "qwen35"}, TENSORS)


def test_one_line_a_tensor_sorted(model: Path, run: Any) -> None:
    ran = run("gguf", "ls", model)
    assert (ran.code, ran.out, ran.err) == (0, LINES, "")


def test_json(model: Path, run: Any) -> None:
    assert json.loads(run("gguf", "ls", model, "--json").out) == [
        {"name": "blk.0.attn_norm.weight", "shape": [5120], "type": "F32"},
        {"name": "blk.0.odd", "shape": [2, 3, 4], "type": "99"},
        {"name": "blk.1.old", "shape": [2, 32], "type": "Q4_1"},
        {"name": "token_embd.weight", "shape": [2, 32], "type": "Q8_0"},
    ]


def test_a_file_without_data_and_a_shard(tmp_path: Path, model: Path, run: Any) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-20000])
    assert run("gguf", "ls", cut).out == LINES
    shard = write_gguf(tmp_path / "shard.gguf", {"split.count": 2, "split.no": 0}, TENSORS[:1])
    assert run("gguf", "ls", shard).out == LINES.splitlines(keepends=True)[-1]


def test_without_torch_numpy_and_gguf(model: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, "gguf", "ls", str(model)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == LINES


def test_names_do_not_steer_the_terminal(tmp_path: Path, run: Any) -> None:
    name = "a\x1b]0;owned\x07\x9b31m\u202e\tb\nc"
    path = write_gguf(tmp_path / "odd.gguf", {}, [(name, (2, 3, 4), 99, bytes(7))])
    assert run("gguf", "ls", path).out == "a\\x1b]0;owned\\x07\\x9b31m\\u202e\\tb\\nc\t(2, 3, 4)\t99\n"
    assert [row["name"] for row in json.loads(run("gguf", "ls", path, "--json").out)] == [name]


@pytest.mark.parametrize(
    ("content", "parts"),
    [(None, ["no.gguf", "no such"]), (b"not one", ["no.gguf", "not a GGUF file"])],
)
def test_what_is_no_gguf(tmp_path: Path, run: Any, content: bytes | None, parts: list[str]) -> None:
    path = tmp_path / "no.gguf"
    if content is not None:
        path.write_bytes(content)
    run("gguf", "ls", path).failed(1, *parts)


def test_help_and_usage(run: Any) -> None:
    assert "ninferbuild gguf ls model.gguf" in run("gguf", "ls", "--help").out
    for args, message in ((("gguf",), "Usage"), (("gguf", "ls"), "'FILE'"), (("gguf", "list", "x"), "'list'")):
        ran = run(*args)
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
