"""The command line: ``ninferbuild``, one module a command.

Command modules are imported when their command is called, and import what is heavy inside functions: a build with
nothing to do must not pay for what it does not use.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line with ``args`` (``sys.argv`` if None); the exit code: 0 ok, 1 failed, 2 usage, 3 differs,
    130 interrupted, 143 terminated.
    """
    from ninferbuild.cli.run import run

    return run(args)
