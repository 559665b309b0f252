"""The results as text."""

from __future__ import annotations

from collections.abc import Callable

from benchmark.results import Results, Row

COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("scenario", lambda row: row.name),
    ("seconds", lambda row: f"{row.seconds:.2f}"),
    ("net s", lambda row: f"{row.net_seconds:.2f}"),
    ("encode s", lambda row: _number(row.stages.get("encode"), "{:.2f}")),
    ("link s", lambda row: _number(row.stages.get("link"), "{:.2f}")),
    ("GB/s", lambda row: _number(row.rate, "{:.3f}", 1e9)),
    ("× base", lambda row: _number(row.ratio, "{:.2f}")),
    ("net ×", lambda row: _number(row.net_ratio, "{:.2f}")),
    ("of floor", lambda row: _number(row.floor_fraction, "{:.0%}")),
    ("RSS MiB", lambda row: _number(row.peak_rss, "{:.0f}", 2**20)),
    ("anon +MiB", lambda row: _number(row.anonymous, "{:.0f}", 2**20)),
    ("GPU MiB", lambda row: _number(row.peak_gpu or None, "{:.0f}", 2**20)),
)
"""Heading and cell of each column; docs/performance.md says what they mean."""


def _number(value: float | None, pattern: str, unit: float = 1) -> str:
    return "–" if value is None else pattern.format(value / unit)


def render(results: Results) -> str:
    """The whole report."""
    void = results.void()
    lines = [f"VOID: {void}"] if void else []
    lines += [f"{name}: {value}" for name, value in results.machine.items() if value is not None]
    for name, rate in results.rates.items():
        each = ", ".join(f"{threads}: {found / 1e9:.2f}" for threads, found in rate.all.items())
        lines.append(f"{name}: {rate.bytes_per_second / 1e9:.2f} GB/s with {rate.threads} threads ({each})")
    start_up = results.start_up
    lines.append(
        f"start-up: a process that only initialises torch takes {start_up.seconds:.2f} s and "
        f"{start_up.anonymous / 2**20:.0f} MiB of anonymous memory"
    )
    cells = [[heading for heading, _ in COLUMNS]]
    cells += [[cell(row) for _, cell in COLUMNS] for row in results.rows()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines.append("")
    for line in cells:
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    lines.append("")
    lines += results.comparisons()
    lines += [f"note: {note}" for note in results.notes]
    if void:
        lines.append(f"VOID: {void}")
    return "\n".join(lines)
