"""What goes, what stays, and that space really comes back."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

import pytest

from ninferbuild.cache import BuildRecord, Cache, Limits, filesystem, reclaim
from ninferbuild.errors import CacheError

SIZE = 100_000


def live(build: BuildRecord) -> bool:
    return True


def dead(build: BuildRecord) -> bool:
    return False


@pytest.fixture
def filled(tmp_path, actions, clock):
    """Ten actions of 100,000 bytes, made ten seconds apart; number 0 was used last."""
    with Cache.open(tmp_path / "c") as cache:
        records = []
        for number in range(10):
            records.append(actions.store(cache, number, [SIZE]))
            clock(10)
        cache.find(records[0].key, records[0].manifest)
        clock(1)
        yield cache, records


def stored(cache, records):
    return [number for number, record in enumerate(records) if cache.find(record.key, record.manifest, peek=True)]


def test_least_recently_used_first(filled):
    cache, records = filled
    result = cache.prune(max_size=4 * SIZE)
    assert stored(cache, records) == [0, 7, 8, 9]
    assert [records.index(next(r for r in records if r.key == key)) for key in result.keys] == [1, 2, 3, 4, 5, 6]
    assert (result.freed_bytes, result.live_bytes) == (6 * SIZE, 4 * SIZE)
    assert result.disk_after <= result.disk_before - 5 * SIZE
    assert result.obstacles == ()


def test_a_dry_run_changes_nothing(filled):
    cache, records = filled
    result = cache.prune(max_size=0, dry_run=True)
    assert (len(result.keys), result.freed_bytes, result.live_bytes) == (10, 10 * SIZE, 0)
    assert stored(cache, records) == list(range(10))


def test_by_age(filled):
    cache, records = filled
    cache.prune(older_than=45)
    assert stored(cache, records) == [0, 6, 7, 8, 9]
    cache.prune(older_than=0.5, max_size=10 * SIZE)
    assert stored(cache, records) == []


def test_without_a_criterion_only_what_nothing_needs_goes(filled):
    cache, records = filled
    assert cache.prune().keys == ()
    assert stored(cache, records) == list(range(10))


def test_the_last_build_of_a_live_target_stays_until_told_otherwise(filled):
    cache, records = filled
    cache.record_build(BuildRecord("t", (records[1].key, records[2].key), "x", 1.0))
    cache.record_build(BuildRecord("t", (records[2].key, records[3].key), "y", 2.0))
    assert cache.prune(older_than=0.0001, is_live=live, dry_run=True).protected == 2
    cache.prune(older_than=0.0001, is_live=live)
    assert stored(cache, records) == [2, 3]
    cache.prune(max_size=SIZE, is_live=live)  # a bound is kept whatever it takes
    assert stored(cache, records) == [3]
    cache.prune(keep_builds=1, max_size=0, is_live=live)  # but what was asked for stays
    assert stored(cache, records) == [3]
    cache.prune(older_than=0.0001, is_live=dead)
    assert stored(cache, records) == []


def test_keep_builds_alone_drops_everything_else(filled):
    cache, records = filled
    for number in range(4):
        cache.record_build(BuildRecord("t", (records[number].key,), str(number), float(number)))
    cache.record_build(BuildRecord("gone", (records[9].key,), "", 1.0))
    cache.prune(keep_builds=2, is_live=lambda build: build.target == "t")
    assert stored(cache, records) == [2, 3]
    cache.prune(keep_builds=0, is_live=live)
    assert stored(cache, records) == []


def test_one_target(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        mine = [actions.store(cache, number, [SIZE], made_by="a") for number in range(3)]
        theirs = [actions.store(cache, number, [SIZE], made_by="b") for number in range(3, 6)]
        cache.record_build(BuildRecord("b", (mine[2].key, theirs[0].key), "", 1.0))
        assert {entry.key for entry in cache.ls("b")} == {mine[2].key, *(record.key for record in theirs)}
        assert {entry.target for entry in cache.ls("a")} == {"a"}
        cache.prune(target="a", is_live=live)
        assert stored(cache, mine) == [2]  # b uses it
        assert stored(cache, theirs) == [0, 1, 2]
        cache.prune(target="b", is_live=live)
        assert stored(cache, mine) + stored(cache, theirs) == []


def test_manifests_outlive_their_payload_as_long_as_a_build_names_them(filled):
    cache, records = filled
    cache.record_build(BuildRecord("t", (records[1].key,), "x", 1.0))
    cache.prune(max_size=0)
    assert cache.manifest(records[1].key) == records[1].manifest
    assert cache.manifest(records[2].key) is None
    assert cache.find(records[1].key, records[1].manifest) is None


def test_blocks_that_a_kept_action_shares_stay(tmp_path, actions, clock):
    with Cache.open(tmp_path / "c") as cache, cache.writer() as writer:
        shared, own = os.urandom(SIZE), os.urandom(SIZE)
        old = actions.put(writer, "old", [shared, own])
        writer.flush()
        clock(10)
        new = actions.put(writer, "new", [shared])
        writer.flush()
        result = cache.prune(max_size=SIZE)
        assert result.keys == (old.key,)
        assert result.freed_bytes == SIZE
        assert actions.payload(cache, new) == shared


def test_a_lease_protects_what_it_names_and_what_is_made_meanwhile(filled, actions):
    cache, records = filled
    with cache.lease("t") as lease:
        lease.add([records[3].key])
        actions.store(cache, 99, [SIZE])
        made = actions.record("manifest 99", actions.blocks(99, [SIZE]))
        result = cache.prune(max_size=0)
        assert result.leased == 2
        assert stored(cache, [*records, made]) == [3, 10]
        with pytest.raises(CacheError, match="needed by a build in progress"):
            cache.remove(records[3].key)
        assert actions.payload(cache, made) == actions.expected(99, [SIZE])
    cache.prune(max_size=0)
    assert stored(cache, [*records, made]) == []


def test_blocks_of_an_unfinished_action_survive_pruning_under_a_lease(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache, cache.lease("t"), cache.writer() as writer:
        blocks = actions.blocks(1, [SIZE] * 3)
        for block in blocks[:2]:
            writer.block(block)
        writer.flush()
        assert cache.prune(max_size=0).freed_bytes == 0
        record = actions.put(writer, "a", blocks)
        writer.flush()
        assert actions.payload(cache, record) == b"".join(blocks)


def test_blocks_that_nothing_names_are_swept(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        with cache.writer() as writer:
            writer.block(os.urandom(SIZE))
        assert cache.stats().garbage_bytes == SIZE
        assert cache.prune(dry_run=True).freed_bytes == SIZE
        cache.prune()
        statistics = cache.stats()
        assert (statistics.blocks, statistics.garbage_bytes, statistics.segments) == (0, 0, 0)


def test_max_size_is_kept_while_building(tmp_path, actions, clock):
    with Cache.open(tmp_path / "c", max_size=5 * SIZE) as cache:
        records = []
        for number in range(20):
            records.append(actions.store(cache, number, [SIZE]))
            clock(1)
            assert cache.stats().live_bytes <= 5 * SIZE
        assert stored(cache, records)[-1] == 19
        assert len(stored(cache, records)) >= 4
        assert filesystem.allocated_bytes(tmp_path / "c/segments") < 7 * SIZE


def test_a_build_larger_than_max_size_is_finished_and_says_so(tmp_path, actions):
    with Cache.open(tmp_path / "c", max_size=2 * SIZE) as cache, cache.lease("t"):
        records = [actions.store(cache, number, [SIZE]) for number in range(5)]
        assert stored(cache, records) == [0, 1, 2, 3, 4]
        assert cache.notices == [f"the build in progress needs more than the cache's max_size of {2 * SIZE} bytes"]


def test_remove_one(filled):
    cache, records = filled
    key = records[4].key
    assert cache.matching(key.hex()[:9].upper()) == [key]
    assert cache.remove(key)
    assert not cache.remove(key)
    assert stored(cache, records) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_clear(filled, actions):
    cache, records = filled
    cache.record_build(BuildRecord("t", (records[1].key,), "x", 1.0))
    result = cache.clear()
    assert stored(cache, records) == []
    assert cache.builds() == []
    assert result.disk_after < 500_000 < result.disk_before
    again = actions.store(cache, 1, [SIZE])
    assert actions.payload(cache, again) == actions.expected(1, [SIZE])


def test_clear_in_use_keeps_what_a_build_needs(filled, tmp_path):
    cache, records = filled
    with Cache.open(tmp_path / "c") as other, other.lease("t") as lease:
        lease.add([records[5].key])
        assert cache.clear().kept == 1
        assert stored(cache, records) == [5]


def small_segments(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "c", limits=Limits(segment_bytes=2_000_000, transaction_bytes=400_000))


@pytest.mark.parametrize("size", [300, 5_000, 100_000])
@pytest.mark.parametrize("holes", [True, False])
def test_disk_use_follows_live_bytes_whatever_the_blocks_are(tmp_path, actions, clock, monkeypatch, size, holes):
    if not holes:
        monkeypatch.setattr(filesystem, "punch_hole", lambda *_: False)
    count = 8_000_000 // max(size, 4096)
    with small_segments(tmp_path) as cache:
        with cache.writer() as writer:
            records = []
            for number in range(count):
                records.append(actions.put(writer, f"m{number}", actions.blocks(number, [size])))
                if number % 50 == 0:
                    writer.flush()
                    clock(1)
        cache.find(records[0].key, records[0].manifest)  # keeps one block in the first segment
        before = filesystem.allocated_bytes(tmp_path / "c/segments")
        cache.prune(max_size=count * size // 2)
        after = filesystem.allocated_bytes(tmp_path / "c/segments")
        segments = cache.stats().segments
        assert after <= before * 0.62 + segments * 70_000
        if size > 4096:
            assert after <= 1.25 * cache.stats().live_bytes * -(-size // 4096) * 4096 / size + segments * 70_000
        for number in stored(cache, records):
            assert actions.payload(cache, records[number]) == actions.expected(number, [size])
        assert cache.verify().problems == ()


def test_compact_leaves_no_gaps(tmp_path, actions, clock):
    with small_segments(tmp_path) as cache:
        records = [actions.store(cache, number, [SIZE + number]) for number in range(60)]
        for record in records[::3]:
            cache.remove(record.key)
        result = cache.compact()
        assert result.obstacles == ()
        assert result.disk_after < result.disk_before
        kept = [number for number in range(60) if number % 3]
        assert stored(cache, records) == kept
        for number in kept:
            assert actions.payload(cache, records[number]) == actions.expected(number, [SIZE + number])
        assert cache.verify().problems == ()
        actions.store(cache, 100, [SIZE])
    with small_segments(tmp_path) as cache:
        assert stored(cache, records) == kept
        assert cache.notices == []


def test_compact_needs_room_and_says_so(filled, monkeypatch):
    cache, records = filled
    cache.remove(records[0].key)
    monkeypatch.setattr(filesystem, "free_bytes", lambda path: 1000)
    result = cache.compact()
    assert any("no room to rewrite segment" in line for line in result.obstacles)
    assert any("the index was not rewritten" in line for line in result.obstacles)
    assert stored(cache, records) == list(range(1, 10))


def test_compact_is_refused_while_another_handle_is_open(filled, tmp_path):
    cache, _ = filled
    with Cache.open(tmp_path / "c"), pytest.raises(CacheError, match="in use by"):
        cache.compact()


_HOLD_OPEN = """
import sys
from pathlib import Path
from ninferbuild.cache import Cache
with Cache.open(Path(sys.argv[1])) as cache:
    keys = [bytes.fromhex(key) for key in sys.argv[2:]]
    records = {key: cache.find(key, cache.manifest(key)) for key in keys}
    with cache.reading() as view:
        for record in records.values():
            for _ in view.blocks(record): pass
    with cache.lease("other") as lease:
        lease.add(keys[:1])
        print("ready", flush=True)
        sys.stdin.readline()
        with cache.reading() as view:
            print(sum(len(piece) for piece in view.blocks(records[keys[0]])), flush=True)
    print(cache.find(keys[1], cache.manifest(keys[1]) or "") is None, flush=True)
