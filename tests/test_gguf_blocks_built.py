"""GGUF blocks in artifacts: packed, split, gathered and refused; cached by the stored bytes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from fixtures import synthetic
from fixtures.gguf_files import Tensor, write_gguf
from fixtures.rm4 import model_of, payload, summary
import numpy as np
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import build
from ninferbuild.models.model import Parameter
from ninferbuild.recipe import Recipe
from ninferbuild.sources.files import CheckpointFile
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_blocks import block_source
from ninferbuild.sources.logical import LogicalSource, gather_source
from ninferbuild.target import CacheSettings, Target
from ninferbuild.verify import verify

Q4_0, Q8_0 = 2, 8


def noise(rows: int, row_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)


UP, GATE, OTHER = noise(2, 68, 0), noise(3, 68, 1), noise(3, 36, 2)


@pytest.fixture
def gguf(tmp_path: Path) -> GGUFFile:
    tensors: list[Tensor] = [
        ("up", (2, 64), Q8_0, UP.tobytes()),
        ("gate", (3, 64), Q8_0, GATE.tobytes()),
        ("other", (3, 64), Q4_0, OTHER.tobytes()),
    ]
    return GGUFFile(write_gguf(tmp_path / "m.gguf", {}, tensors))


def recipe_of(sources: dict[str, LogicalSource], groups: Sequence[tuple[str, ...]] = ()) -> Recipe:
    """Each source imported in the format of its blocks."""
    recipe = Recipe(model_of([Parameter(name, source.shape, source) for name, source in sources.items()]))
    for name, source in sources.items():
        assert source.description is not None
        recipe.assign(name, format=str(source.description.encoding), method="import_encoded")
    for group in groups:
        recipe.group(group)
    return recipe


def test_a_group_is_one_object(gguf: GGUFFile) -> None:
    sources = {"up": block_source(gguf, "up", (2, 64)), "gate": block_source(gguf, "gate", (3, 64))}
    prepared = recipe_of(sources, [("up", "gate")]).prepare(device="cpu", rows_per_chunk=4)
    assert summary(prepared) == [("gguf_q8_0", (5, 64), ("up", "gate"))]
    assert payload(prepared.weights[0]) == UP.tobytes() + GATE.tobytes()
    assert prepared.bindings == {
        "up": {"parts": [{"object": "weight/000000", "range": [0, 128]}]},
        "gate": {"parts": [{"object": "weight/000000", "range": [128, 320]}]},
    }
    assert prepared.weights[0].sources == ("up[gguf_q8_0][2, 64]", "gate[gguf_q8_0][3, 64]")


def test_rows_of_a_parameter_are_assigned_apart(gguf: GGUFFile) -> None:
    recipe = recipe_of({"gate": block_source(gguf, "gate", (3, 64))})
    recipe.assign("gate", rows=(0, 1), format="bf16", method="cast_direct")
    first, second = recipe.prepare(device="cpu").weights
    assert (first.spec.format, second.spec.format) == ("bf16", "gguf_q8_0")
    assert payload(second) == GATE[1:].tobytes()


def test_gathered_rows(gguf: GGUFFile) -> None:
    recipe = recipe_of({"head": gather_source(block_source(gguf, "gate", (3, 64)), [2, 0, 2, 1])})
    (job,) = recipe.prepare(device="cpu", rows_per_chunk=3).weights
    assert payload(job) == GATE[[2, 0, 2, 1]].tobytes()


def test_formats_do_not_mix(gguf: GGUFFile) -> None:
    sources = {"gate": block_source(gguf, "gate", (3, 64)), "other": block_source(gguf, "other", (3, 64))}
    with pytest.raises(ValueError, match=r"incompatible formats.*: gate, other"):
        recipe_of(sources, [("gate", "other")]).prepare(device="cpu")
    recipe = recipe_of(sources, [("gate", "other")])
    recipe.assign("other", format="gguf_q8_0")
    with pytest.raises(ValueError, match="source gguf_q4_0 differs from target gguf_q8_0"):
        recipe.prepare(device="cpu")


def test_other_targets_and_sources_are_refused(gguf: GGUFFile) -> None:
    source = block_source(gguf, "gate", (3, 64))
    recipe = recipe_of({"gate": source})
    recipe.assign("gate", format="gguf_q4_0")
    with pytest.raises(ValueError, match="source gguf_q8_0 differs from target gguf_q4_0"):
        recipe.prepare(device="cpu")
    recipe = recipe_of({"gate": source})
    recipe.assign("gate", source=replace(source, read_encoded=None))
    with pytest.raises(ValueError, match="encoded rows are unavailable"):
        recipe.prepare(device="cpu")
    recipe = recipe_of({"gate": source})
    recipe.assign("gate", parameters={"a": 1})
    with pytest.raises(ValueError, match="no numerical parameters"):
        recipe.prepare(device="cpu")


GEOMETRY = synthetic.text_geometry(1, h=64, inter=128, heads=2, d=32, vocab=128, gk=1, gkd=32, gv=2, gvd=32, interval=1)

WRAPPED = """
from tools.convert.sources.logical import EncodedRows, LogicalSource


