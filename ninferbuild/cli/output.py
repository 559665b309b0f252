"""What a command prints, and where: text, JSON, progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
import json
import sys
from typing import Any, TextIO

from ninferbuild.printable import printable, printable_lines
from ninferbuild.progress import PlainProgress, Progress, QuietProgress, RichProgress


class Output:
    """Streams and verbosity of one run of the command line.

    Lines of text are printed with control characters escaped: names may come from files of strangers.

    With ``--json`` standard output holds JSON and nothing else: whatever else prints, a recipe for one, goes to
    standard error while :meth:`guarded` is in force.
    """

    def __init__(self) -> None:
        self.as_json = False
        self.quiet = False
        self.verbose = False
        self._stdout: TextIO | None = None

    @property
    def stdout(self) -> TextIO:
        return self._stdout or sys.stdout

    @contextmanager
    def guarded(self) -> Iterator[None]:
        self._stdout = sys.stdout
        try:
            if self.as_json:
                with redirect_stdout(sys.stderr):
                    yield
            else:
                yield
        finally:
            self._stdout = None

    def json_line(self, value: Any) -> None:
        """``value`` as JSON on one line."""
        print(self._json(value), file=self.stdout, flush=True)

    def json_document(self, value: Any) -> None:
        """``value`` as JSON with two-space indentation."""
        print(self._json(value, indent=2), file=self.stdout)

    def _json(self, value: Any, indent: int | None = None) -> str:
        """JSON in characters that standard output has; escapes of its own would not always be JSON."""
        text = json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            text.encode(self.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            return json.dumps(value, indent=indent)
        return text

    def document(self, text: str) -> None:
        """A document for other programs, as it is."""
        print(text, file=self.stdout)

    def text(self, line: str = "") -> None:
        """A line of the answer that was asked for, or several."""
        print(printable_lines(line), file=self.stdout)

    def report(self, line: str) -> None:
        """A line that says what was done; not with ``-q``, and on standard error beside JSON."""
        if not self.quiet:
            print(printable_lines(line), file=sys.stderr if self.as_json else self.stdout, flush=True)

    def note(self, line: str) -> None:
        """A line on standard error that is not an error; not with ``-q``."""
        if not self.quiet:
            print(printable_lines(line), file=sys.stderr, flush=True)

    def table(self, rows: Sequence[Sequence[object]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> None:
        """Aligned columns, two spaces apart; the columns ``right`` are right-aligned."""
        lines = [[printable(str(cell)) for cell in row] for row in ([header] if header else []) + list(rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (
                cell.rjust(width) if index in right else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            self.text("  ".join(cells).rstrip())

    def progress(self) -> Progress:
        """How a build is shown: a bar on a terminal, lines elsewhere, with ``-q`` what was asked for alone."""
        if self.quiet:
            return QuietProgress(explanations=sys.stderr)
        stream = sys.stderr if self.as_json else self.stdout
        return RichProgress(stream) if stream.isatty() else PlainProgress(stream, notes=sys.stderr)
