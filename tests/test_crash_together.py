"""Builds that meet other processes, and builds that are told to stop.

Processes that share a cache or an output never disturb each other's result. A build that is interrupted ends with one
line and leaves nothing beside the output; what was finished is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import shutil
import signal
import time

from fixtures import breakable
from fixtures.crash_bench import ACTIONS, Q6_ACTIONS, WAYS, Bench, Scene, scene
from fixtures.crash_points import Point
from fixtures.processes import PATIENCE, Child, Ended, serving
import numpy as np
import pytest

from ninferbuild.cache import Cache
from ninferbuild.errors import CacheError

RUN = "ninferbuild.execute:Executor.run"
LINK = "ninferbuild.link:_write_payload"
LEASE = "ninferbuild.cache.lease:Lease.add"
READ_BLOCK = "ninferbuild.cache.reading:View._read"
RENAME = "ninferbuild.publish:os.replace"

STOPPED = {
    # while it is: (stopped at, actions that are kept at least, what the entry's name is then)
    "reading": (Point("ninferbuild.sources.regions:RegionReader.read_into", call=9, settle=True), 1, "single"),
    "encoding": (Point("ninferbuild.rules.grouped_absmax:GroupedAbsmax.encode", settle=True), 0, "single"),
    "between two actions": (Point(RUN, call=6, settle=True), 5, "single"),
    "committing": (Point("ninferbuild.cache.writer:Writer._put_action"), 1, "single"),
    "linking": (Point(LINK), ACTIONS, "single"),
    "publishing": (Point(RENAME, call=4), ACTIONS, "split"),
    "recording the build": (Point("ninferbuild.cache.api:Cache.record_build"), ACTIONS, "split"),
}
"""Each by Ctrl-C and by the signal that asks programs to end."""

SIGNALS = {"interrupt": (130, "interrupted"), "terminate": (143, "terminated")}

PRUNED = {
    # as a build reaches this point: (the point, what prunes, actions that the build runs at most)
    "before it holds what it needs": (Point(LEASE), ("prune", "--max-size", "1"), ACTIONS),
    "when it has begun": (Point(RUN), ("prune", "--max-size", "1"), Q6_ACTIONS),
    "when it has made something": (Point(RUN, call=2, settle=True), ("prune", "--max-size", "1"), Q6_ACTIONS),
    "when it links": (Point(LINK), ("prune", "--max-size", "1"), Q6_ACTIONS),
    "when it has begun, everything": (Point(RUN), ("clear",), Q6_ACTIONS),
    "when it links, everything": (Point(LINK), ("clear",), Q6_ACTIONS),
}
"""Everything of ``single`` is cached when ``changed`` is built: two actions run, nine payloads come from the cache."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("together")
    with serving(directory) as processes:
        yield scene(directory / "scene", processes)


def pausing(point: Point, gate: Path) -> Point:
    return Point(point.at, "pause", point.call, point.after, point.about, point.settle, str(gate))


def reached(gate: Path, child: Child) -> None:
    """Wait until the process has come to its gate."""
    deadline = time.monotonic() + PATIENCE
    while not gate.exists():
        assert child.running(), child.wait()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_stopped(ended: Ended, code: int, word: str) -> None:
    assert ended.code == code, ended
    assert ended.out == ""
    assert ended.err.endswith(f"error: {word}; finished actions are kept\n")
    assert "Traceback" not in ended.err
    assert ended.err.count("error:") == 1


# Interrupts


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("row", STOPPED)
def test_stopped_while(made: Scene, tmp_path: Path, row: str, how: str) -> None:
    point, at_least, standing = STOPPED[row]
    bench = Bench(tmp_path / "bench", made)
    bench.put("single")
    ended = bench.build("split", points=[Point(point.at, how, point.call, settle=point.settle)])
    check_stopped(ended, *SIGNALS[how])
    assert bench.standing() == standing
    assert not [name for name in bench.files() if name.startswith(".")]
    kept = bench.kept()
    assert kept >= at_least
    bench.finish("split", executed=ACTIONS - kept)
    bench.check_cache()