def rows(begin, end):
    import torch
    return EncodedRows("gguf_q8_0", torch.full((end - begin, 68), 7, dtype=torch.uint8), torch.empty(0).half())


def refuse(begin, end):
    raise AssertionError("values were read")


def configure(model, recipe, sources):
    source = LogicalSource((128, 64), "sevens", refuse, rows)
    recipe.assign("text/layers/0/mlp/up", source=source, format="gguf_q8_0", method="import_encoded")
"""

OVERRIDE = """
from ninferbuild.sources.gguf_blocks import block_source


def configure(model, recipe, sources):
    gguf = sources["gguf"]
    up = block_source(gguf, "up", (128, 64), lambda begin, end: [row ^ 1 for row in range(begin, end)])
    down = block_source(gguf, "down", (64, 128), [(32, 64), (0, 32)])
    recipe.assign("text/layers/0/mlp/up", source=up, format="gguf_q8_0", method="import_encoded")
    recipe.assign("text/layers/0/mlp/down", source=down, format="gguf_q2_0", method="import_encoded")
    recipe.assign("text/layers/0/mlp/gate", source=block_source(gguf, "gate", (128, 64)))
"""

UP_ROWS, DOWN_ROWS, GATE_ROWS = noise(128, 68, 3), noise(64, 36, 4), noise(128, 36, 5)
GATE_ROWS[:, 1::18] &= 0x03  # scales that stay finite when the recipe quantises the values


def write_blocks(path: Path, *, up: np.ndarray = UP_ROWS, extra: int = 0) -> Path:
    tensors: list[Tensor] = [
        ("extra", (extra,), 0, bytes(4 * extra)),
        ("gate", (128, 64), Q4_0, GATE_ROWS.tobytes()),
        ("down", (64, 128), 42, DOWN_ROWS.tobytes()),
        ("up", (128, 64), Q8_0, up.tobytes()),
    ]
    write_gguf(path, {"general.name": "x" * extra}, tensors[0 if extra else 1 :])
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Target:
    synthetic.write_base(tmp_path / "checkpoint", GEOMETRY, 1, with_vision=False, with_mtp=False)
    (tmp_path / "blocks.py").write_text(OVERRIDE)
    return Target(
        name="tiny",
        identity=str(tmp_path / "tiny.ninfer"),
        file=None,
        model=tmp_path / "checkpoint",
        recipe="qwen3_6_27b",
        overrides=(str(tmp_path / "blocks.py"),),
        sources={"gguf": write_blocks(tmp_path / "m.gguf")},
        out=tmp_path / "tiny.ninfer",
        device="cpu",
        cache=CacheSettings(dir=tmp_path / "cache"),
    )


def stored(path: Path, parameter: str) -> tuple[str, bytes]:
    """Format and payload of the object that one parameter is bound to."""
    with Artifact(path) as artifact:
        binding = artifact.directory.bindings[parameter]
        item: Any = artifact.by_id[binding.get("object") or binding["parts"][0]["object"]]
        return item.format, artifact.read_range(item.offset, item.bytes)


class Reads:
    """Bytes that were read from the GGUF file for encoding or hashing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ranges: list[tuple[int, int]] = []
        original = CheckpointFile.read_into

        def read_into(file: CheckpointFile, offset: int, buffer: memoryview) -> None:
            if isinstance(file, GGUFFile):
                self.ranges.append((offset, offset + len(buffer)))
            original(file, offset, buffer)

        monkeypatch.setattr(CheckpointFile, "read_into", read_into)
        # Samples tell whether a result can exist at all; what they read is bounded and not part of the count.
        monkeypatch.setattr("ninferbuild.resolve._samples", lambda region: [str(region.length).encode()])

    def each_byte_once(self) -> bool:
        places = sorted(self.ranges)
        return all(first[1] <= second[0] for first, second in pairwise(places))


