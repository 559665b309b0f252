"""Disks that fill up, files that lose their tail, and bits that flip.

Nothing corrupt is ever served: a build ends like a clean one, or fails with one line and leaves what was there. The
next build, with the disk in order again, ends like a clean one and makes only what was not finished.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path

from fixtures.breakable import tmpfs
from fixtures.crash_bench import ACTIONS, ENTRY, FOUR_STORED, Q6_ACTIONS, REPORT, SMALL_SEGMENTS, Bench, Scene, scene
from fixtures.crash_points import Point, fill_disk, flip_bits
from fixtures.processes import Ended, serving
import pytest

from ninferbuild.cache.filesystem import free_bytes

RUN = "ninferbuild.execute:Executor.run"
RECORD_BUILD = "ninferbuild.cache.api:Cache.record_build"
LINK = "ninferbuild.link:_write_payload"
LEASE = "ninferbuild.cache.lease:Lease.add"
WRITE = "ninferbuild.publish:StagedFile.write"

FULL_CACHE = {
    # as the disk of the cache fills up: (point, actions that are kept)
    "before the first action": (Point(RUN), 0),
    "after five actions": (Point(RUN, call=6, settle=True), 5),
    "between blocks and record": (Point("ninferbuild.cache.segments:Segments.put", after=True), 0),
    "when payloads are linked": (Point(LINK), ACTIONS),
    "when the build is recorded": (Point(RECORD_BUILD), ACTIONS),
}
"""The build fails unless all actions are kept by then."""

FULL_OUTPUT = {
    # as the disk of the output fills up: (point, actions that are kept)
    "before the first action": (Point(RUN), 0),
    "after two actions": (Point(RUN, call=3, settle=True), 2),
    "when the directory is linked": (Point("ninferbuild.link:write_framing"), ACTIONS),
    "when payloads are linked": (Point(LINK), ACTIONS),
    "when the report is written": (Point(WRITE, about=REPORT), ACTIONS),
    "when the journal is written": (Point(WRITE, about="journal"), ACTIONS),
}

TRUNCATED = {
    # what lost its tail between two builds: (file, how much of it is left)
    "the index": ("cache/index/data.mdb", 0.5),
    "the index, a page of it": ("cache/index/data.mdb", 0.999),
    "the index, all of it": ("cache/index/data.mdb", 0.0),
    "a segment": ("cache/segments/0001/data.mdb", 0.5),
    "a segment, all of it": ("cache/segments/0001/data.mdb", 0.0),
    "the entry": (f"out/{ENTRY}", 0.5),
    "the entry, all of it": (f"out/{ENTRY}", 0.0),
    "the entry, but for its first bytes": (f"out/{ENTRY}", 0.0005),
    "a part": (f"out/{ENTRY}.part-0002", 0.5),
    "the report": (f"out/{REPORT}", 0.5),
}


FLIPPED = {
    # bits: (what, how many, in the middle of the build at this point; None: before it)
    "in one block": ("blocks", 1, None),
    "in every block": ("blocks", 99, None),
    "in one block, while linking": ("blocks", 1, LINK),
    "in every block, while linking": ("blocks", 99, LINK),
    "in every block, while others are encoded": ("blocks", 99, RUN),
    "in segments": ("segments", 30, None),
    "in segments, while linking": ("segments", 30, LINK),
    "in segments, while others are encoded": ("segments", 30, RUN),
    "in the index": ("index", 30, None),
    "in the index, when it has been looked at": ("index", 30, LEASE),
    "in the index, while others are encoded": ("index", 30, RUN),
    "in the index, while linking": ("index", 30, LINK),
}
"""Everything of ``single`` is cached when ``changed`` is built: two actions run, nine payloads are linked from the
cache. Bits anywhere are tried with several seeds; they meet records, B-tree pages and free pages."""

SEEDS = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("disk")
    with serving(directory) as processes:
        yield scene(directory / "scene", processes)


def filling(point: Point, disk: Path) -> Point:
    return Point(point.at, "fill", point.call, point.after, point.about, point.settle, str(disk))


def check_failed(ended: Ended, *parts: str) -> None:
    """It failed with one line that says ``parts``."""
    assert ended.code == 1, ended
    assert ended.out == ""
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error:")]
    assert ended.err.endswith(line + "\n")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("row", FULL_CACHE)
def test_full_cache(made: Scene, tmp_path: Path, row: str) -> None:
    point, kept = FULL_CACHE[row]
    with tmpfs(tmp_path / "disk", "size=24m") as disk:
        bench = Bench(tmp_path / "bench", made, cache=disk / "cache")
        bench.put("single")
        ended = bench.build("split", points=[filling(point, disk)])
        if kept == ACTIONS:
            assert ended.code == 0, ended
            bench.check_finished("split")
            bench.finish("split", executed=0)  # on the full disk still
        else:
            check_failed(ended, "no space left for the cache", "prune")
            assert bench.standing() == "single"
            assert sorted(bench.files()) == [ENTRY, REPORT]
        (disk / "filler").unlink()
        bench.finish("split", executed=ACTIONS - kept)
        bench.check_cache()


def test_full_cache_of_which_everything_is_used(made: Scene, tmp_path: Path) -> None:
    """Payloads that are cached can be linked, and need no room."""
    with tmpfs(tmp_path / "disk", "size=24m") as disk:
        bench = Bench(tmp_path / "bench", made, cache=disk / "cache")
        bench.finish("single")
        fill_disk(disk / "filler")
        bench.finish("split", executed=0)
        forgotten = bench.build("split", "--no-link", "--rehash", points=[Point(RECORD_BUILD, "no_space")])
        assert forgotten.code == 0
        assert "done but not remembered: no space left for the cache" in forgotten.err
        check_failed(bench.build("changed"), "bytes are needed to cache and 0 are free", "make room")
        assert bench.standing() == "split"
        assert bench.run("cache", "prune", "--max-size", "1", "-f", "single.toml").code == 0
        assert free_bytes(disk) > 200_000
        (disk / "filler").unlink()
        bench.finish("single", executed=ACTIONS)


def test_new_cache_on_a_full_disk(made: Scene, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=24m") as disk:
        bench = Bench(tmp_path / "bench", made, cache=disk / "cache")
        bench.put("single")
        fill_disk(disk / "filler")
        check_failed(bench.build("split"), str(disk / "cache"))
        assert bench.standing() == "single"
        (disk / "filler").unlink()
        bench.finish("split", executed=ACTIONS)


@pytest.mark.parametrize("row", FULL_OUTPUT)
def test_full_output(made: Scene, tmp_path: Path, row: str) -> None:
    point, kept = FULL_OUTPUT[row]
    with tmpfs(tmp_path / "disk", "size=24m") as disk:
        bench = Bench(tmp_path / "bench", made, out=disk / "out")
        bench.put("single")
        ended = bench.build("split", points=[filling(point, disk)])
        check_failed(ended, str(disk / "out"), "No space left on device")
        assert bench.standing() == "single"
        assert sorted(bench.files()) == [ENTRY, REPORT]
        check_failed(bench.build("split"), str(disk / "out"), "make room")  # refused before encoding
        (disk / "filler").unlink()
        bench.finish("split", executed=ACTIONS - kept)


@pytest.mark.parametrize("row", TRUNCATED)
def test_truncated(made: Scene, tmp_path: Path, row: str) -> None:
    name, left = TRUNCATED[row]
    bench = Bench(tmp_path / "bench", made)
    bench.finish("split", points=[SMALL_SEGMENTS, FOUR_STORED])
    path = bench.root / name
    os.truncate(path, int(path.stat().st_size * left))
    if name.startswith("out"):
        bench.finish("split", executed=0)
    else:
        ended = bench.finish("split")
        executed = ended.json["actions"]["executed"]
        if "segment" in row:
            assert ("cache segment 0001 was damaged" in ended.err) == (left > 0)
            assert 0 < executed < ACTIONS
        bench.check_cache()
        bench.finish("single", executed=0)


@pytest.mark.parametrize(
    ("row", "seed"),
    [(row, seed) for row, (what, _, _) in FLIPPED.items() for seed in range(1 if what == "blocks" else SEEDS)],
)
def test_flipped(made: Scene, tmp_path: Path, row: str, seed: int) -> None:
    what, count, at = FLIPPED[row]
    bench = Bench(tmp_path / "bench", made)
    bench.finish("single", points=[SMALL_SEGMENTS, FOUR_STORED])
    flips = {"cache": str(bench.cache), "what": what, "seed": seed, "count": count}
    if at is None:
        flip_bits(**flips)
    ended = bench.build("changed", points=[] if at is None else [Point(at, "flip", arg=flips)])
    if ended.code == 0:
        bench.check_finished("changed")
    else:  # the engine died of pages that changed under it
        assert at is not None
        assert what != "blocks"
        assert bench.standing() in ("single", "changed")
    if what == "blocks" and count > 1:
        assert ended.err.count("is damaged") >= 1
        if at is None:  # that build has used every action but two, and healed what it used
            verified = bench.run("cache", "verify", "-f", "single.toml")
            assert (verified.out + verified.err).count("misses a part") == Q6_ACTIONS
        bench.finish("changed")  # whatever it met, the next build needs no help
    bench.finish("single")
    bench.run("cache", "verify", "--repair", "-f", "single.toml")  # what nobody has met yet
    bench.finish("split")
    bench.check_cache()
