"""Processes that die, processes that meet, and disks that are full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import time

import pytest

from ninferbuild.cache import Cache, Limits, filesystem
from ninferbuild.errors import CacheError

SIZE = 60_000

_COMMON = """
import os, random, signal, sys, time
from pathlib import Path
import xxhash
from ninferbuild.cache import ActionRecord, Cache, Limits
from ninferbuild.digest import block_digest, combine
SIZE = 60_000
LIMITS = Limits(segment_bytes=1_500_000, transaction_bytes=200_000)

def blocks(number):
    source = random.Random(number)
    return [source.randbytes(SIZE), source.randbytes(200)]

def record(number):
    made = blocks(number)
    digests = [block_digest(block) for block in made]
    manifest = f"manifest {number}"
    return ActionRecord(xxhash.xxh3_128_digest(manifest.encode()), manifest, "encode", "m", "f",
        tuple(zip(digests, map(len, made))), sum(map(len, made)), combine(digests))

def store(writer, number):
    for block in blocks(number):
        writer.block(block)
    writer.action(record(number), b"")
"""

_BUILD = (
    _COMMON
    + """
first, last = int(sys.argv[2]), int(sys.argv[3])
with Cache.open(Path(sys.argv[1]), limits=LIMITS) as cache, cache.lease("t"), cache.writer() as writer:
    for number in range(first, last):
        store(writer, number)
        if number % 4 == 0:
            writer.flush()
            print(number, flush=True)
print("done", flush=True)
"""
)


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def check(root: Path, actions, numbers) -> tuple[list[int], Cache]:
    """Numbers found in a healthy cache; fails when anything wrong is served."""
    cache = Cache.open(root, limits=Limits(segment_bytes=1_500_000, transaction_bytes=200_000))
    found = []
    for number in numbers:
        record = actions.record(f"manifest {number}", actions.blocks(number, [SIZE, 200]), method="m", format="f")
        hit = cache.find(record.key, record.manifest)
        if hit is not None:
            assert actions.payload(cache, hit) == actions.expected(number, [SIZE, 200])
            found.append(number)
    return found, cache


@pytest.mark.parametrize("seed", range(5))
def test_a_build_killed_at_any_moment_loses_only_what_was_in_flight(tmp_path, actions, seed):
    process = run(_BUILD, tmp_path / "c", 0, 10_000)
    with process:
        for _ in range(3 + seed * 3):
            flushed = int(process.stdout.readline())
        time.sleep(random.Random(seed).random() * 0.05)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    flushed = max([flushed, *(int(line) for line in rest if line.isdigit())])
    found, cache = check(tmp_path / "c", actions, range(flushed + 40))
    with cache:
        assert cache.notices == []
        assert set(range(flushed + 1)) <= set(found)
        assert cache.verify().problems == ()
        assert cache.stats().actions == len(found)
    with Cache.open(tmp_path / "c") as cache:  # the run after the crash has swept
        assert cache.stats().garbage_bytes == 0
        assert len(list((tmp_path / "c/sessions").iterdir())) == 1


_DIE_BETWEEN = (
    _COMMON
    + """
import ninferbuild.cache.MODULE as module
original = module.NAME
calls = 0
def die(*args, **kwargs):
    global calls
    calls += 1
    if calls == CALL:
        if AFTER:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
module.NAME = die
with Cache.open(Path(sys.argv[1]), limits=LIMITS) as cache, cache.lease("t"):
    with cache.writer() as writer:
        for number in range(60):
            store(writer, number)
            if number % 6 == 5:
                writer.flush()
