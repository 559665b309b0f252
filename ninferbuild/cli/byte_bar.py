"""A bar for commands that read or copy many bytes, shown if standard error is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import sys

from ninferbuild.cli.output import Output


@contextmanager
def byte_bar(output: Output) -> Iterator[Callable[[int, int], None] | None]:
    """What takes the bytes done so far and in all, and shows them; None if nothing is to be shown."""
    if output.quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)
