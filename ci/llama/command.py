"""Commands of ninferbuild, run in this process."""

from __future__ import annotations

import contextlib
import io

from ninferbuild import cli


def ninferbuild(*arguments: str) -> str | None:
    """Run a command; what it said if it failed, else None."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(arguments))
    return None if code == 0 else f"{arguments[0]}: exit code {code}: {(err.getvalue() or out.getvalue()).strip()}"
