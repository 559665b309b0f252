"""When remembered digests of sources are believed, and what happens when a source changes behind a build's back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
import os
from pathlib import Path
import time

from fixtures import breakable
from fixtures.changes.bench import SETTLED_NS, Bench, contents
from fixtures.workbench import Finished
import pytest

from ninferbuild import build, memo
from ninferbuild.errors import SourceChangedError
from ninferbuild.memo import Memo
from ninferbuild.progress import QuietProgress
from ninferbuild.sources.files import CheckpointFile
from ninferbuild.sources.regions import FileIdentity

NORM = "model.language_model.norm.weight"
SECONDS = 10**9


class Notes(QuietProgress):
    """Keeps what a build says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "bench", monkeypatch)


def on(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file seem to lie on a file system of this kind."""
    monkeypatch.setattr(memo, "kind_of", lambda path: kind)


def without_change_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let change times be what they are on a file system that does not keep them."""
    identity = CheckpointFile.identity

    def constant(file: CheckpointFile) -> FileIdentity:
        return replace(identity(file), ctime_ns=0)

    monkeypatch.setattr(CheckpointFile, "identity", constant)


@pytest.mark.parametrize("kind", sorted(memo.KERNEL_CTIME))
def test_file_systems_that_are_trusted(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    on(kind, monkeypatch)
    bench.settle()
    notes = bench.options["progress"] = Notes()
    bench.build()
    assert bench.build().read == 0
    assert not any("not trusted" in line for line in notes.lines)


@pytest.mark.parametrize("kind", ["nfs4", "overlay", "fuse.sshfs", None])
def test_file_systems_that_are_not(bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """Sources are read on each build, which says so once; a change without a trace in the file's times is seen."""
    on(kind, monkeypatch)
    without_change_times(monkeypatch)
    bench.settle()
    bench.build()
    notes = bench.options["progress"] = Notes()
    again = bench.build()
    assert (again.ran, again.read) == ([], again.stored)
    (line,) = [line for line in notes.lines if "not trusted" in line]
    assert str(bench.path("model")) in line
    assert f" {kind or 'unknown'}," in line
    bench.change_tensor(NORM)
    changed = bench.build()
    assert changed.ran == ["final_norm"]
    assert contents(changed.result) == bench.fresh(bench.root / "fresh")


def test_trust_stat(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It believes the times of any file system, for good and ill; ``--rehash`` believes nothing, and puts it right."""
    on("nfs4", monkeypatch)
    without_change_times(monkeypatch)
    bench.set("cache.trust_stat", "true")
    bench.settle()
    notes = bench.options["progress"] = Notes()
    bench.build()
    assert bench.build().read == 0
    assert not any("not trusted" in line for line in notes.lines)
    bench.change_tensor(NORM)
    assert bench.build().ran == []
    bench.options["rehash"] = True
    found = bench.build()
    assert (found.ran, found.read) == (["final_norm"], found.stored)
    del bench.options["rehash"]
    after = bench.build()
    assert (after.ran, after.read, after.written) == ([], 0, False)
    assert contents(after.result) == bench.fresh(bench.root / "fresh")


def test_a_change_without_a_trace_is_found_while_encoding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was remembered differs from what is read: the action fails, the memory goes, the next build is right."""
    without_change_times(monkeypatch)
    bench.settle()
    bench.build()
    bench.change_tensor(NORM)
    bench.options["rerun"] = True
    before = contents_of_folder(bench)
    with pytest.raises(SourceChangedError, match=r"text/final_norm: .* without a change of its file times.*again"):
        bench.build()
    assert contents_of_folder(bench) == before
    bench.options.clear()
    assert bench.build().ran == ["final_norm"]
    assert contents(bench.build().result) == bench.fresh(bench.root / "fresh")


def contents_of_folder(bench: Bench) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in bench.root.iterdir() if path.name.startswith(("t.", ".t."))}


# Young files


@pytest.mark.parametrize(("age", "remembered"), [(0, False), (SETTLED_NS - 1, False), (SETTLED_NS, True)])
def test_a_file_is_remembered_once_it_is_old(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, age: int, remembered: bool
) -> None:
    """The age counts from the later of modification and change, back from when the hashing began."""
    newest = os.stat(bench.path("model") / "model.safetensors").st_ctime_ns
    monkeypatch.setattr(Memo, "now_ns", staticmethod(lambda: newest + age))
    bench.build()
    again = bench.build()
    assert (again.ran, again.read) == ([], 0 if remembered else again.stored)


def test_two_seconds() -> None:
    """What the other tests shorten."""
    assert memo.SETTLED_NS == 2 * SECONDS


def test_a_file_from_the_future(bench: Bench) -> None:
    """Its times say nothing about when it was written."""
    path = bench.path("model") / "model.safetensors"
    ahead = time.time_ns() + 3600 * SECONDS
    os.utime(path, ns=(ahead, ahead))
    bench.settle()
    bench.build()
    again = bench.build()
    assert (again.ran, again.read) == ([], again.stored)


def test_a_young_file_becomes_old(bench: Bench) -> None:
    """The first build is too early to remember; the second hashes, and from then on nothing is read."""
    path = bench.path("model") / "model.safetensors"
    bench.monkeypatch.setattr(Memo, "now_ns", staticmethod(lambda: path.stat().st_ctime_ns))
    bench.build()
    bench.monkeypatch.setattr(Memo, "now_ns", staticmethod(time.time_ns))
    bench.settle()
    reads = [bench.build().read for _ in range(3)]
    assert reads[0] > 0
    assert reads[1:] == [0, 0]


# Changes while a build reads


def rewrite(path: Path) -> None:
    """Other bytes in the same file, with its size and modification time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(path: Path) -> None:
    """Another file of the same name."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def touch(path: Path) -> None:
    os.utime(path)


def when_read(bench: Bench, patch: pytest.MonkeyPatch, change: Callable[[Path], None], time_of_many: int) -> None:
    """Let ``change`` happen in the middle of one of several readings of the tensor of ``mlp/down``."""
    path = bench.path("model") / "model.safetensors"
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    begin, end = (header + offset for offset in json.loads(raw[8:header])[breakable.DOWN]["data_offsets"])
    read_into = CheckpointFile.read_into
    readings: list[int] = []

    def interrupted(file: CheckpointFile, offset: int, buffer: memoryview) -> None:
        read_into(file, offset, buffer)
        if offset == begin and len(buffer) == end - begin:  # not the samples of a probe
            readings.append(len(buffer))
            if len(readings) == time_of_many:
                change(path)

    patch.setattr(CheckpointFile, "read_into", interrupted)


CHANGES = [rewrite, replaced, truncate, touch]

BUILT_IN = """
def configure(model, recipe, sources):
    recipe.assign("text/layers/0/mlp/down", format="q6_g64_fp16", method="grouped_absmax")
"""

OWN = """
def method(request):
    rows, columns = request.target.shape
    return request.job(produce=lambda output: output.write_values(0, request.values(0, rows * columns)))


def configure(model, recipe, sources):
    recipe.assign("text/layers/0/mlp/down", method=method)
"""


def fails(bench: Bench) -> None:
    with pytest.raises((SourceChangedError, ValueError), match=r"changed while it was|file ends at byte"):
        bench.build()


def download_again(bench: Bench, change: Callable[[Path], None]) -> None:
    if change is truncate:
        breakable.save(bench.path("model"), breakable.load(breakable.write(bench.root / "again") / "model"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("recipe", "time_of_many"), [(BUILT_IN, 1), (OWN, 1), (OWN, 2)], ids=["built-in", "own, hashing", "own, producing"]
)
def test_a_source_modified_while_it_is_encoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], recipe: str, time_of_many: int
) -> None:
    """The action fails, and neither its result nor what it read is kept."""
    bench.write("recipe.py", recipe)
    bench.settle()
    with monkeypatch.context() as patch:
        when_read(bench, patch, change, time_of_many)
        bench.options["jobs"] = 1
        fails(bench)
    assert not bench.target().out.exists()
    assert list(bench.root.glob(".t.ninfer*")) == []
    download_again(bench, change)
    assert "mlp/down" in bench.build().ran
    assert contents(bench.build().result) == bench.fresh(bench.root / "fresh")


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_modified_while_it_is_hashed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """No digest of mixed bytes is remembered or used."""
    bench.settle()
    first = contents(bench.build().result)
    touch(bench.path("model") / "model.safetensors")
    with monkeypatch.context() as patch:
        when_read(bench, patch, change, 1)
        fails(bench)
    assert bench.target().out.read_bytes() == first["t.ninfer"]
    download_again(bench, change)
    bench.settle()
    bench.build()
    assert contents(bench.build().result) == bench.fresh(bench.root / "fresh")


def test_rehash_on_the_command_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Finished]
) -> None:
    """``build --rehash`` reads what a build without it does not."""
    bench.settle()
    bench.build()
    monkeypatch.chdir(bench.root)

    def read(*args: str) -> int:
        done = run("build", "--json", *args)
        assert done.code == 0, done
        found = json.loads(done.out)
        assert found["actions"]["executed"] == 0
        count: int = found["source_bytes_read"]
        return count

    assert read() == 0
    assert read("--rehash") > 0
    assert read() == 0


def test_a_build_of_a_target_without_a_memo_is_the_same(bench: Bench) -> None:
    """The memo saves reading and decides nothing."""
    bench.settle()
    first = contents(bench.build().result)
    result = build(bench.target(), rehash=True, rerun=True)
    assert contents(result) == first
