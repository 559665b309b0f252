"""Every row of the table in ``docs/caching.md``: what a change makes run again, write and read.

Each row has a scenario of the same text in ``fixtures/changes``. After the change a build has to run exactly the
actions that the row says, give the bytes of a build without history, and leave nothing for a second build to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
import sys

from fixtures.changes import checkpoints, functions, outputs, recipes, surroundings
from fixtures.changes.bench import METHODS, READ, READER_BYTES, SCENARIOS, Bench, Built, contents
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "caching.md"
HEADER = ("change", "runs again", "output written", "sources read")
MODULES = (recipes, functions, checkpoints, surroundings, outputs)

THAT = ("that action", "those actions", "that action, each time")
RUNS = ("nothing", "everything", "your methods", "your functions", *THAT)
WRITTEN = ("no", "yes", "if bytes differ")
READS = ("nothing", "what runs", "everything", "its values")


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    change: str
    runs: str
    written: str
    reads: str


def rows_of(page: Path) -> list[Row]:
    """The rows of all tables with the four columns."""
    found, inside = [], False
    for line in page.read_text().splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|")) if line.startswith("|") else ()
        if not cells:
            inside = False
        elif cells == HEADER:
            inside = True
        elif inside and set("".join(cells)) - set("-: "):
            assert len(cells) == len(HEADER), line
            found.append(Row(*cells))
    return found


ROWS = rows_of(PAGE)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The target, in a process that would use bytecode caches."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return Bench(tmp_path / "bench", monkeypatch)


def test_table_and_scenarios_are_the_same() -> None:
    changes = [row.change for row in ROWS]
    assert len(changes) == len(set(changes))
    assert sorted(changes) == sorted(SCENARIOS)
    assert {scenario.__module__ for scenario in SCENARIOS.values()} == {module.__name__ for module in MODULES}
    assert len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.change)
def test_row(row: Row, bench: Bench) -> None:
    scenario = SCENARIOS[row.change](bench)
    next(scenario)
    bench.settle()
    first = bench.build()
    assert first.ran == first.every
    assert len(first.every) >= 11
    before = contents(first.result)
    meant = next(scenario)
    built = bench.build()

    assert built.ran == expected_runs(row, built, meant)
    after = contents(built.result)
    assert after == bench.fresh(bench.root / "fresh")
    assert expected_written(row, changed=after != before) is built.written
    assert_read(row, built)
    bench.options.clear()
    again = bench.build()
    assert again.ran == (built.ran if row.runs == "that action, each time" else [])
    assert not again.written
    assert next(scenario, None) is None


def expected_runs(row: Row, built: Built, meant: list[str] | None) -> list[str]:
    assert row.runs in RUNS, row
    assert (meant is not None) is (row.runs in THAT), row
    if meant is not None:
        assert 0 < len(meant) < len(built.every)
        assert (len(meant) == 1) is row.runs.startswith("that"), row
        return sorted(meant)
    return {
        "nothing": [],
        "everything": built.every,
        "your methods": METHODS,
        "your functions": sorted([*METHODS, *READ]),
    }[row.runs]


def expected_written(row: Row, *, changed: bool) -> bool:
    assert row.written in WRITTEN, row
    return changed if row.written == "if bytes differ" else row.written == "yes"


def assert_read(row: Row, built: Built) -> None:
    """A stored byte is read once, and a second time only by a method of yours that runs."""
    assert row.reads in READS, row
    again = built.consumed + READER_BYTES
    match row.reads:
        case "nothing":
            assert built.read == 0
        case "what runs":
            assert built.ran
            assert built.consumed <= built.read <= built.consumed + again
        case "everything":
            assert built.stored <= built.read <= built.stored + again
        case "its values":
            assert 0 < built.read <= READER_BYTES
