from __future__ import annotations

from collections.abc import Callable, Sequence
import random

import pytest
import xxhash

from ninferbuild.cache import ActionRecord, Cache, Writer
from ninferbuild.digest import block_digest, combine


class Actions:
    """Makes, stores and reads actions with reproducible payloads."""

    def blocks(self, number: int, sizes: Sequence[int]) -> list[bytes]:
        source = random.Random(number)
        return [source.randbytes(size) for size in sizes]

    def record(self, name: str, blocks: Sequence[bytes], **changes: object) -> ActionRecord:
        digests = [block_digest(block) for block in blocks]
        fields: dict[str, object] = {
            "key": xxhash.xxh3_128_digest(name.encode()),
            "manifest": name,
            "kind": "encode",
            "method": "grouped_absmax",
            "format": "q4_g64_fp16",
            "blocks": tuple((digest, len(block)) for digest, block in zip(digests, blocks, strict=True)),
            "length": sum(map(len, blocks)),
            "digest": combine(digests),
            "seconds": 2.0,
            "source_bytes": 100,
            "made_by": "target",
        }
        return ActionRecord(**{**fields, **changes})  # type: ignore[arg-type]

    def put(self, writer: Writer, name: str, blocks: Sequence[bytes], **changes: object) -> ActionRecord:
        for block in blocks:
            writer.block(block)
        record = self.record(name, blocks, **changes)
        writer.action(record, b"probe of " + name.encode())
        return record

    def store(self, cache: Cache, number: int, sizes: Sequence[int] = (10_000, 300), **changes: object) -> ActionRecord:
        with cache.writer() as writer:
            return self.put(writer, f"manifest {number}", self.blocks(number, sizes), **changes)

    def payload(self, cache: Cache, record: ActionRecord) -> bytes:
        with cache.reading() as view:
            return b"".join(bytes(piece) for piece in view.blocks(record))

    def expected(self, number: int, sizes: Sequence[int] = (10_000, 300)) -> bytes:
        return b"".join(self.blocks(number, sizes))


@pytest.fixture
def actions() -> Actions:
    return Actions()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the wall clock of the cache."""
    import time

    now = [1_800_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance
