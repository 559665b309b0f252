"""Random use of the cache against a model of what it must and must not serve."""

from __future__ import annotations

import os
from pathlib import Path
import random
import shutil
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
import xxhash

from ninferbuild.cache import ActionRecord, Cache, Limits
from ninferbuild.digest import block_digest, combine
from ninferbuild.errors import PayloadLostError

LIMITS = Limits(segment_bytes=300_000, transaction_bytes=60_000)
NUMBERS = st.integers(0, 15)


def blocks_of(number: int) -> list[bytes]:
    """Payloads of odd and even numbers share a block."""
    source = random.Random(number)
    sizes = [source.choice([0, 50, 3000, 20_000, 40_000]) for _ in range(number % 4)]
    return [source.randbytes(size) for size in sizes] + [random.Random(number % 2).randbytes(9000)]


def record_of(number: int) -> ActionRecord:
    blocks = blocks_of(number)
    digests = [block_digest(block) for block in blocks]
    return ActionRecord(
        xxhash.xxh3_128_digest(b"%d" % number),
        str(number),
        "encode",
        "m",
        "f",
        tuple(zip(digests, map(len, blocks), strict=True)),
        sum(map(len, blocks)),
        combine(digests),
    )


class CacheMachine(RuleBasedStateMachine):
    """``must`` are actions that have to be served; any other may be, if it is right."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="cache-machine-"))
        self.must: set[int] = set()

    @initialize()
    def start(self) -> None:
        self.cache = Cache.open(self.root / "c", limits=LIMITS)

    @rule(numbers=st.lists(NUMBERS, max_size=6))
    def store(self, numbers: list[int]) -> None:
        with self.cache.writer() as writer:
            for number in numbers:
                for block in blocks_of(number):
                    writer.block(block)
                writer.action(record_of(number), b"")
        self.must.update(numbers)

    @rule(number=NUMBERS)
    def store_blocks_without_a_record(self, number: int) -> None:
        with self.cache.writer() as writer:
            for block in blocks_of(number):
                writer.block(block)

    @rule()
    def reopen(self) -> None:
        self.cache.close()
        self.start()

    @rule(size=st.integers(0, 400_000), held=st.sets(NUMBERS, max_size=3))
    def prune(self, size: int, held: set[int]) -> None:
        if held:
            with self.cache.lease("t") as lease:
                lease.add([record_of(number).key for number in held])
                result = self.cache.prune(max_size=size)
        else:
            result = self.cache.prune(max_size=size)
            assert result.live_bytes <= size
        gone = {number for number in range(16) if record_of(number).key in result.keys}
        assert not gone & held & self.must
        self.must -= gone

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        assert self.cache.remove(record_of(number).key) or number not in self.must
        self.must.discard(number)

    @rule()
    def compact(self) -> None:
        assert self.cache.compact().obstacles == ()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.must.clear()

    @precondition(lambda self: self.must)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Flip bits of a closed file: whatever it hits, nothing wrong may be served."""
        self.cache.close()
        files = sorted((self.root / "c").rglob("data.mdb"))
        path = data.draw(st.sampled_from(files), label="file")
        offset = data.draw(st.integers(0, path.stat().st_size - 1), label="offset")
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << data.draw(st.integers(0, 7), label="bit")]), offset)
        self.start()
        self.must = {number for number in range(16) if self.served(number)}

    def served(self, number: int) -> bool:
        record = record_of(number)
        found = self.cache.find(record.key, record.manifest)
        if found is None:
            return False
        assert found == record
        try:
            with self.cache.reading() as view:
                payload = b"".join(bytes(piece) for piece in view.blocks(found))
        except PayloadLostError:
            assert self.cache.find(record.key, record.manifest) is None
            return False
        assert payload == b"".join(blocks_of(number))
        return True

    @invariant()
    def nothing_is_lost_and_nothing_is_wrong(self) -> None:
        if hasattr(self, "cache"):
            served = {number for number in range(16) if self.served(number)}
            assert self.must <= served

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
        shutil.rmtree(self.root, ignore_errors=True)


CacheMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("CACHE_MACHINE_RUNS", "25")),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase
