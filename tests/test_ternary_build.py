"""Builds of the ternary recipe from end to end, on a toy export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import json
import threading
from typing import Any

from fixtures import ternary_hybrid
from fixtures.gguf_desk import GgufDesk
from fixtures.memory_writer import MemoryWriter
from fixtures.workbench import Finished, fingerprints
import numpy as np
import pytest
import torch

from ninferbuild import models, open_artifact
from ninferbuild.artifact.codecs.row_split import decode_row_split_codes, dequantize_row_split
from ninferbuild.artifact.layouts import planes
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.digest import digest_of
from ninferbuild.encode import PayloadSink, encode
from ninferbuild.lanes import HostLane
from ninferbuild.plan import Parent, plan_parents
from ninferbuild.recipe import Recipe
from ninferbuild.recipes.bonsai2_ternary import import_ternary
from ninferbuild.recipes.proposal import add_official_proposal
from ninferbuild.sources.opened import Sources

T2 = "t2_g128_fp16"

RECIPE = """
from fixtures.ternary_hybrid import GEOMETRY
from ninferbuild.recipes.bonsai2_ternary import import_ternary


def configure(model, recipe, sources):
    import_ternary(model, recipe, sources, GEOMETRY)
"""

TARGET = """
[cache]
dir = "cache"
[targets.t]
model = "model"
recipe = "recipe.py"
components = ["text", "dflash2"]
device = "cpu"
proposal = { rows = 7, ranking = "ranking.i64" }
[targets.t.sources]
ternary = "ternary.gguf"
dflash2 = "dflash2"
"""


Desk = GgufDesk[ternary_hybrid.Export]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A desk on which the target was built once; tests that change it come last."""
    root = tmp_path_factory.mktemp("desk")
    ternary_hybrid.write_base(root / "model")
    ternary_hybrid.write_dflash2(root / "dflash2")
    np.arange(ternary_hybrid.VOCAB, dtype="<i8").tofile(root / "ranking.i64")
    desk = GgufDesk(root, ternary_hybrid.export(), "ternary.gguf", recipe=RECIPE, target=TARGET)
    desk.settle()
    made = desk.build()
    assert made.executed + made.cached == made.total > 0
    return desk


@pytest.fixture
def artifact(desk: Desk) -> Iterator[Artifact]:
    with open_artifact(desk.root / "t.ninfer") as artifact:
        yield artifact


