"""What a function does while it runs: the files it opens, and what makes a result impossible to keep."""

from __future__ import annotations

from collections.abc import Callable
import os
from pathlib import Path
import random
import subprocess
import sys
import tempfile
import textwrap
import threading

import numpy as np
import pytest
import torch

from ninferbuild import recipe_file
from ninferbuild.fingerprint import Recording, digest_dep, fingerprint, recording
from ninferbuild.opening import opening


@pytest.fixture(autouse=True)
def _purged() -> object:
    yield
    recipe_file.purge()


def recorded(function: Callable[[], object]) -> Recording:
    with recording() as found:
        function()
    return found


def names(found: Recording) -> list[str]:
    return [Path(path).name for path in found.paths]


def read_python(path: Path) -> None:
    with open(path) as file:
        file.read()


def read_descriptor(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.close(descriptor)


READERS: dict[str, Callable[[Path], object]] = {
    "open": read_python,
    "Path": Path.read_bytes,
    "os.open": read_descriptor,
    "io": lambda path: __import__("io").FileIO(path).close(),
    "np.load": lambda path: np.load(path.with_suffix(".npy")),
    "np.load mapped": lambda path: np.load(path.with_suffix(".npy"), mmap_mode="r"),
    "np.fromfile": lambda path: np.fromfile(path, np.uint8),
    "np.memmap": lambda path: np.memmap(path, np.uint8, "r"),
    "np.loadtxt": np.loadtxt,
    "torch.load": lambda path: torch.load(path.with_suffix(".pt"), weights_only=True),
    "torch.load mapped": lambda path: torch.load(path.with_suffix(".pt"), weights_only=True, mmap=True),
    "gzip": lambda path: __import__("gzip").open(path).close(),
    "read and write": lambda path: open(path, "r+").close(),
    "append and read": lambda path: open(path, "a+").close(),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("1 2\n")
    np.save(path.with_suffix(".npy"), np.arange(4))
    torch.save({"a": torch.ones(2)}, path.with_suffix(".pt"))
    return path


@pytest.mark.parametrize("reader", sorted(READERS))
def test_every_way_to_read_a_file_is_noticed(data: Path, reader: str) -> None:
    suffix = {"np.load": ".npy", "torch.load": ".pt"}.get(reader.removesuffix(" mapped"), ".txt")
    found = recorded(lambda: READERS[reader](data))
    assert str(data.with_suffix(suffix)) in found.paths
    assert found.reasons == ()


def test_files_that_are_only_written_are_not_read(tmp_path: Path) -> None:
    def write() -> None:
        (tmp_path / "out").write_bytes(b"1")
        with open(tmp_path / "log", "a") as file:
            file.write("x")
        os.close(os.open(tmp_path / "raw", os.O_WRONLY | os.O_CREAT))

    found = recorded(write)
    assert found.paths == ()
    assert found.reasons == ()


def test_a_file_that_is_missing_counts(tmp_path: Path) -> None:
    def attempt() -> None:
        with pytest.raises(FileNotFoundError):
            read_python(tmp_path / "absent")

    found = recorded(attempt)
    assert names(found) == ["absent"]
    before = digest_dep(found.paths[0])
    (tmp_path / "absent").write_bytes(b"")
    assert digest_dep(found.paths[0]) != before


def test_relative_paths_stay_relative(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = recorded(lambda: read_python(Path("data.txt")))
    assert found.paths == ("data.txt",)
    here = digest_dep("data.txt")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data.txt").write_text("other")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert digest_dep("data.txt") != here


def test_a_file_that_changes_during_the_run_is_a_reason(data: Path) -> None:
    def change() -> None:
        read_python(data)
        data.write_text("longer than before")

    assert "changed" in recorded(change).reasons[0].why


def test_other_threads_and_other_times_are_not_recorded(data: Path) -> None:
    started, stop = threading.Event(), threading.Event()

    def reader() -> None:
        while not stop.is_set():
            read_python(data)
            started.set()

    thread = threading.Thread(target=reader)
    thread.start()
    started.wait()
    found = recorded(lambda: [np.arange(100).sum() for _ in range(50)])
    stop.set()
    thread.join()
    read_python(data)
    assert found.paths == ()


def test_recordings_nest(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"")
    with recording() as outer:
        read_python(other)
        with recording() as inner:
            read_python(data)
    assert (names(outer), names(inner)) == (["other"], ["data.txt"])


def test_sources_that_are_accounted_for_are_not_noted(data: Path) -> None:
    known, unknown = object(), object()
    with recording(accounted=[known]) as found:
        with opening(known):
            read_python(data)
        with opening(unknown):
            data.with_suffix(".npy").read_bytes()
    assert names(found) == ["data.npy"]


def test_a_checkpoint_that_is_accounted_for(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from ninferbuild.sources.safetensors import SafetensorsSource, tensor_source

    path = tmp_path / "model.safetensors"
    save_file({"w": np.ones((2, 3), np.float32)}, path)
    for account in (True, False):
        with SafetensorsSource(path) as store:
            source = tensor_source(store, "w", (2, 3))
            description = source.description
            assert description is not None
            files = [span.file for part in description.parts for span in part.region.spans]
            for file in files:
                file.close()  # type: ignore[attr-defined]
            with recording(accounted=files if account else ()) as found:
                source.values()
        assert names(found) == ([] if account else ["model.safetensors"])


HAZARDS: dict[str, tuple[Callable[[], object], str]] = {
    "subprocess": (lambda: subprocess.run([sys.executable, "-c", ""], check=True), "processes"),
    "thread": (lambda: threading.Thread(target=int).start(), "threads"),
    "listing": (lambda: os.listdir("."), "file system"),
    "scandir": (lambda: list(os.scandir(".")), "file system"),
    "glob": (lambda: list(Path(".").glob("*")), "file system"),
    "socket": (lambda: __import__("socket").socket().close(), "network"),
    "random": (random.random, "random"),
    "numpy random": (lambda: np.random.rand(2), "random"),
    "torch random": (lambda: torch.randn(2), "random"),
    "dropout": (lambda: torch.nn.functional.dropout(torch.ones(9)), "random"),
    "in place": (lambda: torch.empty(3).normal_(), "random"),
    "pseudo file": (lambda: Path("/proc/self/status").read_bytes(), "this machine"),
    "entropy": (lambda: Path("/dev/urandom").open("rb").close(), "this machine"),
}


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="has no files below /dev")
def test_a_regular_file_in_shared_memory_is_a_file_like_any_other() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        found = recorded(lambda: read_python(Path(file.name)))
        assert (found.paths, found.reasons) == ((file.name,), ())


@pytest.mark.parametrize("case", sorted(HAZARDS))
def test_what_cannot_be_repeated_is_a_reason(case: str) -> None:
    act, why = HAZARDS[case]
    found = recorded(act)
    assert any(why in reason.why for reason in found.reasons), found.reasons


def test_seeded_generators_of_its_own_are_no_reason() -> None:
    def act() -> None:
        np.random.default_rng(0).random(3)
        torch.randn(3, generator=torch.Generator().manual_seed(0))
        random.Random(0).random()

    assert recorded(act).reasons == ()


def test_imports_are_not_data(tmp_path: Path) -> None:
    (tmp_path / "imported_late.py").write_text(
        "from pathlib import Path\nTEXT = Path(__file__).with_name('d').read_text()\n"
    )
    (tmp_path / "d").write_text("x")
    (tmp_path / "r.py").write_text(
        "import warnings, sys\n"
        "def configure(m, r, s):\n"
        "    import imported_late, fractions, xml.dom\n"
        "    warnings.warn('shown with its line')\n"
    )
    function = recipe_file.load("r.py", tmp_path).function
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.warns(UserWarning, match="its line"):
            found = recorded(lambda: function(None, None, None))
    finally:
        sys.path.remove(str(tmp_path))
    assert names(found) == ["d"]  # what the module reads is data, its text is code
    assert found.reasons == ()


def test_a_function_that_changes_what_it_depends_on_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        textwrap.dedent(
            """
            MEMO = {}
            def remembers(r, s, t): return MEMO.setdefault("a", 1)
            def forgets(r, s, t): return dict(MEMO).setdefault("a", 1)
            """
        )
    )
    for name, reasons in (("forgets", 0), ("remembers", 1)):
        function = recipe_file.load(f"r.py:{name}", tmp_path).function
        taken = fingerprint(function)
        assert taken.uncacheable == ()
        with recording([taken]) as found:
            function(None, None, None)
        assert len(found.reasons) == reasons
        assert all("MEMO" in reason.name for reason in found.reasons)


def test_compatibility_imports_work_while_recording() -> None:
    namespace: dict[str, object] = {}
    with recording():
        exec("from tools.artifact.formats import get_format", namespace)
    assert namespace["get_format"]


def test_digests_of_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    seen = [digest_dep(path)]
    for content in (b"", b"1", b"2", bytes(9 << 20), bytes((9 << 20) + 1)):
        path.write_bytes(content)
        seen.append(digest_dep(path))
        assert digest_dep(str(path)) == seen[-1]
    seen.append(digest_dep(tmp_path))
    assert len(set(seen)) == len(seen)
    assert {len(digest) for digest in seen} == {16}
    assert digest_dep("/dev/null") != digest_dep("/dev/null")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_never_unchanged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert digest_dep(tmp_path / "pipe") != digest_dep(tmp_path / "pipe")
