"""The command line and its surroundings: an interrupt at the start, streams that take no text, a directory gone."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

import pytest


def ran(*args: str, code: str = "", stdout: Any = subprocess.PIPE, **environment: str) -> tuple[int, bytes, bytes]:
    program = f"import sys\nfrom ninferbuild.cli import console\n{code}\nconsole()\n"
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, env=os.environ | environment, stdout=stdout, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stdout, done.stderr


INTERRUPT_AN_IMPORT = """
import os, signal
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


@pytest.mark.parametrize(
    "module", ["ninferbuild.cli.run", "click", "ninferbuild.target_schema", "ninferbuild.cli.list_"]
)
def test_an_interrupt_while_modules_are_imported(module: str) -> None:
    """``ninferbuild.cli.list_`` is imported when the command is known; the others before."""
    code, out, err = ran("list", "recipes", code=INTERRUPT_AN_IMPORT.format(module=module))
    assert (code, out) == (128 + signal.SIGINT, b"")
    assert err.count(b"\n") == 1
    assert err.startswith(b"error: interrupted")


def test_an_interrupt_while_a_class_is_made(project: Path, run: Any, engine: Any) -> None:
    """Python 3.11 raises RuntimeError from what ``__set_name__`` raised."""

    def act(target: object) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    engine.act = act
    run("build", "-q").failed(130, "error: interrupted; finished actions are kept\n")


def test_little_is_loaded_before_interrupts_are_caught() -> None:
    code = "import sys; before = set(sys.modules); import ninferbuild.cli; print(*sorted(sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if not name.startswith("ninferbuild")}
    assert loaded <= {"gc", "importlib", "importlib._bootstrap", "importlib._bootstrap_external", "types", "warnings"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [("list", "recipes"), ("list", "recipes", "--json"), ("--version",), ("list", "-h")])
def test_standard_output_that_is_full(args: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = ran(*args, stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (code, err) == (1, b"error: cannot write to standard output: No space left on device\n")


ASCII = {"PYTHONIOENCODING": "ascii"}


def test_text_that_the_locale_lacks(project: Path) -> None:
    (project / "ninferbuild.toml").write_text('[targets.a]\nmodel = "model"\nrecipe = "r"\nout = "→.ninfer"\n')
    code, out, err = ran("list", "targets", **ASCII)
    assert (code, err) == (0, b"")
    assert rb"\u2192.ninfer" in out
    code, out, err = ran("list", "targets", "--json", **ASCII)
    assert (code, err) == (0, b"")
    assert rb'\u2192.ninfer"' in out


def test_json_that_the_locale_lacks_is_json(project: Path) -> None:
    """``\\xe4``, which is how Python escapes it, would not be JSON."""
    import json

    (project / "ninferbuild.toml").write_text('[targets.a]\nmodel = "ä"\nrecipe = "r"\n')
    code, out, _ = ran("list", "targets", "--json", **ASCII)
    assert code == 0
    assert json.loads(out)[0]["model"].endswith("/ä")


def test_a_file_name_that_is_not_utf8_in_a_message() -> None:
    code, _, err = ran("inspect", "\udcff.ninfer")
    assert (code, err) == (1, b"error: \\udcff.ninfer: No such file or directory\n")


def test_a_path_that_the_locale_lacks(project: Path) -> None:
    (project / "ninferbuild.toml").write_text('[targets.a]\nmodel = "ä"\nrecipe = "r"\n')
    ascii_names = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code, _, err = ran("plan", "a", **ascii_names)
    assert code == 2
    assert b"targets.a.model: '\\xe4' cannot be a file name in the locale's encoding, ascii" in err


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run("list", "targets").failed(1, "the working directory does not exist any more")


@pytest.mark.parametrize("name", ["none.ninfer", "dist/none"])
def test_diff_of_a_file_that_is_not_there(project: Path, run: Any, name: str) -> None:
    run("diff", name, "x").failed(2, f"{name}: no such file or directory")
