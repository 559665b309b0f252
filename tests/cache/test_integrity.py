"""Damage of every kind: nothing corrupt is served, what is hit is made again, the rest goes on."""

from __future__ import annotations

import os
from pathlib import Path
import random
import subprocess
import sys

import pytest

from ninferbuild.cache import Cache, Limits, btree
from ninferbuild.cache.records import Number, Raw, StoredBlock, decode, encode
from ninferbuild.errors import CacheError, PayloadLostError

SIZE = 50_000
COUNT = 12


@pytest.fixture
def made(tmp_path, actions):
    """A closed cache of twelve actions in several segments."""
    with Cache.open(tmp_path / "c", limits=Limits(segment_bytes=200_000)) as cache:
        return tmp_path / "c", [actions.store(cache, number, [SIZE, 700]) for number in range(COUNT)]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit, and nothing that ``stat`` shows."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def served(cache: Cache, actions, records) -> tuple[int, int]:
    """(payloads served whole, payloads missed); fails when anything else is served."""
    good = missed = 0
    for number, record in enumerate(records):
        found = cache.find(record.key, record.manifest)
        payload, lost = None, None
        if found is not None:
            assert found == record
            try:
                payload = actions.payload(cache, found)
            except PayloadLostError as error:
                lost = error
        if lost is not None:
            assert lost.key == record.key
            assert cache.find(record.key, record.manifest) is None
        if payload is not None:
            assert payload == actions.expected(number, [SIZE, 700])
        good, missed = good + (payload is not None), missed + (payload is None)
    return good, missed


def heal(cache: Cache, actions, records) -> None:
    for number, record in enumerate(records):
        if cache.find(record.key, record.manifest) is None:
            assert actions.store(cache, number, [SIZE, 700]) == record
    assert served(cache, actions, records) == (COUNT, 0)
    assert cache.verify().problems == ()


def block_offset(root: Path, record) -> tuple[Path, int]:
    for data in root.glob("segments/*/data.mdb"):
        descriptor = btree.open_data(data.parent)
        try:
            for value in btree.values(descriptor):
                if value.key == record.blocks[0][0]:
                    return data, value.begin
        finally:
            os.close(descriptor)
    raise AssertionError("block not found")


def test_a_flipped_bit_in_a_block_is_found_dropped_told_and_healed(made, actions):
    root, records = made
    data, offset = block_offset(root, records[3])
    flip(data, offset + 1234)
    with Cache.open(root) as cache:
        assert len(cache.verify().problems) == 2  # the block, and the action that needs it
        assert served(cache, actions, records) == (COUNT - 1, 1)
        assert [line for line in cache.notices if records[3].key.hex() in line]
        heal(cache, actions, records)


def test_verify_repairs(made, actions):
    root, records = made
    for record in records[2:4]:
        data, offset = block_offset(root, record)
        flip(data, offset)
    with Cache.open(root) as cache:
        result = cache.verify()
        assert set(result.damaged_keys) == {record.key for record in records[2:4]}
        assert not result.repaired
        told: list[int] = []
        assert cache.verify(repair=True, progress=told.append).repaired
        assert sum(told) == COUNT * (SIZE + 700)
        assert cache.verify().problems == ()
        assert served(cache, actions, records) == (COUNT - 2, 2)
        heal(cache, actions, records)


def test_a_read_only_cache_misses_what_it_found_damaged(made, actions):
    root, records = made
    data, offset = block_offset(root, records[3])
    flip(data, offset)
    with Cache.open(root, read_only=True) as cache:
        assert served(cache, actions, records) == (COUNT - 1, 1)
        assert served(cache, actions, records) == (COUNT - 1, 1)


def test_a_flipped_bit_anywhere_in_the_index(made, actions):
    root, records = made
    data = root / "index/data.mdb"
    whole = data.read_bytes()
    source = random.Random(5)
    told = 0
    for _ in range(25):
        data.write_bytes(whole)
        flip(data, source.randrange(len(whole)), source.randrange(8))
        with Cache.open(root, limits=Limits(segment_bytes=200_000)) as cache:
            good, _ = served(cache, actions, records)
            assert cache.notices or good == COUNT
            told += bool(cache.notices)
            heal(cache, actions, records)
        whole = data.read_bytes()
    assert told


