"""What a compiler keeps is used only as it was sealed."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from ninferbuild.rules.sealed_folder import SEAL, discard_unless_sealed, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    (made / "inner").mkdir(parents=True)
    (made / "inner" / "loop.nbc").write_bytes(b"machine code")
    (made / "loop.nbi").write_bytes(b"index")
    return made


def test_a_sealed_folder_stays(folder: Path) -> None:
    seal(folder)
    seal(folder)
    discard_unless_sealed(folder)
    assert (folder / "inner" / "loop.nbc").read_bytes() == b"machine code"
    assert sorted(path.name for path in folder.iterdir()) == ["inner", "loop.nbi", SEAL]


@pytest.mark.parametrize("change", ["flip", "empty", "add", "remove", "rename", "unsealed"])
def test_any_change_empties_it(folder: Path, change: str) -> None:
    if change != "unsealed":
        seal(folder)
    loop = folder / "inner" / "loop.nbc"
    if change == "flip":
        loop.write_bytes(b"machine c0de")
    elif change == "empty":
        loop.write_bytes(b"")
    elif change == "add":
        (folder / "other.nbc").write_bytes(b"")
    elif change == "remove":
        loop.unlink()
    elif change == "rename":
        loop.rename(folder / "loop.nbc")
    discard_unless_sealed(folder)
    assert not folder.exists()


def test_what_is_no_folder_goes_and_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    discard_unless_sealed(file)
    assert not file.exists()
    discard_unless_sealed(file)
    seal(file)
    assert not file.exists()


LOAD = """
from ninferbuild.rules import compiled
compiled.load(compiled.Work.SEARCH)
import threading
[thread.join() for thread in threading.enumerate() if thread is not threading.main_thread()]
from ninferbuild.artifact.formats import QUANT_FORMATS
print([compiled.ready(compiled.Work.SEARCH, QUANT_FORMATS[f"q{n}_g64_fp16"]) for n in (4, 5, 6)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="says where caches lie as Linux does")
def test_damaged_code_of_the_search_is_made_again(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    import platformdirs

    def load(**environment: str) -> str:
        settings = {**os.environ, **environment}
        return subprocess.run([sys.executable, "-c", LOAD], env=settings, text=True, capture_output=True).stdout

    ready = "[True, True, True]\n"
    assert load() == ready  # as other tests do: it is compiled once for all of them
    home = tmp_path / "ninferbuild"
    shutil.copytree(platformdirs.user_cache_dir("ninferbuild", appauthor=False), home)
    kept = {path: path.read_bytes() for path in home.rglob("*.nb*")}
    assert kept
    for path, data in kept.items():
        path.write_bytes(bytes(byte ^ (index % 97 == 0) for index, byte in enumerate(data)))
    assert load(XDG_CACHE_HOME=str(tmp_path)) == ready
    again = {path: path.stat().st_mtime_ns for path in home.rglob("*.nb*")}
    assert again
    assert load(XDG_CACHE_HOME=str(tmp_path)) == ready
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*.nb*")} == again
