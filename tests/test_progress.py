"""Progress on a terminal and in a log."""

from __future__ import annotations

import io
from typing import Any

from ninferbuild.progress import PlainProgress, Progress, QuietProgress, RichProgress, action_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drive(progress: Progress) -> None:
    progress.start(3, 4000)
    progress.note("encoding on [cpu]")
    progress.action(1, 3, "a [b]: bf16 (4,)", "run")
    progress.advance(1000)
    progress.done(1, "run")
    progress.action(2, 3, "c: bf16 (4,)", "cached")
    progress.done(2, "cached")
    progress.action(3, 3, "d: bf16 (4,)", "run")
    progress.advance(3000)
    progress.done(3, "run")
    progress.close()
    progress.close()


def test_line_of_an_action() -> None:
    line = action_line(["text/layers/3/attention/query", "text/layers/3/attention/key"], "q4_g64_fp16", [192, 128])
    assert line == "text/layers/3/attention/query (+1): q4_g64_fp16 (192, 128)"
    assert action_line(["text/norm"], "bf16", (128,)) == "text/norm: bf16 (128,)"


def test_plain() -> None:
    stream, notes = io.StringIO(), io.StringIO()
    drive(PlainProgress(stream, notes))
    assert stream.getvalue() == "[1/3] a [b]: bf16 (4,)\n[2/3] c: bf16 (4,) cached\n[3/3] d: bf16 (4,)\n"
    assert notes.getvalue() == "encoding on [cpu]\n"
    PlainProgress(stream, notes).explanation("first build")
    assert notes.getvalue().endswith("\nfirst build\n")


def test_quiet(capfd: Any) -> None:
    drive(QuietProgress())
    QuietProgress().explanation("nobody asked")
    assert capfd.readouterr() == ("", "")
    stream = io.StringIO()
    drive(quiet := QuietProgress(explanations=stream))
    quiet.explanation("source bytes \x1bchanged")
    assert stream.getvalue() == "source bytes \\x1bchanged\n"


def test_terminal(monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    drive(RichProgress(stream))
    shown = stream.getvalue()
    assert "3/3 (1 cached, 2 executed)" in shown
    assert "encoding on [cpu]" in shown  # not taken for markup


def test_close_without_start() -> None:
    RichProgress(Terminal()).close()
