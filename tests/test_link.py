"""Linking: however the payloads get to their places, the files are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
import errno
import fcntl
import os
from pathlib import Path
import random
import shutil
import struct
import subprocess
import tempfile
import threading
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import pytest
import xxhash

from ninferbuild import build, cloning, link, load_target, payload, platform_io, standing
from ninferbuild.artifact.framing import HEADER, MAGIC, PART_MAGIC, SegmentMap
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.build import BuildResult
from ninferbuild.cache import ActionRecord, BuildRecord, Cache
from ninferbuild.digest import block_digest, combine
from ninferbuild.errors import PayloadLostError
from ninferbuild.publish import SUFFIX
from ninferbuild.staging import Staging

BLOCK = 4096


def content(name: str, size: int) -> bytes:
    """Bytes of a payload, the same for equal names."""
    return random.Random(f"{name}/{size}").randbytes(size)


@dataclass
class Made:
    """An artifact to link: objects as (id, name of the content, bytes)."""

    objects: Sequence[tuple[str, str, int]]
    entry: Path
    max_file_bytes: int | None = None
    block: int = 5000
    text: str = "r"
    resources: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = [TensorSpec(name, (size // 2,), "bf16", "contiguous_le_v1") for name, _, size in self.objects]
        self.contents = link.Contents(
            {"text": {"config": {}}}, self.resources, specs, (), {}, (), self.text, (), None, self.max_file_bytes
        )
        self.payloads = [content(name, size) for _, name, size in self.objects]
        self.records = [
            self._record(name, data) for (_, name, _), data in zip(self.objects, self.payloads, strict=True)
        ]
        digests = link.payload_digests(self.contents, self.records)
        self.layout = link.lay_out(self.contents, self.entry.name, payload_digests=digests, source_digests={})
        self.paths = self.layout.paths(self.entry)

    def pieces(self, data: bytes) -> list[bytes]:
        return [data[begin : begin + self.block] for begin in range(0, len(data), self.block)]

    def _record(self, name: str, data: bytes) -> ActionRecord:
        digests = [block_digest(piece) for piece in self.pieces(data)]
        blocks = tuple((digest, len(piece)) for digest, piece in zip(digests, self.pieces(data), strict=True))
        key = xxhash.xxh3_128_digest(f"{name}/{len(data)}".encode())
        return ActionRecord(key, name, "encode", "m", "bf16", blocks, len(data), combine(digests))

    def store(self, cache: Cache) -> None:
        with cache.writer() as writer:
            for record, data in zip(self.records, self.payloads, strict=True):
                for piece in self.pieces(data):
                    writer.block(piece)
                writer.action(record, record.key)

    def expected(self) -> list[bytes]:
        """The files, put together in the plainest way."""
        segments = SegmentMap(self.layout.directory.files, self.layout.payload_offset)
        logical = bytearray(segments.payload_bytes)
        bodies = [*self.resources.values(), *self.payloads]
        for item, data in zip(self.layout.directory.objects, bodies, strict=True):
            logical[item.offset : item.offset + len(data)] = data
        files = []
        for index, length in enumerate(self.layout.lengths()):
            magic, number = (PART_MAGIC, index) if index else (MAGIC, len(self.layout.text))
            framing = HEADER.pack(magic, number, self.layout.artifact_id) + (b"" if index else self.layout.text)
            framing = framing.ljust(BLOCK if index else self.layout.payload_offset, b"\0")
            size = length - len(framing)
            files.append(framing + bytes(logical[:size]))
            del logical[:size]
        assert not logical
        return files

    def write(self, cache: Cache, *, staged: Sequence[int] = (), previous: BuildRecord | None = None) -> link.Written:
        staging = None
        if staged:
            staging = Staging(self.layout, self.entry)
            for index in staged:
                identifier, offset = [self.objects[index][0]], 0
                for piece in self.pieces(self.payloads[index]):
                    staging.write(identifier, offset, memoryview(piece)).result()
                    offset += len(piece)
                staging.mark(identifier)
        done = link.write(
            self.layout,
            self.contents,
            self.records,
            cache,
            self.entry,
            b"{}",
            overwrite=True,
            staging=staging,
            previous=previous,
            seen=standing.state_of(self.entry),
        )
        for path, expected in zip(self.paths, self.expected(), strict=True):
            assert first_difference(path.read_bytes(), expected) is None
        assert not leftovers(self.entry.parent)
        return done

    def published(self, paths: Sequence[Path] | None = None) -> BuildRecord:
        """What the cache remembers of this build; ``paths``: where its files have been moved."""
        keys = tuple(record.key for record in self.records)
        stats = link.stats_of(paths or self.paths)
        return BuildRecord("t", keys, self.layout.artifact_id.hex(), 0.0, stats[0][0], stats)


def first_difference(one: bytes, other: bytes) -> int | None:
    """Where two files differ; None if they do not."""
    if one == other:
        return None
    return next(
        (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right),
        min(len(one), len(other)),
    )


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(SUFFIX)]


def change_byte(path: Path, position: int) -> None:
    """Flip a bit as a failing disk does: nothing tells of it."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        old = file.read(1)
        file.seek(position)
        file.write(bytes([old[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class Copies:
    """Stands in for sharing where the file system cannot: the same rules, and the bytes are copied."""

    def __init__(self) -> None:
        self.bytes = 0
        self.fail_at: int | None = None
        self.calls = 0

    def __call__(self, source: int, source_offset: int, length: int, target: int, offset: int) -> None:
        self.calls += 1
        assert length > 0
        if source_offset % BLOCK or length % BLOCK or offset % BLOCK:
            raise OSError(errno.EINVAL, "not aligned")
        assert source_offset + length <= os.fstat(source).st_size
        assert offset + length <= os.fstat(target).st_size
        if self.fail_at == self.calls:
            length //= 2  # a part may have been shared before it failed
        os.pwrite(target, os.pread(source, length, source_offset), offset)
        if self.fail_at == self.calls:
            raise OSError(errno.ENOSPC, "full")
        self.bytes += length


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted in MiB otherwise."""
    monkeypatch.setattr(cloning, "SMALLEST", 2 * BLOCK)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    stand_in = Copies()
    monkeypatch.setattr(platform_io, "clone_range", stand_in)
    return stand_in


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache.open(tmp_path / "cache") as opened:
        yield opened


@contextmanager
def opened_cache() -> Iterator[tuple[Path, Cache]]:
    """A directory and a cache for one example of a property."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "out").mkdir()
        with Cache.open(root / "cache") as opened:
            yield root / "out", opened


OBJECTS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from([2, 254, 256, 4096, 9000, 20000, 24576, 60002])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), objects=OBJECTS)
def test_any_mixture_of_staged_cached_and_cloned_payloads_gives_the_same_files(data, objects):
    numbered = [(f"o{index}", name, size) for index, (name, size) in enumerate(objects)]
    limit = data.draw(st.sampled_from([None, 28672, 40960]))
    stand_in = Copies()
    with (
        opened_cache() as (out, cache),
        mock.patch.object(payload, "WRITERS", data.draw(st.integers(1, 6))),
        mock.patch.object(payload, "BATCH", data.draw(st.sampled_from([1, 6000, 30000, 1 << 24]))),
        mock.patch.object(cloning, "SMALLEST", data.draw(st.sampled_from([1, 2 * BLOCK]))),
        mock.patch.object(cloning, "SMALLEST_SHARE", data.draw(st.sampled_from([0.0, 0.5]))),
        mock.patch.object(platform_io, "clone_range", stand_in),
    ):
        kept = data.draw(st.lists(st.sampled_from(numbered), unique=True))
        old = Made(
            [*(("p" + name if data.draw(st.booleans()) else name, kind, size) for name, kind, size in kept),
             *(("x", data.draw(st.sampled_from("ax")), size) for size in data.draw(st.sampled_from([(), (9000,)])))]
            or [("x", "x", 2)],
            out / "m.ninfer",
            data.draw(st.sampled_from([limit, None, 36864])),
        )  # fmt: skip
        old.store(cache)
        old.write(cache)
        previous = old.published()
        for _ in range(data.draw(st.integers(0, 3))):
            path = data.draw(st.sampled_from(old.paths))
            start = old.layout.payload_offset if path == old.entry else BLOCK
            change_byte(path, data.draw(st.integers(start, path.stat().st_size - 1)))
        stand_in.fail_at = data.draw(st.sampled_from([None, None, 1, 2]))
        made = Made(
            numbered,
            old.entry,
            limit,
            text=data.draw(st.sampled_from(["r", "r" * 5000])),
            resources=data.draw(st.sampled_from([{}, {"notes": b"text"}])),
        )
        made.store(cache)
        staged = data.draw(st.lists(st.sampled_from(range(len(numbered))), unique=True))
        made.write(cache, staged=staged, previous=previous)


def test_large_payloads_are_divided_between_threads_and_written_forwards(tmp_path, cache, monkeypatch):
    made = Made([("a", "a", 300_000), ("b", "b", 100), ("c", "c", 200_000)], tmp_path / "m.ninfer")
    made.store(cache)
    monkeypatch.setattr(payload, "BATCH", 20_000)
    arrived = threading.Barrier(3, timeout=30)
    first: dict[str, int] = {}
    put = payload.PayloadWriter.put

    def watched(self, offset, data):
        name = threading.current_thread().name
        if name not in first:
            first[name] = offset
            arrived.wait()  # no thread goes on before all have something to write
        put(self, offset, data)

    monkeypatch.setattr(payload.PayloadWriter, "put", watched)
    monkeypatch.setattr(payload, "WRITERS", 3)
    made.write(cache)
    assert sorted(first.values()) == [0, 20_000, 40_000]


def test_a_damaged_payload_stops_every_thread_and_publishes_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(payload, "BATCH", 5000)
    made = Made([(f"o{index}", f"n{index}", 20_000) for index in range(20)], tmp_path / "m.ninfer")
    made.store(cache)
    lost = made.records[7]
    wrong = content("something else", 5000)
    made.records[7] = ActionRecord(
        lost.key, lost.manifest, "encode", "m", "bf16", ((block_digest(wrong), 5000), *lost.blocks[1:]), 20_000, b""
    )
    with pytest.raises(PayloadLostError) as caught:
        made.write(cache)
    assert caught.value.key == lost.key
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_an_error_of_one_writer_is_the_error_of_linking(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(payload, "BATCH", 5000)
    made = Made([(f"o{index}", f"n{index}", 20_000) for index in range(20)], tmp_path / "m.ninfer")
    made.store(cache)
    write = payload.PayloadWriter.put

    def full(self, offset, data):
        if offset > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "m.ninfer")
        write(self, offset, data)

    monkeypatch.setattr(payload.PayloadWriter, "put", full)
    with pytest.raises(OSError, match="No space left"):
        made.write(cache)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


# -- cloning -------------------------------------------------------------------------------------------------------

LAYERS = [(f"layer{index}", f"w{index}", 40_000 if index % 2 else 81_920) for index in range(8)]
CHANGED = [(name, "other" if name == "layer3" else kind, size) for name, kind, size in LAYERS]


def relinked(directory: Path, cache: Cache, **options: int | None) -> tuple[Made, Made]:
    """An artifact that is published, and one with another layer 3."""
    old = Made(LAYERS, directory / "m.ninfer", **options)
    old.store(cache)
    old.write(cache)
    new = Made(CHANGED, old.entry, **options)
    new.store(cache)
    return old, new


LIMITS = [(None, 7), (200_704, 6)]
"""Most bytes of a file, and how many payloads can be cloned: not one that has less than two blocks in a file."""


@pytest.mark.parametrize(("limit", "cloned"), LIMITS)
def test_what_did_not_change_is_cloned(tmp_path, cache, copies, limit, cloned):
    old, new = relinked(tmp_path, cache, max_file_bytes=limit)
    done = new.write(cache, previous=old.published())
    assert (done.cloned, done.refused) == (cloned, 0)
    assert 400_000 < copies.bytes < sum(size for _, _, size in LAYERS)


def test_neighbours_are_cloned_together(tmp_path, cache, copies):
    old, new = relinked(tmp_path, cache)
    new.write(cache, previous=old.published())
    assert copies.calls == 2


def test_flipped_bytes_are_noticed_and_not_taken_over(tmp_path, cache, copies):
    old, new = relinked(tmp_path, cache)
    offsets = {item.id: item.offset + old.layout.payload_offset for item in old.layout.directory.objects}
    change_byte(old.entry, offsets["layer5"] + 12_345)
    change_byte(old.entry, offsets["layer5"] + 40_000)  # padding
    change_byte(old.entry, offsets["layer0"])
    done = new.write(cache, previous=old.published())
    assert (done.cloned, done.refused) == (7, 2)


@pytest.mark.parametrize("touch", ["time", "length", "gone", "id"])
def test_an_artifact_that_somebody_touched_is_left_alone(tmp_path, cache, copies, touch):
    old, new = relinked(tmp_path, cache)
    published = old.published()
    if touch == "time":
        os.utime(old.entry)
    elif touch == "length":
        os.truncate(old.entry, old.entry.stat().st_size - 1)
    elif touch == "gone":
        old.entry.unlink()
    else:
        change_byte(old.entry, 20)
    assert new.write(cache, previous=published) == link.Written(0, 0)
    assert copies.calls == 0


def test_little_that_is_the_same_is_copied(tmp_path, cache, copies):
    old = Made(LAYERS[:2], tmp_path / "m.ninfer")
    old.store(cache)
    old.write(cache)
    new = Made([*LAYERS[:2], ("more", "more", 200_000)], old.entry)
    new.store(cache)
    assert new.write(cache, previous=old.published()) == link.Written(0, 0)
    assert copies.calls == 0


def test_what_lies_elsewhere_by_less_than_a_block_is_copied(tmp_path, cache, copies):
    old = Made(LAYERS, tmp_path / "m.ninfer")
    old.store(cache)
    old.write(cache)
    new = Made([LAYERS[0], ("small", "small", 256), *LAYERS[1:]], old.entry)
    new.store(cache)
    assert new.write(cache, previous=old.published()).cloned == 0
    new = Made([LAYERS[0], ("page", "page", 4096), *LAYERS[1:]], tmp_path / "n.ninfer")
    new.store(cache)
    old.write(cache)
    assert new.write(cache, previous=old.published()).cloned == len(LAYERS)


def test_a_file_system_without_sharing_copies(tmp_path, cache, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(platform_io, "clone_range", refuse)
    old, new = relinked(tmp_path, cache)
    assert new.write(cache, previous=old.published()) == link.Written(0, 0)


# -- file systems that share --------------------------------------------------------------------------------------

FILE_SYSTEMS = {
    "xfs": (["mkfs.xfs", "-q", "-m", "reflink=1"], 320 << 20),
    "btrfs": (["mkfs.btrfs", "-q"], 128 << 20),
}


@pytest.fixture(params=FILE_SYSTEMS)
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system that can share."""
    command, size = FILE_SYSTEMS[request.param]
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if shutil.which(command[0], path=path) is None:
        pytest.skip(f"{command[0]} is not installed")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    image.touch()
    os.truncate(image, size)
    environment = {**os.environ, "PATH": path}
    made = subprocess.run([*command, str(image)], capture_output=True, check=False, env=environment)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, check=False)
    if made.returncode or mounted.returncode:
        pytest.skip(f"a loop of {request.param} cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


FIEMAP = struct.Struct("=QQLLLL")
EXTENT = struct.Struct("=QQQQQLLLL")
SHARED = 0x2000


def shared_bytes(path: Path) -> int:
    """Bytes of a file in extents that other files have too."""
    room = 500
    request = bytearray(FIEMAP.pack(0, 1 << 62, 1, 0, room, 0) + bytes(room * EXTENT.size))
    with path.open("rb") as file:
        fcntl.ioctl(file, 0xC020660B, request)
    count = FIEMAP.unpack_from(request)[3]
    extents = [EXTENT.unpack_from(request, FIEMAP.size + index * EXTENT.size) for index in range(count)]
    return sum(extent[2] for extent in extents if extent[5] & SHARED)


@pytest.mark.parametrize(("limit", "cloned"), LIMITS)
def test_a_cloned_link_shares_its_extents(sharing, cache, limit, cloned):
    old, new = relinked(sharing, cache, max_file_bytes=limit)
    aside = [path.rename(path.with_name(f"old-{path.name}")) for path in old.paths]
    published = old.published(aside)
    done = new.write(cache, previous=published)
    assert (done.cloned, done.refused) == (cloned, 0)
    assert sum(map(shared_bytes, new.paths)) > 350_000
    assert [path.read_bytes() for path in aside] == old.expected()


def test_a_flipped_byte_is_not_shared(sharing, cache):
    old, new = relinked(sharing, cache)
    aside = [path.rename(path.with_name(f"old-{path.name}")) for path in old.paths]
    offset = next(item.offset for item in old.layout.directory.objects if item.id == "layer6")
    change_byte(aside[0], old.layout.payload_offset + offset + 30_000)
    done = new.write(cache, previous=old.published(aside))
    assert (done.cloned, done.refused) == (7, 1)
    assert shared_bytes(new.entry) > 300_000


def test_a_build_clones_from_the_artifact_that_it_replaces(sharing, checkpoints, tmp_path, monkeypatch):
    written = []
    write = link.write
    monkeypatch.setattr(link, "write", lambda *args, **more: written.append(write(*args, **more)) or written[-1])
    monkeypatch.setattr(cloning, "SMALLEST_SHARE", 0.0)
    (tmp_path / "over.py").write_text(
        "def configure(model, recipe, sources):\n"
        "    recipe.assign('text/layers/0/mlp/down', format='q8_g32_fp16', method='grouped_absmax')\n"
    )
    (tmp_path / "ninferbuild.toml").write_text(
        '[cache]\ndir = "cache"\n[targets.m]\nrecipe = "qwen3_6_27b"\ncomponents = ["text"]\ndevice = "cpu"\n'
        f'model = "{checkpoints / "dense"}"\nout = "{sharing / "m.ninfer"}"\n'
    )

    def made(*sets: str) -> BuildResult:
        return build(load_target("m", tmp_path, sets=sets))

    first, second = made(), made("overrides=['over.py']")
    assert second.executed == 1
    assert second.artifact_id != first.artifact_id
    assert written[1].cloned > 0
    assert written[1].refused == 0
    cloned = second.out.read_bytes()
    second.out.unlink()
    assert made("overrides=['over.py']").out.read_bytes() == cloned
    assert written[2].cloned == 0


def test_a_header_that_promises_more_than_there_is_makes_a_file_foreign(tmp_path):
    """Whatever its length field says, nobody tries to read that much."""
    path = tmp_path / "m.ninfer"
    path.write_bytes(HEADER.pack(MAGIC, 1 << 62, bytes(16)) + b"{}")
    assert standing.made_here(path) is None
    with pytest.raises(FileExistsError, match="not an artifact made by ninferbuild"):
        standing.refuse_foreign([path], overwrite=False)