def test_a_build_copies_blocks_and_reads_each_byte_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    result = build(target)
    assert result.executed == result.total
    assert reads.each_byte_once()
    assert sum(end - begin for begin, end in reads.ranges) == UP_ROWS.size + DOWN_ROWS.size + GATE_ROWS.size
    assert stored(target.out, "text/layers/0/mlp/up") == ("gguf_q8_0", UP_ROWS[np.arange(128) ^ 1].tobytes())
    down = np.concatenate([DOWN_ROWS[32:], DOWN_ROWS[:32]])
    assert stored(target.out, "text/layers/0/mlp/down") == ("gguf_q2_0", down.tobytes())
    assert stored(target.out, "text/layers/0/mlp/gate")[0] not in ("gguf_q4_0", "bf16")
    assert verify(target.out).findings == ()


def untouched(target: Target) -> Target:
    return target


def touched(target: Target) -> Target:
    os.utime(target.sources["gguf"])
    return target


def moved(target: Target) -> Target:
    path = target.sources["gguf"]
    return replace(target, sources={"gguf": path.rename(path.with_name("moved.gguf"))})


def rearranged(target: Target) -> Target:
    """The same blocks at other places of a file with another header."""
    return replace(target, sources={"gguf": write_blocks(target.sources["gguf"].with_name("other.gguf"), extra=99)})


@pytest.mark.parametrize("change", [untouched, touched, moved, rearranged], ids=lambda change: change.__name__)
def test_equal_blocks_are_encoded_once(target: Target, change: Callable[[Target], Target]) -> None:
    build(target)
    before = target.out.read_bytes()
    assert build(change(target)).executed == 0
    assert target.out.read_bytes() == before


def test_one_changed_block_makes_one_object_again(target: Target) -> None:
    build(target)
    up = UP_ROWS.copy()
    up[77, 40] ^= 1
    write_blocks(target.sources["gguf"], up=up)
    assert build(target).executed == 1
    assert stored(target.out, "text/layers/0/mlp/up")[1] == up[np.arange(128) ^ 1].tobytes()


def test_blocks_of_a_function(target: Target) -> None:
    """They are hashed by what they are, without scales."""
    Path(target.overrides[0]).write_text(WRAPPED)
    build(target)
    assert stored(target.out, "text/layers/0/mlp/up") == ("gguf_q8_0", b"\x07" * 128 * 68)
    assert build(target).executed == 0


def test_commands_show_blocks_without_reading_them(target: Target) -> None:
    """Neither torch nor the package for values is loaded."""
    toml = target.out.with_name("ninferbuild.toml")
    toml.write_text(
        f'[cache]\ndir = "{target.cache.dir}"\n[targets.tiny]\nmodel = "checkpoint"\nrecipe = "qwen3_6_27b"\n'
        'out = "tiny.ninfer"\noverrides = ["blocks.py"]\n[targets.tiny.sources]\ngguf = "m.gguf"\n'
    )
    build(target)
    program = (
        "import sys\nfrom ninferbuild.cli import main\n"
        "for arguments in (['plan', 'tiny'], ['params', 'tiny', 'text/layers/0/mlp/*'],"
        " ['inspect', 'tiny.ninfer', '--objects']):\n"
        "    assert main(arguments) == 0\n"
        "print(sorted({'torch', 'gguf'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=toml.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *shown, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert sum("gguf_q8_0" in line for line in shown) >= 3
    assert sum("gguf_q2_0" in line for line in shown) >= 3
