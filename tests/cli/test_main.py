"""The group of commands: help, errors as one line and an exit code, verbosity, JSON alone on standard output."""

from __future__ import annotations

import json
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

from ninferbuild.cli.run import COMMANDS, one_line
from ninferbuild.errors import CacheError, DiffersError, NinferbuildError, UsageError


def test_without_a_command(run: Any) -> None:
    ran = run()
    assert (ran.code, ran.out) == (2, "")
    assert "convert" in ran.err


def test_version(run: Any) -> None:
    import ninferbuild

    assert run("--version").out == f"ninferbuild {ninferbuild.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_has_examples(run: Any, command: str, flag: str) -> None:
    ran = run(command, flag)
    assert (ran.code, ran.err) == (0, "")
    assert f"  ninferbuild {command}" in ran.out.partition("Examples:")[2]


def test_unknown_command_and_option(run: Any) -> None:
    ran = run("biuld")
    assert ran.code == 2
    assert ran.err.splitlines()[-1] == "error: no such command 'biuld'; did you mean 'build'?"
    ran = run("build", "--devise", "cpu")
    assert ran.code == 2
    usage, error = ran.err.splitlines()
    assert usage.startswith("usage: ninferbuild build")
    assert error.startswith("error: ")
    assert "--device" in error
    assert run("convert", "--model", "m").code == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("layer 3: bad\n  shape"), 1, "layer 3: bad; shape"),
        (FileNotFoundError(2, "No such file or directory", "x.bin"), 1, "x.bin: No such file or directory"),
        (FileExistsError("out exists; give --overwrite"), 1, "out exists; give --overwrite"),
        (TypeError("must return request.job"), 1, "TypeError: must return request.job"),
        (KeyError("name"), 1, "KeyError: 'name'"),
        (MemoryError(), 1, "MemoryError"),
        (CacheError("cache is on NFS"), 1, "cache is on NFS"),
        (UsageError("no such target"), 2, "no such target"),
        (DiffersError("weight/000001 differs"), 3, "weight/000001 differs"),
        (KeyboardInterrupt(), 130, "interrupted; finished actions are kept"),
    ],
)
def test_errors(project: Path, run: Any, engine: Any, error: BaseException, code: int, line: str) -> None:
    def act(target: object) -> None:
        raise error

    engine.act = act
    run("build", "-q").failed(code, f"error: {line}\n")
    assert run("build").err.endswith(f"error: {line}\n")
    verbose = run("build", "-q", "-v")
    assert verbose.code == code
    assert verbose.err.splitlines()[-1] == f"error: {line}"
    assert verbose.err.startswith("Traceback") == (code != 130)


def test_one_line_of_two_paths() -> None:
    error = OSError(18, "Invalid cross-device link", "a", None, "b")
    assert one_line(error) == "a: b: Invalid cross-device link"
    assert one_line(NinferbuildError("")) == "NinferbuildError"


def test_json_is_alone_on_stdout(project: Path, run: Any, engine: Any) -> None:
    engine.act = lambda target: print("a recipe prints")
    ran = run("build", "a", "b", "--json")
    assert [json.loads(line) for line in ran.out.splitlines()] == [
        {"target": "a", "executed": 2},
        {"target": "b", "executed": 2},
    ]
    assert ran.err.count("a recipe prints\n") == 2
    assert run("build", "-q").out == "a recipe prints\n"


def test_a_reader_that_leaves_is_no_traceback(project: Path) -> None:
    # The pipe's read end is closed before anything is written.
    process = subprocess.Popen(
        [sys.executable, "-m", "ninferbuild", "list", "formats"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stderr.close()


def test_start_is_light(project: Path) -> None:
    """What every command needs imports nothing heavy."""
    code = (
        "import sys\n"
        "from ninferbuild.cli import main\n"
        "from ninferbuild.cli.run import COMMANDS, commands\n"
        "for name in COMMANDS: assert main([name, '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'networkx', 'lmdb', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_python_interface_has_the_functions() -> None:
    """``ninferbuild.build`` and ``ninferbuild.plan`` stay functions, though modules of these names get imported."""
    import importlib

    import ninferbuild

    modules = {name: importlib.import_module(f"ninferbuild.{name}") for name in ("build", "plan", "target")}
    assert ninferbuild.build is modules["build"].build
    assert ninferbuild.plan is modules["build"].plan
    assert ninferbuild.load_target is modules["target"].load_target
    assert ninferbuild.open_artifact.__self__ is importlib.import_module("ninferbuild.artifact.reader").Artifact
    assert set(ninferbuild.__all__) <= set(dir(ninferbuild))
    for name in ninferbuild.__all__:
        assert getattr(ninferbuild, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = ninferbuild.nothing