@pytest.mark.parametrize("moment", range(6))
def test_interrupted_at_any_moment(made: Scene, tmp_path: Path, moment: int) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.put("single")
    child = bench.start_build("split", jobs=2)
    time.sleep(0.03 * moment)
    child.signal(signal.SIGINT)
    ended = child.wait()
    if ended.code != 0:  # it may have been done
        check_stopped(ended, 130, "interrupted")
    assert bench.standing() in ("single", "split")
    assert not [name for name in bench.files() if name.startswith(".")]
    bench.finish("split", executed=ACTIONS - bench.kept())
    bench.check_cache()


# Other builds


def test_builds_side_by_side_and_a_reader(made: Scene, tmp_path: Path) -> None:
    benches = {way: Bench(tmp_path / way, made, cache=tmp_path / "cache") for way in WAYS}
    children = {way: bench.start_build(way, jobs=2) for way, bench in benches.items()}
    served = 0
    while any(child.running() for child in children.values()) or not served:
        if (tmp_path / "cache" / "index" / "data.mdb").exists():
            served += read_everything(tmp_path / "cache")
    for way, child in children.items():
        assert child.wait().code == 0
        benches[way].check_finished(way)
    for way, bench in benches.items():
        bench.finish(way, executed=0)
    benches["single"].check_cache()


def read_everything(path: Path) -> int:
    """Read each payload of a cache that others are writing; how many there were. Every block is checked on the way."""
    served = 0
    try:
        cache = Cache.open(path, read_only=True)
    except CacheError:  # not made yet
        return 0
    with cache, cache.reading() as view:
        for entry in cache.ls():
            text = cache.manifest(entry.key)
            record = None if text is None else cache.find(entry.key, text)
            if record is not None:
                assert sum(len(block) for block in view.blocks(record)) == record.length
                served += 1
    return served


def test_two_builds_of_one_output(made: Scene, tmp_path: Path) -> None:
    """The one that publishes last stands, and nothing of the other is left."""
    first = Bench(tmp_path / "first", made, out=tmp_path / "out")
    second = Bench(tmp_path / "second", made, out=tmp_path / "out")
    for early, late in (("split", "single"), ("single", "split"), ("split", "fewer")):
        slow = first.start_build(late, points=[pausing(Point("ninferbuild.link:publish"), tmp_path / "gate")])
        reached(tmp_path / "gate", slow)
        before = second.standing()
        assert second.build(early).code == 0
        assert second.standing() == early
        (tmp_path / "gate").unlink()
        ended = slow.wait()
        assert ended.code == 0
        assert ("replaced an output that another process wrote meanwhile" in ended.err) == (before != early)
        first.check_finished(late)
    assert "meanwhile" not in first.build("single").err


def test_a_cache_that_is_removed_in_use(made: Scene, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "bench", made)
    slow = bench.start_build("single", points=[pausing(Point(RUN, call=3, settle=True), tmp_path / "gate")])
    reached(tmp_path / "gate", slow)
    shutil.rmtree(bench.cache)
    (tmp_path / "gate").unlink()
    ended = slow.wait()
    assert ended.code == 1
    assert f"{bench.cache}: the cache was removed while it was in use; build again" in ended.err
    assert bench.standing() == "absent"
    bench.finish("single", executed=ACTIONS)


def test_a_temporary_is_not_taken_for_a_leftover(made: Scene, tmp_path: Path) -> None:
    """Another build cleans up between the creation of a temporary and its locking."""
    bench = Bench(tmp_path / "bench", made)
    slow = bench.start_build(
        "split", points=[pausing(Point("ninferbuild.publish:platform_io.lock_exclusive"), tmp_path / "gate")]
    )
    reached(tmp_path / "gate", slow)
    assert bench.build("single").code == 0
    bench.check_finished("single")  # the other one's temporary is gone
    (tmp_path / "gate").unlink()
    assert slow.wait().code == 0
    bench.check_finished("split")


def test_jobs(made: Scene, tmp_path: Path) -> None:
    """-j is how many actions run at a time."""
    bench = Bench(tmp_path / "bench", made)
    gates = [tmp_path / f"gate-{number}" for number in range(4)]
    points = [pausing(Point(RUN, call=number + 1), gate) for number, gate in enumerate(gates)]
    child = bench.start_build("single", jobs=3, points=points)
    for gate in gates[:3]:
        reached(gate, child)
    assert not gates[3].exists()
    for gate in gates[:3]:
        gate.unlink()
    reached(gates[3], child)
    gates[3].unlink()
    assert child.wait().json["actions"]["executed"] == ACTIONS
    bench.check_finished("single")


