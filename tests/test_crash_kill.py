"""Builds that are killed.

Whatever the moment: the entry's name is a complete set or absent, what was finished stays finished, and the next build
ends like a clean one and leaves nothing but the set and its report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import errno
import itertools
import os
from pathlib import Path
import signal
from typing import Any

from fixtures.crash_bench import ACTIONS, ENTRY, FOUR_STORED, REPORT, SMALL_SEGMENTS, Bench, Scene, scene
from fixtures.crash_points import Point
from fixtures.processes import serving
import pytest

from ninferbuild.publish import StagedFile, journal_of, publish, recover
from ninferbuild.standing import surplus_of

READ = "ninferbuild.sources.regions:RegionReader.read_into"
ENCODE = "ninferbuild.rules.grouped_absmax:GroupedAbsmax.encode"
WRITE = "ninferbuild.publish:StagedFile.write"
BLOCKS = "ninferbuild.cache.segments:Segments.put"
RECORD = "ninferbuild.cache.writer:Writer._put_action"
SYNC_SEGMENT = "ninferbuild.cache.segments:filesystem.sync_directory"
RENAME = "ninferbuild.publish:os.replace"

MATRIX = {
    # while it is: (killed at, actions that are kept at least)
    "reading the first": (Point(READ, settle=True), 0),
    "reading one in the middle": (Point(READ, call=9, settle=True), 1),
    "between two actions": (Point("ninferbuild.execute:Executor.run", call=6, settle=True), 5),
    "encoding": (Point(ENCODE, after=True, settle=True), 0),
    "filling the output": (Point(WRITE, "tear", call=4, settle=True), 1),
    "committing blocks": (Point(BLOCKS), 0),
    "committing blocks, inside the transaction": (Point(BLOCKS, "kill_inside"), 0),
    "committing records, inside the transaction": (Point(RECORD, after=True), 0),
    "committing the last record": (Point(RECORD, call=ACTIONS), 0),
    "between blocks and record": (Point(BLOCKS, after=True), 0),
    "sealing a segment": (Point(SYNC_SEGMENT, call=3), 4),
    "linking the directory": (Point("ninferbuild.link:write_framing"), ACTIONS),
    "linking the payload": (Point("ninferbuild.link:_write_payload", after=True), ACTIONS),
    "writing the report": (Point(WRITE, "tear", about=REPORT), ACTIONS),
    "writing the journal": (Point(WRITE, "tear", about="journal"), ACTIONS),
    "between parts and entry": (Point(RENAME, call=6), ACTIONS),
    "between entry and report": (Point(RENAME, call=7), ACTIONS),
    "recording the build": (Point("ninferbuild.cache.api:Cache.record_build"), ACTIONS),
}
"""Every row builds the set of several files where the single file stands, with an empty cache of small segments."""

PUBLICATIONS = {
    "nothing by a single file": ("absent", "single"),
    "a single file by another": ("single", "changed"),
    "a single file by several": ("single", "split"),
    "several files by fewer": ("split", "fewer"),
    "several files by more": ("fewer", "split"),
    "several files by a single one": ("split", "changed"),
}
"""While one is replaced by the other, a process stops at every system call of the publication in turn."""

STOPS = ("killed", "refused by the disk", "interrupted")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("kill")
    with serving(directory) as processes:
        yield scene(directory / "scene", processes)


@pytest.mark.parametrize("row", MATRIX)
def test_killed_while(made: Scene, tmp_path, row: str) -> None:
    point, at_least = MATRIX[row]
    bench = Bench(tmp_path / "bench", made)
    bench.put("single")
    ended = bench.build("split", points=[SMALL_SEGMENTS, FOUR_STORED, point])
    assert ended.code == -signal.SIGKILL, ended
    expected = {
        "between parts and entry": "absent",
        "between entry and report": "split",
        "recording the build": "split",
    }
    assert bench.standing() == expected.get(row, "single")
    kept = bench.kept()
    assert at_least <= kept <= ACTIONS
    bench.finish("split", executed=ACTIONS - kept)
    bench.check_cache()


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("row", PUBLICATIONS)
def test_stopped_while_replacing(made: Scene, tmp_path: Path, row: str, stop: str) -> None:
    old, new = PUBLICATIONS[row]
    bench = Bench(tmp_path / "bench", made)
    entry = bench.out / ENTRY
    seen = set()
    for call in itertools.count():
        bench.put(old)
        code = publish_stopped(bench, new, call, stop)
        standing, begun = bench.standing(), journal_of(entry).exists()
        seen.add(standing)
        if stop != "killed" and not begun:  # a process that lives clears up behind itself
            assert not hidden(bench)
            assert standing in (old, new)
        recover(entry)
        assert bench.standing() == (new if begun else standing)
        assert not hidden(bench)
        publish_files(bench, new)
        assert bench.files() == {**made.clean[new], REPORT: b"new"}
        if code == 0:
            break
    assert call > 8
    assert {old, new} <= seen <= {old, new, "absent"}
    if {old, new} == {"single", "changed"}:
        assert "absent" not in seen


def hidden(bench: Bench) -> list[str]:
    return [name for name in bench.files() if name.startswith(".")]


def publish_stopped(bench: Bench, way: str, call: int, stop: str) -> int:
    """In a process of its own, publish ``way`` and stop before a system call; 0 if it was not reached."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            calls = itertools.count()

            def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*args: Any, **kwargs: Any) -> Any:
                    if next(calls) == call:
                        if stop == "refused by the disk":
                            raise OSError(errno.EIO, os.strerror(errno.EIO))
                        os.kill(os.getpid(), signal.SIGKILL if stop == "killed" else signal.SIGINT)
                    return original(*args, **kwargs)

                return counted

            def begin() -> None:
                for name in ("fsync", "replace", "unlink"):
                    setattr(os, name, stopping(getattr(os, name)))

            publish_files(bench, way, begin)
            os._exit(0 if next(calls) <= call else 1)  # a refused sync of the directory is no failure
        except (OSError, KeyboardInterrupt):
            os._exit(1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1, -signal.SIGKILL)
    return code


def publish_files(bench: Bench, way: str, begin: Callable[[], None] = lambda: None) -> None:
    """Publish the clean files of ``way`` as linking does; ``begin`` is called when the temporaries are written."""
    files = bench.scene.clean[way]
    staged = [StagedFile(bench.out / name) for name in sorted(files)]
    report = StagedFile(bench.out / REPORT)
    try:
        for file in staged:
            file.write(0, files[file.target.name])
        report.write(0, b"new")
        begin()
        publish(staged, report, lambda: surplus_of([file.target for file in staged], overwrite=True))
    finally:
        for file in (*staged, report):
            file.discard()