def test_a_flipped_bit_in_a_tree_page_of_a_segment(made, actions):
    root, records = made
    segment = root / "segments/0002/data.mdb"
    descriptor = btree.open_data(segment.parent)
    leaf = btree.read_meta(descriptor).main_root
    os.close(descriptor)
    flip(segment, leaf * 4096 + 10, 3)  # its type
    with Cache.open(root) as cache:
        assert "segment 0002 was damaged" in cache.notices[0]
        good, missed = served(cache, actions, records)
        assert good > 0
        assert missed > 0
        heal(cache, actions, records)
    assert list(root.glob("segments/0002.broken-*"))
    with Cache.open(root) as cache:
        assert cache.notices == []
        cache.clear()
    assert not list(root.glob("segments/*.broken-*"))


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.97])
def test_a_truncated_index(made, actions, keep):
    root, records = made
    data = root / "index/data.mdb"
    os.truncate(data, int(data.stat().st_size * keep))
    with Cache.open(root) as cache:
        good, _ = served(cache, actions, records)
        assert good == COUNT if keep == 0.97 else good < COUNT or keep == 0.5
        heal(cache, actions, records)
    with Cache.open(root) as cache:
        assert served(cache, actions, records) == (COUNT, 0)
        assert cache.notices == []


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_segment(made, actions, keep):
    root, records = made
    data = root / "segments/0001/data.mdb"
    os.truncate(data, int(data.stat().st_size * keep))
    with Cache.open(root) as cache:
        good, missed = served(cache, actions, records)
        assert missed > 0
        assert good >= COUNT - 5
        heal(cache, actions, records)
    with Cache.open(root) as cache:
        assert served(cache, actions, records) == (COUNT, 0)


def test_a_truncated_segment_that_another_handle_meets_later(made, actions):
    root, records = made
    data = root / "segments/0001/data.mdb"
    with Cache.open(root) as cache:
        os.truncate(data, 5000)  # found when the segment is opened, not by a signal
        _, missed = served(cache, actions, records)
        assert missed > 0


def test_missing_files(made, actions):
    root, records = made
    (root / "segments/0001/data.mdb").unlink()
    with Cache.open(root) as cache:
        good, missed = served(cache, actions, records)
        assert missed > 0
        assert good > 0
        heal(cache, actions, records)
    (root / "index/data.mdb").unlink()
    with Cache.open(root) as cache:
        heal(cache, actions, records)


def test_garbage_in_place_of_the_files(made, actions):
    root, records = made
    for path in (root / "index/data.mdb", root / "segments/0001/data.mdb"):
        path.write_bytes(os.urandom(100_000))
    for path in (root / "index/stamp", root / "segments/0002/stamp", root / "index/lock.mdb"):
        path.write_bytes(b"junk")
    with Cache.open(root) as cache:
        assert any("set aside" in line for line in cache.notices)
        heal(cache, actions, records)


def test_a_damaged_index_is_refused_for_reading_and_set_aside_for_writing(made):
    root, _ = made
    flip(root / "index/data.mdb", 4096 * 3 + 30)
    with pytest.raises(CacheError, match="is damaged"):
        Cache.open(root, read_only=True)
    with Cache.open(root) as cache:
        assert "set aside as" in cache.notices[0]
        assert cache.notices[1] == f"{COUNT} actions were recovered from the damaged cache index"
    assert list(root.glob("index.broken-*"))


def test_another_version_of_the_format_is_refused(made):
    root, _ = made
    from ninferbuild.cache import index

    with Cache.open(root) as cache, cache._open_store.index.write() as transaction:
        transaction.put(index.NUMBERS, b"version", Number(99))
    with pytest.raises(CacheError, match="another version"):
        Cache.open(root)


def test_records_know_their_place():
    row = StoredBlock(1, 2, b"s")
    stored = encode(b"blocks", b"key", row)
    assert decode(b"blocks", b"key", stored, StoredBlock) == row
    assert decode(b"blocks", b"kez", stored, StoredBlock) is None
    assert decode(b"digests", b"key", stored, StoredBlock) is None
    assert decode(b"blocks", b"key", stored, Raw) is None
    assert decode(b"blocks", b"key", b"", StoredBlock) is None
    for position in range(len(stored)):
        damaged = bytearray(stored)
        damaged[position] ^= 4
        assert decode(b"blocks", b"key", bytes(damaged), StoredBlock) is None


