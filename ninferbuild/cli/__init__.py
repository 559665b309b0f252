"""The command line: ``ninferbuild``, one module a command.

Command modules are imported when their command is called, and import what is heavy inside functions: a build with
nothing to do must not pay for what it does not use.
"""

from __future__ import annotations

import gc
import io
import os
import sys

from ninferbuild.ending import process_ends_at_once

TYPE_CHECKING = False  # as in the package: what is loaded before console() is not guarded against an interrupt
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line with ``args`` (``sys.argv`` if None); the exit code: 0 ok, 1 failed, 2 usage, 3 differs,
    130 interrupted, 143 terminated.
    """
    try:
        from ninferbuild.cli.run import run
    except KeyboardInterrupt:
        return _interrupted()
    return run(args)


def console() -> NoReturn:
    """The ``ninferbuild`` program: :func:`main` in a process of its own."""
    try:
        # A build makes very many objects that live as long as the process, and next to no cycles: looking for those
        # would take longer than planning does, and longer than importing torch.
        gc.disable()
        process_ends_at_once()
        _write_any_text()
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt:
        code = _interrupted()
    # Everything is closed and synced; taking torch apart module by module would only take time.
    os._exit(code)


def _write_any_text() -> None:
    """Let no character that the locale lacks, nor a file name that is not UTF-8, end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _interrupted() -> int:
    print("error: interrupted", file=sys.stderr, flush=True)
    return 130