# Pruning and readers


@pytest.mark.parametrize("row", PRUNED)
def test_pruned(made: Scene, tmp_path: Path, row: str) -> None:
    point, command, at_most = PRUNED[row]
    bench = Bench(tmp_path / "bench", made)
    bench.finish("single")
    build = bench.start_build("changed", points=[pausing(point, tmp_path / "gate")])
    reached(tmp_path / "gate", build)
    assert bench.run("cache", *command, "-f", "single.toml").code == 0
    (tmp_path / "gate").unlink()
    ended = build.wait()
    assert ended.json["actions"]["executed"] <= at_most
    assert ("damaged" in ended.err) == (at_most == ACTIONS)
    bench.check_finished("changed")
    bench.finish("single")
    bench.check_cache()


def test_a_killed_reader(made: Scene, tmp_path: Path) -> None:
    """It died while it looked at a payload: its place among the readers and its locks hold nothing back."""
    bench = Bench(tmp_path / "bench", made)
    bench.finish("single")
    reader = bench.start_build("split", points=[pausing(Point(READ_BLOCK, call=3, after=True), tmp_path / "gate")])
    reached(tmp_path / "gate", reader)
    reader.signal(signal.SIGKILL)
    assert reader.wait().code == -signal.SIGKILL
    (tmp_path / "gate").unlink()
    bench.finish("changed", executed=Q6_ACTIONS)
    pruned = bench.run("cache", "prune", "--max-size", "1", "--json", "-f", "single.toml").json
    assert pruned["obstacles"] == []
    assert pruned["live_bytes"] == 0
    bench.finish("split", executed=ACTIONS)
    bench.check_cache()


# Going on after failures

METHODS = """
def configure(model, recipe, sources):
    recipe.assign("text/final_norm", method=picky)
    recipe.assign("text/layers/0/input_norm", method=picky)

def picky(request):
    raise ValueError("it does not like " + request.inputs[0].parameter)
"""


@pytest.fixture
def spoiled(made: Scene, tmp_path: Path) -> Bench:
    """A bench with a checkpoint of its own, in which two matrices have a NaN."""
    breakable.write(tmp_path / "own")
    spoil = breakable.load(tmp_path / "own" / "model")
    for name in (breakable.DOWN, breakable.GATE):
        spoil[name][2][5] = np.uint16(0x7FC0)
    breakable.save(tmp_path / "own" / "model", spoil)
    return Bench(tmp_path / "bench", Scene(tmp_path / "own" / "model", made.processes, made.clean))


def test_keep_going(spoiled: Bench) -> None:
    stopped = spoiled.build("single")
    assert stopped.code == 1
    assert stopped.err.count("error:") == 1
    assert spoiled.kept() < ACTIONS - 2
    ended = spoiled.build("single", "--keep-going", jobs=2)
    assert ended.code == 1
    assert ended.out == ""
    *notes, first, second, last = ended.err.splitlines()
    assert not [line for line in notes if line.startswith("error")]
    failed = sorted([first, second])
    assert failed[0].startswith("error: text/layers/0/mlp/down [fp8_row_maxabs/")
    assert failed[1].startswith("error: text/layers/0/mlp/gate, text/layers/0/mlp/up [grouped_absmax/")
    assert last == "error: 2 actions failed, nothing is linked; finished actions are kept"
    assert spoiled.files() == {}
    assert spoiled.kept() == ACTIONS - 2
    shutil.rmtree(spoiled.scene.model.parent)
    breakable.write(spoiled.scene.model.parent)
    spoiled.finish("single", executed=2)


def test_keep_going_past_methods_that_refuse(made: Scene, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "bench", made)
    (bench.root / "picky.py").write_text(METHODS)
    for options, kept in ((), 0), (("-k",), ACTIONS - 2):
        ended = bench.build("single", "--set", 'overrides=["picky.py"]', *options)
        assert ended.code == 1
        assert "it does not like text/final_norm" in ended.err
        assert ("it does not like text/layers/0/input_norm" in ended.err) == bool(options)
        assert bench.files() == {}
        assert bench.kept() == kept
