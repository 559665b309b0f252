"""Readers and methods of a recipe file that results must not be mixed up or kept for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fixtures.changes.bench import Bench, contents
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.fingerprint import Fingerprints
from ninferbuild.sources.safetensors import TensorViews, tensor_source


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "bench", monkeypatch)


ENCODED = """
import struct

from tools.convert.sources.logical import EncodedRows, LogicalSource
import torch

SHIFT = 0
DIVISOR = struct.pack("<f", 2.0)


def configure(model, recipe, sources):
    for name in ("text/layers/0/mlp/gate", "text/layers/0/mlp/up"):
        rows, columns = model.parameters[name].shape
        codes = ((torch.arange(rows * columns // 2) + SHIFT) % 256).to(torch.uint8).reshape(rows, -1)
        scales = (torch.arange(rows * columns // 16) % 127).to(torch.uint8).reshape(rows, -1)

        def read_encoded(begin, end, codes=codes, scales=scales):
            return EncodedRows("nvfp4", codes[begin:end], scales[begin:end], DIVISOR)

        source = LogicalSource(
            (rows, columns), "words", refuse, read_encoded, weight_divisor=lambda: DIVISOR
        )
        recipe.assign(name, source=source, format="nvfp4", method="import_encoded")


def refuse(begin, end):
    raise AssertionError("values were read")
"""


def test_encoded_rows_in_blocks_of_any_size(bench: Bench) -> None:
    """Rows that are hashed in one block and encoded in several have one digest."""
    bench.write("recipe.py", ENCODED)
    bench.set("rows_per_chunk", 128)
    bench.settle()
    first = contents(bench.build().result)
    assert bench.build().ran == []
    for rows in (256, 512):
        bench.set("rows_per_chunk", rows)
        again = bench.build()
        assert (again.ran, again.written) == ([], False)
    bench.edit("recipe.py", "SHIFT = 0", "SHIFT = 1")
    changed = bench.build()
    assert changed.ran == ["mlp/gate"]
    assert contents(changed.result) != first
    assert contents(changed.result) == bench.fresh(bench.root / "fresh")


def test_encoded_rows_that_change_their_kind(bench: Bench) -> None:
    kinds = ENCODED.replace("scales[begin:end], DIVISOR)", 'scales[begin:end], struct.pack("<f", 2.0 + begin))')
    bench.write("recipe.py", kinds)
    bench.set("rows_per_chunk", 128)
    with pytest.raises(ValueError, match=r"text/layers/0/mlp/gate.*words: encoded rows are nvfp4 .* after nvfp4 "):
        bench.build()


LIVE = """
from pathlib import Path

from tools.convert.sources.logical import LogicalSource
import torch


def reader_of(file):
    def read(begin, end):
        file.seek(0)
        return torch.full((end - begin,), float(file.read()))

    return read


def configure(model, recipe, sources):
    for number, name in enumerate(("text/layers/0/post_attention_norm", "text/final_norm")):
        file = open(Path(__file__).with_name(f"value-{number}.txt"))
        source = LogicalSource(model.parameters[name].shape, "file", reader_of(file), files=())
        recipe.assign(name, source=source, format="fp32")
"""


def test_readers_that_differ_in_what_cannot_be_seen(bench: Bench) -> None:
    """Their lines are equal and both are uncacheable: they are two actions, and each runs on every build."""
    for number in range(2):
        bench.write(f"value-{number}.txt", f"{number}.5")
    bench.write("recipe.py", LIVE)
    names = ["final_norm", "post_attention_norm"]
    first = bench.build()
    assert set(names) <= set(first.ran)
    assert bench.build().ran == names
    with Artifact(bench.target().out) as artifact:
        payloads = [bytes(artifact.read_object(object_of(artifact, f"text/{name}"))) for name in PARAMETERS]
    assert [payload[:4].hex() for payload in payloads] == ["0000003f", "0000c03f"]  # 0.5 and 1.5
    bench.write("value-1.txt", "7.5")
    assert bench.build().ran == names
    assert bench.target().out.read_bytes() == bench.fresh(bench.root / "fresh")["t.ninfer"]


PARAMETERS = ("layers/0/post_attention_norm", "final_norm")


def object_of(artifact: Artifact, name: str) -> str:
    found: str = artifact.directory.bindings[name]["object"]
    return found


MAPPED = """
from pathlib import Path

import numpy as np
import torch

VALUES = Path(__file__).with_name("values.npy")


def method(request):
    values = np.load(VALUES, mmap_mode="r")
    count = request.target.shape[0]

    def produce(output):
        {change}
        output.write_values(0, torch.from_numpy(np.array(values)))

    return request.job(produce=produce)


def configure(model, recipe, sources):
    recipe.assign("text/final_norm", format="fp32", method=method)
"""


@pytest.mark.parametrize("changed", [False, True])
def test_a_file_that_changes_between_opening_and_reading(bench: Bench, changed: bool) -> None:
    """A method maps a file while it is prepared and reads it while it produces: what was opened has to be what was
    read, or the result is not kept."""
    import numpy as np

    from ninferbuild.execute import Executor

    np.save(bench.path("values.npy"), np.full(128, 1.5, np.float32))
    bench.write("recipe.py", MAPPED.replace("{change}", "pass"))
    run = Executor.run

    def changing(executor: Executor, action: object) -> None:
        with bench.path("values.npy").open("r+b") as file:
            file.seek(-512, 2)
            file.write(np.full(128, 2.5, np.float32).tobytes())
        run(executor, action)  # type: ignore[arg-type]

    with bench.monkeypatch.context() as patch:
        if changed:
            patch.setattr(Executor, "run", changing)
        bench.build()
    if not changed:
        assert bench.build().ran == []
        return
    assert bench.target().out.read_bytes() == bench.fresh(bench.root / "now")["t.ninfer"]
    np.save(bench.path("values.npy"), np.full(128, 1.5, np.float32))
    assert bench.build().ran == ["final_norm"]
    assert bench.target().out.read_bytes() == bench.fresh(bench.root / "before")["t.ninfer"]
    assert bench.build().ran == []


def test_names_of_parameters_keep_their_type(bench: Bench) -> None:
    """``{1: …}`` and ``{"1": …}`` are different parameters."""
    method = (
        "import torch\n\n\ndef method(request):\n    count = request.target.shape[0]\n"
        "    value = float(next(iter(request.parameters)) == 1)\n"
        "    return request.job(produce=lambda output: output.write_values(0, torch.full((count,), value)))\n\n\n"
        "def configure(model, recipe, sources):\n"
        '    recipe.assign("text/final_norm", format="fp32", method=method, parameters={1  : 2})\n'
    )
    bench.write("recipe.py", method)
    bench.settle()
    bench.build()
    for number, (old, new) in enumerate((("{1  : 2}", '{"1": 2}'), ('{"1": 2}', '{"1": 2, "2": 3}'))):
        bench.edit("recipe.py", old, new)
        changed = bench.build()
        assert changed.ran == ["final_norm"]
        assert contents(changed.result) == bench.fresh(bench.root / f"fresh-{number}")
    bench.edit("recipe.py", '{"1": 2, "2": 3}', """{"1: int 2\\nparameter.2": 3}""")
    assert bench.build().ran == ["final_norm"]


class OwnStore:
    path = "own"

    def describe(self, name: str) -> Any:
        return SimpleNamespace(shape=(4, 128))

    def read_flat(self, name: str, begin: int, end: int) -> Any:
        import torch

        return torch.arange(begin, end)


def test_the_function_that_reads_a_store_of_ones_own_keeps_its_identity() -> None:
    views = TensorViews(OwnStore(), "x", (2, 128), (4, 128))
    for source in (tensor_source(OwnStore(), "x", (2, 128), offset=128, source_shape=(4, 128)), views.at(128)):
        taken = Fingerprints().of(source.read_values)
        read = "ninferbuild.sources.safetensors.tensor_source.<locals>.read"
        assert taken.uncacheable == ()
        assert [line for line in taken.lines if line.startswith((f"{read} closure", "subject"))] == [
            f"{read} closure expected = tuple (int 4, int 128)",
            f'{read} closure name = str "x"',
            f"{read} closure offset = int 128",
            f"{read} closure store = #0 instance of class {OwnStore.__module__}.OwnStore ()",
            f"subject = function {read}",
        ]
        assert source.label == "own:x[128:384]"
        assert source.values(1, 3).tolist() == [129, 130]
