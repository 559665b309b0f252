"""Names from files of strangers are shown with their control characters escaped, wherever they are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from fixtures import fx
from fixtures.donor import write_donor
import pytest

from ninferbuild.artifact import inspect
from ninferbuild.printable import printable, printable_lines
from ninferbuild.progress import PlainProgress, RichProgress

RED = "\x1b[31m"
SHOWN = "\\x1b[31m"


def test_what_is_escaped() -> None:
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066, 0x2028):
        assert printable(f"a{chr(code)}b").isprintable()
    assert printable("\t\n\r\x7f\u2028") == "\\t\\n\\r\\x7f\\u2028"
    assert printable_lines(f"a\tb\n{RED}c") == f"a\tb\n{SHOWN}c"
    assert printable("text/layers/3 → größe 漢字 \\ é") == "text/layers/3 → größe 漢字 \\ é"


def test_progress() -> None:
    stream, notes = io.StringIO(), io.StringIO()
    plain = PlainProgress(stream, notes)
    plain.note(f"{RED}note")
    plain.action(1, 2, f"{RED}name\n", "run")
    assert notes.getvalue() == f"{SHOWN}note\n"
    assert stream.getvalue() == f"[1/2] {SHOWN}name\\n\n"
    stream = io.StringIO()
    rich = RichProgress(stream)
    rich.note(f"{RED}note")
    rich.close()
    assert stream.getvalue().rstrip() == f"{SHOWN}note"


def test_inspect_and_verify(tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "donor.ninfer"
    write_donor(path, name=f"{RED}artifact")
    ran = run("inspect", path)
    assert ran.out.splitlines()[3] == f"name: {SHOWN}artifact"
    assert json.loads(run("inspect", path, "--json").out)["name"] == f"{RED}artifact"
    assert inspect.main([str(path)]) == 0
    assert RED not in capsys.readouterr().out
    odd = tmp_path / f"{RED}\n.ninfer"
    path.rename(odd)
    for command in ("verify", "inspect"):
        ran = run(command, odd)
        assert f"{SHOWN}\\n.ninfer" in ran.out
        assert RED not in ran.out


def test_errors(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    fx.write_dense(tmp_path / "model")
    (tmp_path / "recipe.py").write_text(f"def configure(model, recipe, sources):\n    raise ValueError({RED!r})\n")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"short")
    for arguments in (("plan", "--model", tmp_path / "model", "--recipe", f"{tmp_path}/recipe.py"), ("list", RED)):
        for verbose in ((), ("-v",)):
            ran = run(*arguments, *verbose)
            assert ran.code != 0
            assert SHOWN in ran.err
            assert RED not in ran.err
