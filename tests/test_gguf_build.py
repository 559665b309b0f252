"""Builds of a GGUF recipe from end to end, on a toy export."""

from __future__ import annotations

from pathlib import Path
import sys

from fixtures import gguf_hybrid
from fixtures.gguf_desk import GgufDesk
from fixtures.gguf_files import BLOCKS
from fixtures.gguf_hybrid import BF16, IQ4_NL, Q2_0, Q4_0, Export
from fixtures.workbench import fingerprints, ninferbuild
import pytest

from ninferbuild import open_artifact
from ninferbuild.artifact.reader import Artifact
from ninferbuild.verify import verify

TESTS = Path(__file__).parent

RECIPE = """
from fixtures.gguf_hybrid import DENSE, MOE

from ninferbuild.recipes.qwen3_5_gguf import dense_blocks, mixture_blocks


def dense(model, recipe, sources):
    dense_blocks(model, recipe, sources, DENSE)


def mixture(model, recipe, sources):
    mixture_blocks(model, recipe, sources, MOE)
"""

TARGET = """
[cache]
dir = "cache"
[targets.t]
model = "model"
recipe = "recipe.py:{function}"
components = ["text", "mtp"]
device = "cpu"
[targets.t.sources]
gguf = "model.gguf"
"""

TYPES = {
    "token_embd.weight": Q4_0,
    "output.weight": IQ4_NL,
    "blk.0.attn_qkv.weight": Q2_0,
    "blk.0.ssm_alpha.weight": BF16,
    "blk.4.nextn.eh_proj.weight": IQ4_NL,
}


Desk = GgufDesk[Export]


def desk_of(root: Path, *, moe: bool) -> Desk:
    gguf_hybrid.write_base(root / "model", moe=moe)
    export = gguf_hybrid.export(moe=moe, mtp=True, types=TYPES)
    return GgufDesk(
        root, export, "model.gguf", recipe=RECIPE, target=TARGET.format(function="mixture" if moe else "dense")
    )


@pytest.fixture(params=[False, True], ids=["dense", "mixture"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    return desk_of(tmp_path, moe=request.param)


def require_rows(artifact: Artifact, export: Export) -> None:
    """Every matrix of the export lies in the artifact row by row, and every vector word by word."""
    bindings = artifact.directory.bindings
    assert set(bindings) == export.blocks.keys() | export.words.keys()
    for name, binding in bindings.items():
        kind, expected = 0, export.words.get(name)
        if expected is None:
            kind, rows = export.blocks[name]
            expected = rows.tobytes()
        values, size = BLOCKS[kind] if name in export.blocks else (1, 4 if name.endswith(("a_log", "dt_bias")) else 2)
        found = b""
        for part in binding.get("parts") or [{"object": binding["object"]}]:
            item = artifact.object(part["object"])
            begin, end = part.get("range") or (0, item.bytes // size * values)
            found += artifact.read_range(item.offset + begin // values * size, (end - begin) // values * size)
        assert found == expected, name


def test_a_build_and_the_next(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # blocks and gates need no other package
    desk.settle()
    first = desk.build()
    assert first.executed + first.cached == first.total > 0
    with open_artifact(desk.root / "t.ninfer") as artifact:
        require_rows(artifact, desk.export)
    assert not verify(desk.root / "t.ninfer").findings
    outputs = sorted(desk.root.glob("t.ninfer*"))
    before = fingerprints(outputs)
    second = desk.build()
    assert (second.executed, second.source_bytes_read, second.up_to_date) == (0, 0, True)
    assert fingerprints(outputs) == before

    # One tensor of one layer changes: of the parents only its own is made again.
    for tensor in ("blk.1.ssm_out.weight", "blk.2.ssm_a"):
        desk.overwrite(tensor, bytes([desk.export.tensors[tensor][3][0] ^ 0xFF]))
        assert desk.build().executed == 1


def test_a_plan_loads_no_torch(desk: Desk) -> None:
    assert desk.planned_without_torch()["actions"]


def test_a_moved_and_rewritten_file_is_the_same(desk: Desk) -> None:
    """Keys are of what is stored: neither the path of a file nor the order of its tensors is in them."""
    total = desk.build().total
    entries = list(desk.export.tensors.items())
    Export(desk.export.kv, dict(reversed(entries))).write(desk.root / "again.gguf")
    desk.gguf.unlink()
    again = desk.build("sources.gguf=again.gguf")
    assert (again.executed, again.total) == (0, total)


def test_faults_are_told_before_anything_is_encoded(tmp_path: Path) -> None:
    desk = desk_of(tmp_path, moe=False)
    del desk.export.tensors["output.weight"]
    desk.export.write(desk.gguf)
    done = ninferbuild("build", cwd=tmp_path, path=[TESTS])
    assert done.code == 1
    assert "tensor set mismatch" in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("t.ninfer*"))