"""


def test_pruning_while_another_process_has_the_cache_open(filled, tmp_path):
    cache, records = filled
    command = [sys.executable, "-c", _HOLD_OPEN, str(tmp_path / "c"), records[3].key.hex(), records[4].key.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(CacheError, match=rf"in use by process {other.pid} "):
            cache.compact()
        result = cache.prune(max_size=0)
        assert (result.leased, result.live_bytes) == (1, SIZE)
        assert stored(cache, records) == [3]
        assert result.disk_after < result.disk_before - 8 * SIZE
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == f"{SIZE}\n"
        assert other.stdout.readline() == "True\n"
    cache.clear()
    assert stored(cache, records) == []


def test_space_under_a_view_is_not_given_back(filled, monkeypatch, actions):
    cache, records = filled
    monkeypatch.setattr(reclaim, "READER_PATIENCE", 0.05)
    with cache.reading() as view:
        pieces = view.blocks(records[0])
        piece = next(pieces)
        result = cache.prune(max_size=0)
        assert result.obstacles
        assert bytes(piece) == actions.expected(0, [SIZE])
    assert cache.prune().obstacles == ()
    assert cache.stats().segments == 0


def test_targets_are_live_while_their_file_names_them_or_their_output_exists(tmp_path):
    from ninferbuild.cache.liveness import is_live

    toml, out = tmp_path / "ninferbuild.toml", tmp_path / "out.ninfer"
    build = BuildRecord(f"{toml}#a", (), "", 1.0, str(out))
    assert not is_live(build)
    toml.write_text("[targets.b]\n")
    assert not is_live(build)
    out.write_text("")
    assert is_live(build)
    out.unlink()
    toml.write_text("[targets.a]\n")
    assert is_live(build)
    toml.write_text("not toml [")
    assert is_live(build)
    assert not is_live(BuildRecord(str(out), (), "", 1.0))
    out.write_text("")
    assert is_live(BuildRecord(str(out), (), "", 1.0))


def test_statistics_by_method_format_and_target(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache, cache.writer() as writer:
        shared, one, two = (os.urandom(SIZE) for _ in range(3))
        actions.put(writer, "a", [shared, one], method="m", format="f", made_by="t")
        actions.put(writer, "b", [shared, two, two], method="n", format="f", made_by="u")
        writer.flush()
        statistics = cache.stats()
    assert statistics.formats["f"].actions == 2
    assert statistics.formats["f"].live_bytes == 3 * SIZE == statistics.live_bytes
    assert statistics.methods["m"].live_bytes == statistics.targets["u"].live_bytes == SIZE * 3 // 2
    assert sum(group.file_bytes for group in statistics.methods.values()) == 3 * -(-(SIZE + 16) // 4096) * 4096
    assert statistics.file_bytes >= statistics.formats["f"].file_bytes
