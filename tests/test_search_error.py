"""``ci/search_error``: what it prints, and that it fails where the search gains too little."""

from __future__ import annotations

from pathlib import Path
import runpy
import sys

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "ci" / "search_error"


@pytest.mark.parametrize(("required", "code"), [(0.15, 0), (0.99, 1)])
def test_the_gain_of_searching(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: float, code: int
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = runpy.run_path(str(SCRIPT))
    script["REQUIRED"]["q4_g64_fp16"] = required
    assert script["main"]() == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["format", *script["FORMATS"]]
    assert ("TOO LITTLE" in lines[1]) == bool(code)