"""
)


@pytest.mark.parametrize(
    ("module", "name", "call", "after", "then"),
    [
        ("segments", "Segments.put", 4, False, ""),  # before blocks
        ("segments", "Segments.put", 4, True, ""),  # between blocks and record
        ("segments", "filesystem.sync_directory", 3, False, ""),  # creating the second segment
        ("writer", "Writer._put_action", 20, True, ""),  # inside the record's transaction
        ("pruning", "reclaim", 1, False, "cache.prune(max_size=900_000)"),  # rows gone, space not
        ("segments", "Segments.punch", 1, True, "cache.prune(max_size=900_000)"),
        ("segments", "shutil.rmtree", 1, False, "cache.prune(max_size=900_000)"),  # a segment half removed
        ("reclaim", "_move", 2, True, "cache.remove(record(3).key); cache.compact()"),
        ("compaction", "shutil.rmtree", 1, False, "cache.clear()"),
        ("compaction", "filesystem.sync_directory", 1, False, "cache.compact()"),
        ("store", "stamp", 1, False, ""),
        ("store", "stamp", 2, True, ""),
    ],
)
def test_killed_at_a_named_point(tmp_path, actions, module, name, call, after, then):
    code = _DIE_BETWEEN
    for name_in_code, value in {"MODULE": module, "NAME": name, "CALL": call, "AFTER": after}.items():
        code = code.replace(name_in_code, str(value))
    if then:
        code += f"\nwith Cache.open(Path(sys.argv[1]), limits=LIMITS) as cache:\n    {then}\n"
    process = run(code, tmp_path / "c")
    with process:
        assert process.wait() == -signal.SIGKILL
    found, cache = check(tmp_path / "c", actions, range(60))
    with cache:
        assert cache.notices == []
        assert [problem for problem in cache.verify().problems if "block" not in problem] == []
        if not then:
            assert found == list(range(len(found)))
        for number in set(range(60)) - set(found):
            actions.store(cache, number, [SIZE, 200], method="m", format="f")
    found, cache = check(tmp_path / "c", actions, range(60))
    with cache:
        assert found == list(range(60))
        cache.prune()
        assert cache.verify().problems == ()
        assert cache.stats().garbage_bytes == 0
    leftovers = [path.name for path in (tmp_path / "c").rglob("*") if path.suffix in (".tmp", ".dropped", ".cleared")]
    assert leftovers == []


def test_two_writers_with_overlapping_work_and_a_reader(tmp_path, actions):
    first, second = run(_BUILD, tmp_path / "c", 0, 80), run(_BUILD, tmp_path / "c", 40, 120)
    with first, second:
        with Cache.open(tmp_path / "c") as reader:
            seen = 0
            while first.poll() is None or second.poll() is None:
                for number in range(0, 120, 7):
                    record = actions.record(f"manifest {number}", actions.blocks(number, [SIZE, 200]))
                    hit = reader.find(record.key, record.manifest)
                    if hit is not None:
                        assert actions.payload(reader, hit) == actions.expected(number, [SIZE, 200])
                        seen += 1
        assert seen
        assert first.stdout.read().endswith("done\n")
        assert second.stdout.read().endswith("done\n")
    found, cache = check(tmp_path / "c", actions, range(120))
    with cache:
        assert found == list(range(120))
        statistics = cache.stats()
        assert statistics.live_bytes == 120 * (SIZE + 200)
        assert statistics.garbage_bytes == 0


def test_pruning_during_a_build_takes_nothing_that_it_made(tmp_path, actions):
    build = run(_BUILD, tmp_path / "c", 0, 60)
    with build, Cache.open(tmp_path / "c") as cache:
        build.stdout.readline()
        while build.poll() is None:
            assert cache.prune(max_size=0).obstacles == () or build.poll() is not None
        assert build.stdout.read().endswith("done\n")
    # what was pruned after the lease had ended may be gone; a second build under a lease must be complete
    build = run(_BUILD.replace('print("done"', 'pass\nprint("done"'), tmp_path / "c", 0, 60)
    with build:
        assert build.stdout.read().endswith("done\n")
    found, cache = check(tmp_path / "c", actions, range(60))
    with cache:
        assert found == list(range(60))
        assert cache.verify().problems == ()


_READ_AND_HANG = (
    _COMMON
    + """
with Cache.open(Path(sys.argv[1])) as cache, cache.reading() as view:
    for piece in view.blocks(cache.find(record(1).key, record(1).manifest)):
        print("reading", flush=True)
        sys.stdin.readline()