def rows_of(artifact: Artifact, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes int8 ``[rows, K]``, scale words ``[rows, K/128]`` and FP32 values of a ternary parameter."""
    binding = artifact.directory.bindings[name]
    ((identifier, bounds),) = [
        (part["object"], part.get("range")) for part in binding.get("parts") or [{"object": binding["object"]}]
    ]
    item = artifact.object(identifier)
    assert item.format == T2
    data = artifact.read_range(item.offset, item.bytes)
    scales, codes = decode_row_split_codes(data, T2, item.shape)
    values = dequantize_row_split(data, T2, item.shape, dtype=torch.float32).numpy()
    columns = item.shape[1]
    first, last = (0, item.shape[0]) if bounds is None else (bound // columns for bound in bounds)
    words = scales.numpy().view(np.uint16)
    return codes.reshape(item.shape).numpy()[first:last], words[first:last], values[first:last]


def test_every_matrix_is_that_of_the_file(desk: Desk, artifact: Artifact) -> None:
    for name, (codes, scales) in desk.export.matrices.items():
        found_codes, found_scales, values = rows_of(artifact, name)
        assert (found_codes == codes).all(), name
        assert (found_scales == scales).all(), name
        blocks = codes.reshape(len(codes), -1, 128) * scales.view("<f2").astype(np.float32)[:, :, None]
        assert (values == blocks.reshape(codes.shape)).all(), name


def test_every_vector_is_that_of_the_model(desk: Desk, artifact: Artifact) -> None:
    for name, words in desk.export.words.items():
        item = artifact.object(artifact.directory.bindings[name]["object"])
        assert artifact.read_range(item.offset, item.bytes) == words, name


def test_the_proposal_head_repeats_rows_of_the_head(desk: Desk, artifact: Artifact) -> None:
    item = artifact.object(artifact.directory.bindings["proposal/token_ids"]["object"])
    ids = np.frombuffer(artifact.read_range(item.offset, item.bytes), "<i4")
    codes, scales, _ = rows_of(artifact, "proposal/head")
    head = desk.export.matrices["text/output_head"]
    assert (codes == head[0][ids]).all()
    assert (scales == head[1][ids]).all()


def test_what_the_commands_say(desk: Desk, run: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk.root)

    def said(*args: object) -> Any:
        done = run(*args, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    assert said("verify", "t.ninfer")["valid"]
    inspected = said("inspect", "t.ninfer", "--objects", "--bindings")
    assert inspected["formats"][T2] == 23
    signs = [item for item in inspected["object_records"] if item["id"].startswith("auxiliary/")]
    assert [(item["format"], item["layout"], item["shape"]) for item in signs] == [
        ("bf16", "contiguous_le_v1", [width]) for width in ternary_hybrid.WIDTHS
    ]
    uses = {(use["parameter"], use["input"]): use for use in inspected["use_records"]}
    assert uses["proposal/head", "dflash2/final_hidden"]["auxiliaries"] == {
        "hadamard_signs": {"object": "auxiliary/000000"}
    }
    planned = said("plan", "t")
    assert {action["state"] for action in planned["actions"]} == {"cached"}
    assert planned["formats"][T2]["objects"] == 23
    z, gate = (said("params", "t", f"text/layers/0/gdn/{name}")[0] for name in ("z", "a_projection"))
    assert (z["format"], z["method"], z["shape"]) == (T2, "import_encoded", [2048, 1024])
    assert (z["auxiliaries"], gate["auxiliaries"]) == (["hadamard_signs"], [])


def test_a_plan_loads_no_torch(desk: Desk) -> None:
    assert desk.planned_without_torch()["actions"]


@pytest.fixture(scope="module")
def parents(desk: Desk) -> Iterator[dict[str, Parent]]:
    """Parents of the target by the name of their first parameter."""
    paths = {"ternary": desk.gguf, "dflash2": desk.root / "dflash2"}
    with Sources(desk.root / "model", paths) as sources:
        model = models.build(sources["base"], ("text", "dflash2"), sources=sources)
        recipe = Recipe(model)
        import_ternary(model, recipe, sources, ternary_hybrid.GEOMETRY)
        add_official_proposal(recipe, ranking=desk.root / "ranking.i64", rows=7)
        yield {parent.names[0]: parent for parent in plan_parents(recipe).parents}


def encoded(parent: Parent, chunk_bytes: int) -> tuple[bytes, int]:
    """The payload, and the source bytes that were read."""
    geometry = planes(parent.target.layout, parent.target.format, parent.target.shape)
    payload = bytearray(sum(plane.extent for plane in geometry))

    def put(offset: int, data: memoryview) -> bytes:
        payload[offset : offset + len(data)] = data
        return digest_of(data)

    with ThreadPoolExecutor(1) as pool:
        sink = PayloadSink(geometry, put, pool)
        advance = [0].append
        _, count = encode(parent, sink, HostLane(), chunk_bytes=chunk_bytes, cancel=threading.Event(), advance=advance)
        sink.finish()
    return bytes(payload), count


@pytest.mark.parametrize(
    ("name", "chunk_rows"),
    [
        ("text/layers/0/gdn/value", (37, 1000)),
        ("text/layers/3/attention/gate", (100, 2048)),
        ("text/token_embedding", (1, 5, 64)),
        ("proposal/head", (1, 2, 100)),
    ],
)
def test_chunks_of_any_size_give_the_same_bytes(
    parents: dict[str, Parent], name: str, chunk_rows: tuple[int, ...]
) -> None:
    parent = parents[name]
    writer = MemoryWriter(parent.target)
    request = replace(parent.request, device="cpu", rows_per_chunk=511)
    parent.method(request).produce(TensorOutput(writer, parent.target.id))
    rows, columns = parent.target.shape
    for count in chunk_rows:
        payload, read = encoded(parent, 2 * columns * count)
        assert payload == writer.payload(), count
        assert read == rows * columns // 128 * 34


def test_every_byte_of_a_matrix_is_read_once(desk: Desk, parents: dict[str, Parent]) -> None:
    read: Counter[str] = Counter()
    for parent in parents.values():
        for item in parent.request.inputs:
            description = item.source.description
            assert description is not None
            if description.encoding == T2 and item.parameter != "proposal/head":
                read[description.parts[0].name.rpartition(" ")[2]] += description.parts[0].region.length
    stored = {name: len(raw) for name, _, kind, raw in desk.export.tensors.values() if kind == ternary_hybrid.PQ2_0}
    assert read == stored


def test_a_second_build_runs_nothing(desk: Desk) -> None:
    outputs = sorted(desk.root.glob("t.ninfer*"))
    before = fingerprints(outputs)
    again = desk.build()
    assert (again.executed, again.cached, again.source_bytes_read) == (0, again.total, 0)
    assert fingerprints(outputs) == before


def test_a_changed_sign_runs_nothing_and_is_in_the_artifact(desk: Desk) -> None:
    values = list(desk.export.kv["prism.hadamard.sign_values"])
    values[5] = -values[5]
    replace(desk.export, kv=desk.export.kv | {"prism.hadamard.sign_values": values}).write(desk.gguf)
    again = desk.build()
    assert (again.executed, again.up_to_date) == (0, False)
    with open_artifact(desk.root / "t.ninfer") as artifact:
        item = artifact.object("auxiliary/000000")
        words = np.frombuffer(artifact.read_range(item.offset, item.bytes), "<u2")
        assert words.tolist() == [0x3F80 if sign > 0 else 0xBF80 for sign in values[:1024]]


def test_one_changed_tensor_runs_one_action(desk: Desk) -> None:
    block = desk.export.tensors["blk.1.ssm_out.weight"][3][-34:]
    turned = block[:1] + bytes([block[1] ^ 0x80]) + block[2:]  # the scale's sign
    desk.overwrite("blk.1.ssm_out.weight", turned, -34)
    assert desk.build().executed == 1
    desk.overwrite("blk.2.ssm_a", np.full(8, -2, "<f4").tobytes())
    assert desk.build().executed == 1


def test_a_word_that_is_no_ternary_code_fails_one_action(desk: Desk) -> None:
    desk.overwrite("blk.0.ffn_down.weight", b"\xff", -1)
    with pytest.raises(Exception, match=r"PQ2_0 block holds code 3 \(\+2\), which is not ternary") as caught:
        desk.build()
    assert "text/layers/0/mlp/down" in str(caught.value)
    assert "blk.0.ffn_down.weight" in str(caught.value)
