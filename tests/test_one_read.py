"""Source bytes are read once: counted where files are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
import os
from pathlib import Path
import shutil

from fixtures import synthetic
from fixtures.workbench import reshard
import pytest

from ninferbuild.build import build
from ninferbuild.resolve import SAMPLE_BYTES, SAMPLES
from ninferbuild.sources.files import CheckpointFile
from ninferbuild.target import Assign, CacheSettings, Target

GEOMETRY = synthetic.text_geometry(2, h=64, inter=128, heads=2, d=32, vocab=128, gk=1, gkd=32, gv=2, gvd=32, interval=2)


class Reads:
    """Every byte that was read from source files, apart from the samples of probes."""

    def __init__(self) -> None:
        self.pieces: Counter[tuple[str, int, int]] = Counter()

    def note(self, path: Path, offset: int, length: int) -> None:
        self.pieces[str(path), offset, length] += 1

    def clear(self) -> None:
        self.pieces.clear()

    def most_often(self) -> int:
        """How often the byte that was read most often was read."""
        most = 0
        for path in {path for path, _, _ in self.pieces}:
            events: list[tuple[int, int]] = []
            for (piece, offset, length), count in self.pieces.items():
                if piece == path:
                    events += [(offset, count), (offset + length, -count)]
            depth = 0
            for _, change in sorted(events):
                depth += change
                most = max(most, depth)
        return most

    def total(self) -> int:
        return sum(length * count for (_, _, length), count in self.pieces.items())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    original = CheckpointFile.read_into

    def read_into(self: CheckpointFile, offset: int, buffer: memoryview) -> None:
        found.note(self.path, offset, len(buffer))
        original(self, offset, buffer)

    monkeypatch.setattr(CheckpointFile, "read_into", read_into)
    # Samples tell whether a result can exist at all; what they read is bounded and not part of the count.
    monkeypatch.setattr("ninferbuild.resolve._samples", lambda region: [str(region.length).encode()])
    return found


@pytest.fixture
def target(tmp_path: Path) -> Target:
    checkpoint = tmp_path / "checkpoint"
    synthetic.write_base(checkpoint, GEOMETRY, 1, with_vision=False, with_mtp=False)
    settle(checkpoint)
    return Target(
        name="tiny",
        identity=str(tmp_path / "tiny.ninfer"),
        file=None,
        model=checkpoint,
        recipe="qwen3_6_27b",
        out=tmp_path / "tiny.ninfer",
        device="cpu",
        cache=CacheSettings(dir=tmp_path / "cache"),
    )


def settle(checkpoint: Path) -> None:
    """Give files old times. Their change times stay young, so that nothing is remembered and everything is hashed."""
    for file in checkpoint.iterdir():
        os.utime(file, (1_000_000_000, 1_000_000_000))


def needed(checkpoint: Path) -> int:
    """Bytes of all tensors: the recipe consumes each of them once."""
    import json
    import struct

    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        total += max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return total


def moved(target: Target) -> Target:
    place = target.model.with_name("moved")
    shutil.move(target.model, place)
    return replace(target, model=place)


def touched(target: Target) -> Target:
    for file in target.model.iterdir():
        os.utime(file)
    return target


def resharded(target: Target) -> Target:
    place = target.model.with_name("resharded")
    reshard(target.model, place, shards=3)
    return replace(target, model=place)


@pytest.mark.parametrize("change", [moved, touched, resharded], ids=lambda change: change.__name__)
def test_an_unchanged_checkpoint_is_hashed_once(
    change: Callable[[Target], Target], target: Target, reads: Reads
) -> None:
    build(target)
    again = change(target)
    reads.clear()
    result = build(again)
    assert result.executed == 0
    assert reads.most_often() <= 1
    assert result.source_bytes_read == reads.total() <= needed(again.model)


def test_a_cold_build_reads_every_byte_once(target: Target, reads: Reads) -> None:
    result = build(target)
    assert result.executed == result.total
    assert reads.most_often() == 1
    assert reads.total() == result.source_bytes_read == needed(target.model)


def test_another_checkpoint_of_the_same_geometry_is_read_once(target: Target, reads: Reads, tmp_path: Path) -> None:
    build(target)
    other = tmp_path / "other"
    synthetic.write_base(other, GEOMETRY, 2, with_vision=False, with_mtp=False)
    reads.clear()
    # Where lengths are all that samples say, every probe is known and each action would be hashed first, the one path
    # that reads a byte twice. Samples that differ, as those of other weights do, keep it from being taken.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ninferbuild.resolve._samples", lambda region: [os.urandom(16)])
        result = build(replace(target, model=other, out=tmp_path / "other.ninfer"))
    assert result.executed == result.total
    assert reads.most_often() == 1
    assert reads.total() == result.source_bytes_read == needed(other)


def test_a_changed_format_reads_what_it_encodes_once(target: Target, reads: Reads) -> None:
    build(target)
    changed = replace(target, assigns=(Assign(("text/layers/0/mlp/down",), "q8_g32_fp16"),))
    reads.clear()
    result = build(changed)
    assert result.executed == 1
    assert reads.most_often() == 1


def test_a_proposal_head_counts_again(target: Target, reads: Reads, tmp_path: Path) -> None:
    from ninferbuild.target import Proposal

    synthetic.write_ranking(tmp_path / "ranking.i64", GEOMETRY["vocab_size"], 1)
    result = build(replace(target, proposal=Proposal(16, tmp_path / "ranking.i64")))
    head = 16 * GEOMETRY["hidden_size"] * 2
    assert reads.total() == needed(target.model) + head
    assert result.source_bytes_read == reads.total() + 16 * 4  # and the token ids, which lie in memory


def test_a_probe_reads_little(target: Target) -> None:
    """Three samples of each region, and no more, tell that a result cannot exist."""
    from ninferbuild import resolve
    from ninferbuild.sources.regions import Region, Span

    class Counted:
        path = None
        read = 0

        def identity(self) -> None:
            return None

        def read_into(self, offset: int, buffer: memoryview) -> None:
            self.read += len(buffer)

    file = Counted()
    assert len(list(resolve._samples(Region((Span(file, 0, 1 << 40),))))) == SAMPLES
    assert file.read == SAMPLES * SAMPLE_BYTES