"""
)


def test_a_killed_reader_and_a_killed_lease_hold_nothing(tmp_path, actions):
    with run(_BUILD, tmp_path / "c", 0, 20) as build:
        build.wait()
    with Cache.open(tmp_path / "c") as cache:
        with run(_READ_AND_HANG, tmp_path / "c") as reader:
            reader.stdout.readline()
            reader.kill()
        result = cache.prune(max_size=0)
        assert result.obstacles == ()
        assert cache.stats().segments == 0
    build = run(_BUILD, tmp_path / "c", 0, 1000)
    with build:
        build.stdout.readline()
        build.kill()
    with Cache.open(tmp_path / "c") as cache:
        assert cache.prune(max_size=0).leased == 0
        assert cache.stats().actions == 0


def test_an_interrupt_leaves_the_cache_in_order(tmp_path, actions):
    build = run(_BUILD, tmp_path / "c", 0, 10_000)
    with build:
        flushed = int(build.stdout.readline())
        build.send_signal(signal.SIGINT)
        assert build.wait() != 0
    found, cache = check(tmp_path / "c", actions, range(flushed + 1))
    with cache:
        assert found == list(range(flushed + 1))
        assert list((tmp_path / "c/sessions").iterdir()) != []


@contextmanager
def small_disk(folder: Path, size: str, kind: str) -> Iterator[Path]:
    """A file system of its own, mounted for a test that may do so."""
    folder.mkdir()
    image = folder.with_suffix(".image")
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    else:
        with open(image, "wb") as file:
            file.truncate(int(size.removesuffix("m")) << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
        if made.returncode:
            pytest.skip("mkfs.ext4 does not work here")
        command = ["mount", "-o", "loop", str(image), str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip(f"a {kind} cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        image.unlink(missing_ok=True)


def fill(path: Path) -> None:
    """Take all free space."""
    with open(path, "wb", buffering=0) as file:
        for piece in (1 << 16, 4096, 512):
            while True:
                try:
                    if file.write(b"x" * piece) < piece:
                        break
                except OSError:
                    break


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
class TestFullDisk:
    def test_storing_fails_with_a_message_and_keeps_what_is_finished(self, tmp_path, actions, kind):
        with small_disk(tmp_path / "disk", "16m", kind) as disk:
            with Cache.open(disk / "c") as cache:
                stored = [actions.store(cache, number, [500_000]) for number in range(15)]
                too_much = iter(range(15, 100))
                with pytest.raises(CacheError, match=r"no space left for the cache.*prune --max-size"):
                    stored.extend(actions.store(cache, number, [500_000]) for number in too_much)
                assert len(stored) > 10
            fill(disk / "fill")
            with Cache.open(disk / "c") as cache:
                for number, record in enumerate(stored):
                    assert cache.find(record.key, record.manifest) == record
                    assert actions.payload(cache, record) == actions.expected(number, [500_000])
                assert cache.verify().problems == ()

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("command", ["prune", "clear"])
    def test_space_comes_back(self, tmp_path, actions, kind, shared, command):
        with small_disk(tmp_path / "disk", "32m", kind) as disk:
            with Cache.open(disk / "c", limits=Limits(margin_bytes=0)) as cache:
                stored = [actions.store(cache, number, [400_000]) for number in range(60)]
            fill(disk / "fill")
            free_before, used_before = filesystem.free_bytes(disk), filesystem.allocated_bytes(disk / "c")
            assert free_before < 100_000
            other = run(_READ_ALL, disk / "c") if shared else None
            hits = []
            try:
                if other is not None:
                    assert other.stdout.readline() == "60\n"
                with Cache.open(disk / "c") as cache:
                    if command == "prune":
                        cache.prune(max_size=8_000_000)
                        assert 7_500_000 < cache.stats().live_bytes <= 8_000_000
                    else:
                        cache.clear()
                        assert cache.stats().live_bytes == 0
                    live = cache.stats().live_bytes
                    used = filesystem.allocated_bytes(disk / "c")
                    assert used <= max(1.25 * live, 1_000_000)
                    given_back = filesystem.free_bytes(disk) - free_before
                    assert given_back >= 0.98 * (used_before - used)  # all but the first page of each block
                    hits = [r for r in stored if cache.find(r.key, r.manifest) is not None]
                    for record in hits:
                        number = stored.index(record)
                        assert actions.payload(cache, record) == actions.expected(number, [400_000])
                    assert len(hits) * 400_000 == live
            finally:
                if other is not None:
                    print(file=other.stdin, flush=True)
                    assert other.stdout.readline() == f"{len(hits)}\n"
                    other.wait()
                    other.stdin.close()
                    other.stdout.close()

    def test_a_new_cache_needs_some_space(self, tmp_path, kind):
        with small_disk(tmp_path / "disk", "8m", kind) as disk:
            fill(disk / "fill")
            with pytest.raises(CacheError, match=r"(space|written)"):
                Cache.open(disk / "c")


_READ_ALL = (
    _COMMON
    + """
from ninferbuild.errors import PayloadLostError
def count(cache):
    served = 0
    for entry in cache.ls():
        record = cache.find(entry.key, cache.manifest(entry.key))
        with cache.reading() as view:
            served += sum(len(piece) for piece in view.blocks(record)) == record.length
    return served
with Cache.open(Path(sys.argv[1])) as cache:
    print(count(cache), flush=True)
    sys.stdin.readline()
    print(count(cache), flush=True)
"""
)
