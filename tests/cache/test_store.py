"""What is stored is found again, by this process and by others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
import os
from pathlib import Path
import subprocess
import sys
import threading

import pytest

from ninferbuild.cache import AuxiliaryRow, BuildRecord, Cache, Dep, Limits, default_directory, filesystem
from ninferbuild.digest import block_digest
from ninferbuild.errors import CacheError


def test_an_action_is_found_with_its_payload_by_the_next_process(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(
            cache,
            1,
            auxiliaries=(AuxiliaryRow(0, 1, "activation_input_divisor", "fp32", (), b"abcd"),),
            deps=(Dep("/some/file.npy", b"d" * 16),),
        )
    with Cache.open(tmp_path / "c") as cache:
        assert cache.find(record.key, record.manifest) == record
        assert actions.payload(cache, record) == actions.expected(1)
        assert cache.notices == []


def test_another_manifest_under_the_same_key_is_a_miss(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(cache, 1)
        assert cache.find(record.key, record.manifest + " ") is None
        assert cache.find(b"\0" * 16, record.manifest) is None


def test_equal_blocks_are_stored_once(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        block = os.urandom(500_000)
        with cache.writer() as writer:
            first = actions.put(writer, "a", [block, block])
            second = actions.put(writer, "b", [block])
        with cache.writer() as writer:
            third = actions.put(writer, "c", [block, b"tail"])
        statistics = cache.stats()
        assert (statistics.blocks, statistics.live_bytes) == (2, 500_004)
        for record, expected in ((first, block * 2), (second, block), (third, block + b"tail")):
            assert actions.payload(cache, record) == expected


def test_a_payload_without_blocks(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(cache, 1, ())
        assert cache.find(record.key, record.manifest) == record
        assert actions.payload(cache, record) == b""


def test_writable_views_may_be_reused_by_the_caller_at_once(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache, cache.writer() as writer:
        buffer = bytearray(b"first")
        digest = writer.block(memoryview(buffer))
        buffer[:] = b"again"
        assert digest == block_digest(b"first")
        record = actions.record("a", [b"first"])
        writer.action(record, b"")
        writer.flush()
        assert actions.payload(cache, record) == b"first"


def test_more_blocks_than_fit_in_flight(tmp_path, actions):
    limits = Limits(transaction_bytes=50_000, queue_bytes=100_000)
    with Cache.open(tmp_path / "c", limits=limits) as cache:
        records = []
        with cache.writer() as writer, ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(actions.put, writer, f"m{n}", actions.blocks(n, [40_000] * 4)) for n in range(12)]
            records = [job.result() for job in jobs]
        for number, record in enumerate(records):
            assert actions.payload(cache, record) == actions.expected(number, [40_000] * 4)


def test_segments_are_sealed_when_they_are_full(tmp_path, actions):
    limits = Limits(segment_bytes=200_000, transaction_bytes=50_000)
    with Cache.open(tmp_path / "c", limits=limits) as cache:
        records = [actions.store(cache, number, [60_000]) for number in range(12)]
        sizes = {path.parent.name: path.stat().st_size for path in (tmp_path / "c/segments").glob("*/data.mdb")}
        assert len(sizes) >= 3
        assert all(size < 400_000 for size in sizes.values())
        for number, record in enumerate(records):
            assert actions.payload(cache, record) == actions.expected(number, [60_000])


def test_an_action_whose_block_was_never_queued_is_refused(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        writer = cache.writer()
        record = actions.record("a", [b"never stored"])
        writer.action(record, b"")
        with pytest.raises(CacheError, match="never stored"):
            writer.flush()
        with pytest.raises(CacheError, match="never stored"):
            writer.block(b"x")
        writer.close()
        assert cache.find(record.key, record.manifest) is None


def test_leaving_the_writer_with_an_error_keeps_what_was_finished(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        with pytest.raises(ZeroDivisionError), cache.writer() as writer:
            actions.put(writer, "a", [b"x" * 1000]).length / 0
        record = actions.record("a", [b"x" * 1000])
        assert cache.find(record.key, record.manifest) == record
    assert not [thread for thread in threading.enumerate() if "cache-writer" in thread.name]


def test_the_memo(tmp_path):
    long_key = b"path " * 200
    with Cache.open(tmp_path / "c") as cache:
        with cache.writer() as writer:
            writer.remember([(b"a", b"1" * 16), (long_key, b"2" * 16)])
        assert cache.remembered([b"a", b"b", long_key]) == [b"1" * 16, None, b"2" * 16]
        cache.forget([b"a"])
        assert cache.remembered([b"a", long_key]) == [None, b"2" * 16]


def test_a_probe_is_known_to_handles_opened_after_it_was_stored(tmp_path, actions, clock):
    with Cache.open(tmp_path / "c") as cache:
        actions.store(cache, 1)
        assert not cache.known_probe(b"probe of manifest 1")
        clock(1)
        with Cache.open(tmp_path / "c") as later:
            assert later.known_probe(b"probe of manifest 1")
            assert not later.known_probe(b"probe of manifest 2")


def test_builds_are_listed_newest_first_and_repetitions_replace(tmp_path):
    first = BuildRecord("/t.toml#a", (b"k" * 16, b"l" * 16), "id", 1.0, "/out", (("/out", 5, 7),), {"names": ["x"]})
    again = BuildRecord("/t.toml#a", (b"k" * 16, b"l" * 16), "id", 2.0, "/out", (("/out", 5, 8),))
    changed = BuildRecord("/t.toml#a", (b"k" * 16,), "other", 3.0, "/out")
    elsewhere = BuildRecord("/t.toml#b", (), "", 4.0)
    with Cache.open(tmp_path / "c") as cache:
        cache.record_build(first)
        assert cache.builds("/t.toml#a") == [first]
        cache.record_build(again)
        cache.record_build(changed)
        cache.record_build(elsewhere)
    with Cache.open(tmp_path / "c") as cache:
        assert cache.builds("/t.toml#a") == [changed, again]
        assert cache.builds("/t.toml#a", limit=1) == [changed]
        assert cache.builds() == [elsewhere, changed, again]
        assert cache.builds("/t.toml#c") == []


def test_only_the_last_builds_of_a_target_are_remembered(tmp_path):
    with Cache.open(tmp_path / "c") as cache:
        for number in range(30):
            cache.record_build(BuildRecord("t", (bytes([number]) * 16,), "id", float(number)))
        assert [build.time for build in cache.builds("t")] == [float(number) for number in range(29, 19, -1)]


def test_hits_and_what_they_saved_are_counted_once_a_lookup_of_a_build(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(cache, 1)
        cache.find(record.key, record.manifest)
        cache.find(record.key, record.manifest)
        cache.find(record.key, record.manifest, peek=True)
        cache.find(b"\1" * 16, "no", peek=True)
        cache.find(b"\1" * 16, "no")
    with Cache.open(tmp_path / "c") as cache:
        statistics = cache.stats()
        assert (statistics.hits, statistics.misses, statistics.hit_rate) == (1, 1, 0.5)
        assert (statistics.saved_bytes, statistics.saved_seconds) == (10_300, 2.0)
        assert cache.ls()[0].hits == 2


def test_a_read_only_cache_serves_hits_and_refuses_changes(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(cache, 1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    with Cache.open(tmp_path / "c", read_only=True) as cache:
        with cache.lease("t") as lease:
            lease.add([record.key])
        assert cache.find(record.key, record.manifest) == record
        assert actions.payload(cache, record) == actions.expected(1)
        assert cache.stats().actions == 1
        assert cache.verify().problems == ()
        cache.forget([b"a"])
        for change in (cache.writer, cache.prune, cache.clear, cache.compact, lambda: cache.verify(repair=True)):
            with pytest.raises(CacheError, match="read-only"):
                change()
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*") if path.name != "lock.mdb"}
    assert {path: time for path, time in before.items() if path.name != "lock.mdb"} == after


_READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from ninferbuild.cache import Cache
from ninferbuild.errors import CacheError
with Cache.open(Path(sys.argv[1])) as cache:  # whatever is imported late is imported while it can be
    record = cache.find(bytes.fromhex(sys.argv[2]), sys.argv[3])
    with cache.reading() as view:
        list(map(len, view.blocks(record)))
try:
    Cache.open(Path("/proc/nothing"))
except (CacheError, OSError):
    pass
os.setgid(65534); os.setuid(65534)
with Cache.open(Path(sys.argv[1])) as cache:
    assert cache.read_only
    record = cache.find(bytes.fromhex(sys.argv[2]), sys.argv[3])
    with cache.reading() as view:
        sys.stdout.write(str(sum(len(piece) for piece in view.blocks(record))))
try:
    Cache.open(Path(sys.argv[1]) / "new")
except CacheError as error:
    sys.stdout.write(" " + str(error))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody who may not write")
def test_a_directory_that_cannot_be_written_is_opened_for_reading(tmp_path, actions):
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(cache, 1)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    command = [sys.executable, "-c", _READ_AS_NOBODY, str(tmp_path / "c"), record.key.hex(), record.manifest]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("10300 ")
    assert "cannot be written" in done.stdout


def test_handles_of_one_process_share_what_is_open(tmp_path, actions):
    with Cache.open(tmp_path / "c") as first:
        record = actions.store(first, 1)
        with Cache.open(tmp_path / "." / "c") as second:
            assert second.find(record.key, record.manifest) == record
        assert first.find(record.key, record.manifest) == record
    with pytest.raises(CacheError, match="is closed"):
        first.find(record.key, record.manifest)
    first.close()


def test_the_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "x"))
    assert default_directory() == tmp_path / "x"
    monkeypatch.delenv("NINFERBUILD_CACHE")
    assert default_directory().name == "ninferbuild"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "ninferbuild"


def test_a_cache_directory_is_marked_as_one(tmp_path):
    Cache.open(tmp_path / "c").close()
    assert (tmp_path / "c/CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_places_that_cannot_hold_a_cache(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file is not a directory"):
        Cache.open(tmp_path / "file")
    with pytest.raises(CacheError, match="there is no cache in"):
        Cache.open(tmp_path / "absent", read_only=True)
    with pytest.raises(CacheError, match="there is no cache in"):
        Cache.open(tmp_path / "absent", create=False)
    with pytest.raises(CacheError, match="cannot be written"):
        Cache.open(tmp_path / "file" / "below")


def test_network_file_systems_are_refused_with_a_hint(tmp_path, monkeypatch):
    table = tmp_path / "mounts"
    table.write_text(
        f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n/dev/b {tmp_path}/local\\040one xfs rw 0 0\n"
    )
    assert filesystem.kind_of(tmp_path / "c", table) == "nfs4"
    assert filesystem.kind_of(tmp_path / "local one" / "c", table) == "nfs4"  # not there, so its parent counts
    (tmp_path / "local one").mkdir()
    assert filesystem.kind_of(tmp_path / "local one" / "c", table) == "xfs"
    assert filesystem.kind_of(Path("/"), table) == "ext4"
    assert filesystem.kind_of(tmp_path, tmp_path / "absent") is None
    monkeypatch.setattr(filesystem, "kind_of", lambda path: "nfs4")
    with pytest.raises(CacheError, match=r"network file system \(nfs4\).*NINFERBUILD_CACHE"):
        Cache.open(tmp_path / "c")
    Cache.open(tmp_path / "c", allow_foreign_fs=True).close()


def test_neither_torch_nor_numpy_is_imported():
    code = "import sys, ninferbuild.cache; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_has_one_name(tmp_path):
    root = Path(sys.modules["ninferbuild.cache"].__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", "import cache"], cwd=root, capture_output=True, text=True, check=False)
    assert "imported as ninferbuild.cache" in done.stderr


_LIMIT_ADDRESS_SPACE = """
import resource, sys
from pathlib import Path
from ninferbuild.cache import Cache
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
with Cache.open(Path(sys.argv[1])) as cache, cache.writer() as writer:
    writer.block(b"x" * 100000)
"""


def test_a_limit_of_address_space_makes_maps_smaller(tmp_path):
    subprocess.run([sys.executable, "-c", _LIMIT_ADDRESS_SPACE, str(tmp_path / "c")], check=True)
