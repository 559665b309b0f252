"""Progress of a build: what an executor reports, and the ways to show it.

All calls may come from any thread, but for :meth:`Progress.start` and :meth:`Progress.close`.
"""

from __future__ import annotations

from collections.abc import Sequence
import threading
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

from ninferbuild.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.progress import TaskID

State = Literal["cached", "run"]


class Progress(Protocol):
    """Receives what a build does, as it does it."""

    def start(self, actions: int, source_bytes: int) -> None:
        """Execution begins: ``actions`` encode actions in all, reading ``source_bytes`` if none is cached."""

    def note(self, message: str) -> None:
        """Something worth saying once, on one line: the device, a cache that healed itself."""

    def explanation(self, line: str) -> None:
        """A line of what was asked for, why actions run; shown also where notes are not."""

    def action(self, index: int, total: int, line: str, state: State) -> None:
        """Action ``index`` (from 1) of ``total`` begins, or is found in the cache. ``line``: :func:`action_line`."""

    def advance(self, source_bytes: int) -> None:
        """So many more bytes of source have been read, or need not be read."""

    def done(self, index: int, state: State) -> None:
        """Action ``index`` is finished."""

    def close(self) -> None:
        """Execution is over, whether it succeeded or not. May be called twice."""


def action_line(parameters: Sequence[str], format_name: str, shape: Sequence[int]) -> str:
    """``{first parameter}{ (+k)}: {format} {shape}``, ``k`` being how many more parameters the parent holds."""
    more = f" (+{len(parameters) - 1})" if len(parameters) > 1 else ""
    return f"{parameters[0]}{more}: {format_name} {tuple(shape)}"


class QuietProgress:
    """Shows nothing, but for explanations if there is a stream for them."""

    def __init__(self, explanations: TextIO | None = None):
        self._explanations = explanations

    def start(self, actions: int, source_bytes: int) -> None:
        return

    def note(self, message: str) -> None:
        return

    def explanation(self, line: str) -> None:
        if self._explanations is not None:
            print(printable_lines(line), file=self._explanations, flush=True)

    def action(self, index: int, total: int, line: str, state: State) -> None:
        return

    def advance(self, source_bytes: int) -> None:
        return

    def done(self, index: int, state: State) -> None:
        return

    def close(self) -> None:
        return


class PlainProgress(QuietProgress):
    """One line an action, flushed, for logs and pipes: ``[3/51] text/layers/0/mlp/gate (+1): q4_g64_fp16 (384, 128)``.

    A cached action's line ends with `` cached``. Notes go to ``notes``.
    """

    def __init__(self, stream: TextIO, notes: TextIO):
        self._stream = stream
        self._notes = notes
        self._lock = threading.Lock()

    def note(self, message: str) -> None:
        with self._lock:
            print(printable_lines(message), file=self._notes, flush=True)

    def explanation(self, line: str) -> None:
        self.note(line)

    def action(self, index: int, total: int, line: str, state: State) -> None:
        with self._lock:
            shown = f"[{index}/{total}] {printable(line)}{' cached' if state == 'cached' else ''}"
            print(shown, file=self._stream, flush=True)


class RichProgress:
    """A bar on a terminal: actions, bytes, GB/s, time left, and how many actions were cached and executed."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.fields[counts]}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
            transient=True,
        )
        self._lock = threading.Lock()
        self._task: TaskID | None = None
        self._total = 0
        self._finished: dict[State, int] = {"cached": 0, "run": 0}

    def start(self, actions: int, source_bytes: int) -> None:
        self._total = actions
        self._task = self._bar.add_task("", total=source_bytes, counts=self._counts())
        self._bar.start()

    def note(self, message: str) -> None:
        self._bar.console.print(printable_lines(message), markup=False, highlight=False)

    def explanation(self, line: str) -> None:
        self.note(line)

    def action(self, index: int, total: int, line: str, state: State) -> None:
        if self._task is not None and state == "run":
            self._bar.update(self._task, description=printable(line))

    def advance(self, source_bytes: int) -> None:
        if self._task is not None:
            self._bar.advance(self._task, source_bytes)

    def done(self, index: int, state: State) -> None:
        with self._lock:
            self._finished[state] += 1
            counts = self._counts()
        if self._task is not None:
            self._bar.update(self._task, counts=counts)

    def close(self) -> None:
        self._bar.stop()

    def _counts(self) -> str:
        cached, executed = self._finished["cached"], self._finished["run"]
        return f"{cached + executed}/{self._total} ({cached} cached, {executed} executed)"