def test_the_file_format_reader_agrees_with_the_engine(tmp_path):
    import lmdb

    source = random.Random(1)
    expected = {
        source.randbytes(16): source.randbytes(source.choice([0, 1, 500, 2000, 5000, 70_000])) for _ in range(700)
    }
    with lmdb.open(str(tmp_path / "e"), map_size=1 << 30, lib_version=0) as environment:
        for key, value in expected.items():
            with environment.begin(write=True) as transaction:
                transaction.put(key, value)
    descriptor = btree.open_data(tmp_path / "e")
    try:
        meta = btree.read_meta(descriptor)
        assert meta.size <= os.fstat(descriptor).st_size
        values = list(btree.values(descriptor))
        assert [value.key for value in values] == sorted(expected)
        large = [value for value in values if value.pages]
        assert {len(expected[value.key]) for value in large} == {5000, 70_000}
        for value in large:
            assert os.pread(descriptor, value.length, value.begin) == expected[value.key]
        for value in values:
            assert value.length == len(expected[value.key])
        assert btree.tree_digest(descriptor) == btree.tree_digest(descriptor)
    finally:
        os.close(descriptor)


def test_arbitrary_bytes_are_damage_and_nothing_else(tmp_path):
    import lmdb

    with lmdb.open(str(tmp_path / "e"), map_size=1 << 30, lib_version=0) as environment:
        for number in range(300):
            with environment.begin(write=True) as transaction:
                transaction.put(b"%03d" % number * 5, b"x" * 3000)
    path = tmp_path / "e/data.mdb"
    whole = path.read_bytes()
    source = random.Random(3)
    failures = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(source.choice([1, 3, 40])):
            page = source.choice([0, 1, source.randrange(len(whole) // 4096)])
            damaged[page * 4096 + source.randrange(200)] = source.randrange(256)
        path.write_bytes(damaged)
        descriptor = btree.open_data(path.parent)
        try:
            list(btree.values(descriptor))
            btree.tree_digest(descriptor)
            btree.file_digest(descriptor)
        except btree.DamagedError:
            failures += 1
        finally:
            os.close(descriptor)
    assert 0 < failures < 300


_READ_DAMAGED = """
import sys
from pathlib import Path
from ninferbuild.cache import Cache
from ninferbuild.errors import CacheError
try:
    with Cache.open(Path(sys.argv[1])) as cache:
        print("opened", len(cache.notices))
except CacheError as error:
    print("refused", error)
"""


def test_a_short_index_that_another_process_holds_open_is_refused(made):
    root, _ = made
    with Cache.open(root):
        whole = (root / "index/data.mdb").read_bytes()
        os.truncate(root / "index/data.mdb", 9000)
        command = [sys.executable, "-c", _READ_DAMAGED, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("refused")
        assert "close the programs that use the cache" in done.stdout
        (root / "index/data.mdb").write_bytes(whole)


def test_a_lost_block_takes_the_other_damaged_blocks_of_its_action_along(tmp_path, actions):
    """Making the action again stores what is not there: nothing damaged may be left in its way."""
    sizes = [SIZE, SIZE, 700, SIZE]
    with Cache.open(tmp_path / "c") as cache:
        record = actions.store(cache, 0, sizes)
    (data,) = (tmp_path / "c").glob("segments/*/data.mdb")
    descriptor = btree.open_data(data.parent)
    places = {value.key: value.begin for value in btree.values(descriptor)}
    os.close(descriptor)
    assert len(record.blocks) == len(sizes)
    for index in (1, 3):
        flip(data, places[record.blocks[index][0]] + 99)
    with Cache.open(tmp_path / "c") as cache:
        with pytest.raises(PayloadLostError):
            actions.payload(cache, record)
        actions.store(cache, 0, sizes)
        assert actions.payload(cache, record) == actions.expected(0, sizes)
        assert cache.verify().problems == ()
