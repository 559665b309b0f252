"""Machine code is kept by all that it is made from, and trusted only where nobody else can have written it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
import subprocess
import sys

import pytest

from ninferbuild.rules import machine_code

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")

TEXT = """
define i32 @"the.sum"(ptr %result, ptr %error, i32 %a, i32 %b) {
  %sum = add i32 %a, %b
  store i32 %sum, ptr %result
  %failed = icmp eq i32 %sum, 13
  %status = zext i1 %failed to i32
  ret i32 %status
}
"""
ARGUMENTS = (ctypes.c_int32, ctypes.c_int32)


class Compiler:
    """Counts how often it is asked."""

    def __init__(self, text: str = TEXT) -> None:
        self.text = text
        self.calls = 0

    def __call__(self) -> tuple[str, str]:
        self.calls += 1
        return "the.sum", self.text


def load(folder: Path, compiler: Compiler, *, name: str = "sum", made_from: bytes = b"text") -> machine_code.Loop:
    text = folder.parent / "text.py"
    text.write_bytes(made_from)
    return machine_code.load(folder, name, [text], compiler, ARGUMENTS)


def kept(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_compiled_once(tmp_path: Path) -> None:
    compiler = Compiler()
    for _ in range(3):
        assert load(tmp_path / "kept", compiler)(20, 22) == 42
    assert compiler.calls == 1


def test_results_are_unsigned_and_errors_are_raised(tmp_path: Path) -> None:
    loop = load(tmp_path / "kept", Compiler())
    assert loop(-1, 0) == 0xFFFFFFFF
    with pytest.raises(RuntimeError, match="compiled loop failed"):
        loop(6, 7)


def test_others_for_another_text_name_or_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite import binding

    compiler = Compiler()
    load(tmp_path / "kept", compiler)
    load(tmp_path / "kept", compiler, made_from=b"another text")
    load(tmp_path / "kept", compiler, name="another")
    monkeypatch.setattr(machine_code, "version", lambda name: "0")
    load(tmp_path / "kept", compiler)
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "generic")
    load(tmp_path / "kept", compiler)
    assert compiler.calls == len(list((tmp_path / "kept").iterdir())) == 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_code_is_made_again(tmp_path: Path, damage: str) -> None:
    compiler = Compiler()
    load(tmp_path / "kept", compiler)
    whole = kept(tmp_path / "kept").read_bytes()
    damaged = {"cut": whole[:-1], "flipped": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], "empty": b""}[damage]
    kept(tmp_path / "kept").write_bytes(damaged)
    assert load(tmp_path / "kept", compiler)(1, 2) == 3
    assert compiler.calls == 2
    assert kept(tmp_path / "kept").read_bytes() == whole


def test_code_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    compiler = Compiler()
    load(tmp_path / "kept", compiler)
    assert kept(tmp_path / "kept").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    kept(tmp_path / "kept").chmod(0o620)
    assert load(tmp_path / "kept", compiler)(1, 2) == 3
    assert compiler.calls == 2
    assert kept(tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_code_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    load(tmp_path / "kept", compiler)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    load(tmp_path / "kept", compiler)
    assert compiler.calls == 2


def test_loaded_without_a_place_for_it(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    compiler = Compiler()
    assert load(tmp_path / "kept", compiler)(1, 2) == 3
    assert compiler.calls == 1


@pytest.mark.parametrize("foreign", ["declare void @PyErr_Clear()", "@elsewhere = external global i32"])
def test_code_that_calls_elsewhere_is_refused(tmp_path: Path, foreign: str) -> None:
    """LLVM ends the process when it cannot find a symbol."""
    with pytest.raises(machine_code.ForeignSymbolsError, match=r"PyErr_Clear|elsewhere"):
        load(tmp_path / "kept", Compiler(TEXT + foreign))
    assert not (tmp_path / "kept").exists()


def test_kept_loops_need_no_compiler() -> None:
    """Numba is not imported where its results are kept, and serves all formats."""
    code = (
        "import sys; from ninferbuild.rules import compiled; work = compiled.Work.ENCODE; "
        "assert compiled.load_now(work); print('numba' in sys.modules)"
    )
    first, second = (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert second.stdout == "False\n"
