from __future__ import annotations

import errno
import hashlib
from itertools import permutations
import os
from pathlib import Path
import stat
import struct
from threading import Thread

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from ninferbuild.artifact import publication
from ninferbuild.artifact.coverage import Coverage
from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import ArtifactError, ResourceSpec, TensorSpec
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.artifact.writer import ArtifactWriter

DEMO_SHA = "1bb8cae869c6789835a51a33ec499c8443220dfd5320a2295e5931c6feb1eb91"
SPLIT = {
    "s.ninfer": (12288, "5ac831f4775d7228eb335f486fe7164bcd63e6685e79d614bb4a88cbf0931c12"),
    "s.ninfer.part-0001": (12288, "7998f88d0d2e378094c846bfd192abf28ca1e6ef43b914280937c942181cb6ef"),
    "s.ninfer.part-0002": (7712, "eaea8d3569aa6fe386428f48d4fc0beb01db9adf76fc47313a4397e2d1321687"),
}


def contents(directory: Path) -> dict[str, tuple[int, str]]:
    """Length and SHA-256 of every file."""
    return {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(directory.iterdir())
    }


class TestBytes:
    def test_single_file(self, demo):
        data = demo.read_bytes()
        assert data[:32].hex() == "4e494e4645520003e00f000000000000000102030405060708090a0b0c0d0e0f"
        assert data[4096:] == (
            b"abc" + bytes(253) + bytes.fromhex("803f80bf00000080807fc17f") + bytes(244) + bytes.fromhex("00002040")
        )
        assert contents(demo.parent) == {"demo.ninfer": (4612, DEMO_SHA)}

    @pytest.mark.parametrize("order", list(permutations(range(5)))[::7])
    def test_any_order_of_regions(self, tmp_path, demo_writer, demo_data, order):
        regions = [
            ("note", 0, b"abc"),
            ("m", 0, demo_data["m"][:5]),
            ("m", 5, demo_data["m"][5:7]),
            ("m", 7, demo_data["m"][7:]),
            ("d", 0, memoryview(demo_data["d"])),
        ]
        with demo_writer(tmp_path / "demo.ninfer") as writer:
            for index in order:
                writer.write_region(*regions[index])
        assert contents(tmp_path) == {"demo.ninfer": (4612, DEMO_SHA)}

    def test_parts(self, split_set):
        assert contents(split_set.parent) == SPLIT

    @pytest.mark.parametrize(
        ("limit", "files"),
        [
            (1000000, [("", 14352, "1a02d63857c99b9f621b59daf9afc3761048eab1c746f9cac053e0be47e162fd")]),
            (
                8192,
                [
                    ("", 8192, "a3d51fe0c8836e056589e2bcfed67a71138c1f2fbe7c4fa42c72e1886d89d18a"),
                    (".part-0001", 8192, "b946fa289b8125f67c903a7fccdea20f6979e85986676747e15a5657430797c7"),
                    (".part-0002", 6160, "64b4218576bdd4ebfa6ea0533e29cf50f25faee245770cd2c29d801910fc581a"),
                ],
            ),
        ],
    )
    def test_all_formats(self, tmp_path, patterns, limit, files):
        shapes = {
            **{name: ((3, 130), name, "row_split_k128_v1") for name in QUANT_FORMATS},
            "nvfp4": ((128, 64), "nvfp4", "block_scale_k16_m128x4_v1"),
            "fp8": ((4, 100), "fp8_e4m3fn_row_bf16", "row_scale_v1"),
            "i": ((2, 2), "int32", "contiguous_le_v1"),
        }
        specs = [ResourceSpec("res", 5), *(TensorSpec(name, *spec) for name, spec in shapes.items())]
        path = tmp_path / f"all{limit}.ninfer"
        with ArtifactWriter(
            path,
            specs,
            components={"text": {"config": {}}},
            bindings={name: {"object": name} for name in shapes},
            max_file_bytes=limit,
            artifact_id=bytes(range(16)),
        ) as writer:
            writer.write_object("res", b"hello")
            for name in QUANT_FORMATS:
                TensorOutput(writer, name).write_codes(0, *patterns.grouped(name))
            TensorOutput(writer, "nvfp4").write_codes(0, *patterns.nvfp4(128, 64), struct.pack("<f", 2.5))
            TensorOutput(writer, "fp8").write_codes(0, *patterns.fp8())
            values = torch.tensor([0, 1, -1, -(2**31)], dtype=torch.int32)
            TensorOutput(writer, "i").write_values(0, values)
        offsets = [item.offset for item in writer.objects]
        assert offsets == [0, 256, 1024, 2048, 3072, 4096, 4608, 9472, 10240]
        assert contents(tmp_path) == {path.name + suffix: (size, digest) for suffix, size, digest in files}
        with Artifact(path) as artifact:
            payload = artifact.read_range(0, artifact.payload_bytes)
        assert hashlib.sha256(payload).hexdigest() == "02b58c372205a6ab0e6813a78eb2332fb381509bfff808948f352dee5793ac04"


class TestRegions:
    def test_overlap_fails_the_writer(self, tmp_path, demo_writer):
        writer = demo_writer(tmp_path / "demo.ninfer")
        writer.write_region("m", 2, b"12345")
        with pytest.raises(ArtifactError, match="duplicate output coverage"):
            writer.write_region("m", 6, b"5")
        with pytest.raises(ArtifactError, match="failed"):
            writer.write_region("note", 0, b"abc")
        with pytest.raises(ArtifactError, match="failed"):
            writer.finish()
        assert contents(tmp_path) == {}

    def test_a_swallowed_error_leaves_nothing(self, tmp_path, demo_writer):
        def misuse():
            with demo_writer(tmp_path / "demo.ninfer") as writer:
                writer.write_object("note", b"abc")
                with pytest.raises(ArtifactError, match="duplicate"):
                    writer.write_region("note", 0, b"a")

        with pytest.raises(ArtifactError, match="failed"):
            misuse()
        assert contents(tmp_path) == {}

    @pytest.mark.parametrize(
        ("name", "offset", "data"),
        [
            ("other", 0, b"a"),
            ("m", -1, b"a"),
            ("m", True, b"a"),
            ("m", 12, b"a"),
            ("m", 13, b""),
            ("m", 0, bytes(13)),
        ],
    )
    def test_bad_arguments_leave_the_writer_usable(self, tmp_path, demo_writer, demo_data, name, offset, data):
        with demo_writer(tmp_path / "demo.ninfer") as writer:
            with pytest.raises(ArtifactError):
                writer.write_region(name, offset, data)
            with pytest.raises(ArtifactError):
                writer.write_zeros(name, offset, len(data) or 0)
            for key, value in demo_data.items():
                writer.write_object(key, value)
            writer.write_region("m", 12, b"")
        assert contents(tmp_path) == {"demo.ninfer": (4612, DEMO_SHA)}

    def test_zeros_count_as_coverage(self, tmp_path):
        size = (5 << 20) + 17
        path = tmp_path / "z.ninfer"
        with ArtifactWriter(
            path, [ResourceSpec("z", size)], components={"text": {"config": {}}}, bindings={}, max_file_bytes=1 << 20
        ) as writer:
            writer.write_zeros("z", 1, size - 2)
            writer.write_region("z", 0, b"a")
            writer.write_region("z", size - 1, b"b")
        with Artifact(path) as artifact:
            assert len(artifact.directory.files) == 6
            assert artifact.read_object("z") == b"a" + bytes(size - 2) + b"b"

    def test_missing_bytes(self, tmp_path, demo_writer, demo_data):
        writer = demo_writer(tmp_path / "demo.ninfer")
        writer.write_object("note", [b"a", memoryview(b"bc")])
        writer.write_object("m", demo_data["m"][:11])
        with pytest.raises(ArtifactError, match=r"'m': coverage is incomplete, \[11, 12\)"):
            writer.finish()
        assert contents(tmp_path) == {}

    def test_regions_from_several_threads(self, tmp_path):
        size = 64 * 1000
        data = os.urandom(size)
        path = tmp_path / "t.ninfer"
        with ArtifactWriter(
            path,
            [ResourceSpec("r", size)],
            components={"text": {"config": {}}},
            bindings={},
            max_file_bytes=12288,
        ) as writer:

            def work(first):
                for start in range(first * 1000, size, 4000):
                    writer.write_region("r", start, data[start : start + 1000])

            threads = [Thread(target=work, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        with Artifact(path) as artifact:
            assert artifact.read_object("r") == data

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=40))
    def test_coverage_is_a_set_of_bytes(self, regions):
        coverage, covered = Coverage(), set()
        for begin, length in regions:
            region = set(range(begin, begin + length))
            assert coverage.add(begin, begin + length) == covered.isdisjoint(region)
            if covered.isdisjoint(region):
                covered |= region
        missing = [byte for byte in range(72) if byte not in covered]
        gap = coverage.first_gap(72)
        assert (gap[0] if gap else None) == (missing[0] if missing else None)
        if gap:
            assert covered.isdisjoint(range(*gap))


class TestPublication:
    def test_an_exception_leaves_nothing(self, tmp_path, demo_writer):
        def interrupted():
            with demo_writer(tmp_path / "demo.ninfer") as writer:
                writer.write_object("note", b"abc")
                raise KeyError("stop")

        with pytest.raises(KeyError):
            interrupted()
        assert contents(tmp_path) == {}

    @pytest.mark.parametrize("name", ["s.ninfer", "s.ninfer.part-0002"])
    def test_existing_files_are_refused(self, tmp_path, name):
        (tmp_path / name).write_text("mine")
        with pytest.raises(FileExistsError, match=name):
            self.split_writer(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"

    @pytest.mark.parametrize("name", ["s.ninfer", "s.ninfer.part-0001"])
    @pytest.mark.parametrize("dangling", [False, True])
    def test_targets_that_appear_meanwhile(self, tmp_path, name, dangling):
        writer = self.split_writer(tmp_path)
        writer.write_zeros("data", 0, 20000)
        if dangling:
            (tmp_path / name).symlink_to("nowhere")
        else:
            (tmp_path / name).write_text("mine")
        with pytest.raises(FileExistsError):
            writer.finish()
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert dangling or (tmp_path / name).read_text() == "mine"

    @staticmethod
    def split_writer(directory: Path) -> ArtifactWriter:
        return ArtifactWriter(
            directory / "s.ninfer",
            [ResourceSpec("data", 20000)],
            components={"text": {"config": {}, "resources": {"data": "data"}}},
            bindings={},
            max_file_bytes=12288,
        )

    def test_the_entry_comes_last(self, tmp_path, monkeypatch):
        order = []
        link = os.link
        monkeypatch.setattr(os, "link", lambda old, new: (order.append(Path(new).name), link(old, new)))
        writer = self.split_writer(tmp_path)
        writer.write_zeros("data", 0, 20000)
        writer.finish()
        assert order == ["s.ninfer.part-0001", "s.ninfer.part-0002", "s.ninfer"]

    def test_finish_twice_and_abort_after_finish(self, tmp_path, demo_writer, demo_data):
        writer = demo_writer(tmp_path / "new" / "demo.ninfer")
        for name, data in demo_data.items():
            writer.write_object(name, data)
        directory = writer.finish()
        assert writer.finish() is directory
        writer.abort()
        assert contents(tmp_path / "new") == {"demo.ninfer": (4612, DEMO_SHA)}
        with pytest.raises(ArtifactError, match="finished"):
            writer.write_region("note", 0, b"")

    def test_a_file_of_another_length(self, tmp_path, demo_writer, demo_data):
        writer = demo_writer(tmp_path / "demo.ninfer")
        for name, data in demo_data.items():
            writer.write_object(name, data)
        (temporary,) = tmp_path.iterdir()
        os.truncate(temporary, 100)
        with pytest.raises(OSError, match="instead of 4612"):
            writer.finish()
        assert contents(tmp_path) == {}

    def test_a_full_disk_fails_the_writer(self, tmp_path, demo_writer, monkeypatch):
        writer = demo_writer(tmp_path / "demo.ninfer")

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write_region("note", 0, b"abc")
        monkeypatch.undo()
        with pytest.raises(ArtifactError, match="failed"):
            writer.write_region("d", 0, b"abcd")
        writer.abort()
        assert contents(tmp_path) == {}

    def test_short_writes_go_on(self, tmp_path, demo_writer, demo_data, monkeypatch):
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, position: pwrite(file, data[:1000], position))
        with demo_writer(tmp_path / "demo.ninfer") as writer:
            for name, data in demo_data.items():
                writer.write_object(name, data)
        assert contents(tmp_path) == {"demo.ninfer": (4612, DEMO_SHA)}

    def test_dirty_files_are_synced_on_the_way(self, tmp_path, demo_writer, demo_data, monkeypatch):
        monkeypatch.setattr(publication, "SYNC_BYTES", 4)
        with demo_writer(tmp_path / "demo.ninfer") as writer:
            for name, data in demo_data.items():
                writer.write_object(name, data)
        assert contents(tmp_path) == {"demo.ninfer": (4612, DEMO_SHA)}

    @pytest.mark.parametrize("occupied", [False, True])
    def test_file_systems_without_hard_links(self, tmp_path, demo_writer, demo_data, monkeypatch, occupied):
        def refuse(*_):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        path = tmp_path / "demo.ninfer"
        writer = demo_writer(path)
        for name, data in demo_data.items():
            writer.write_object(name, data)
        if occupied:
            path.write_text("mine")
            with pytest.raises(FileExistsError):
                writer.finish()
            assert path.read_text() == "mine"
        else:
            writer.finish()
            assert contents(tmp_path) == {"demo.ninfer": (4612, DEMO_SHA)}
        assert [item.name for item in tmp_path.iterdir()] == ["demo.ninfer"]

    def test_the_mode_follows_the_umask(self, tmp_path, demo_writer, demo_data):
        before = os.umask(0o027)
        try:
            with demo_writer(tmp_path / "demo.ninfer") as writer:
                for name, data in demo_data.items():
                    writer.write_object(name, data)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "demo.ninfer").stat().st_mode) == 0o640


class TestConstruction:
    def test_ids(self, tmp_path, demo_writer):
        writers = [
            ArtifactWriter(tmp_path / name, [ResourceSpec("r", 1)], components={"t": {"config": {}}}, bindings={})
            for name in "ab"
        ]
        assert len({writer.artifact_id for writer in writers}) == 2
        assert all(writer.artifact_id[6] >> 4 == 4 for writer in writers)
        for writer in writers:
            writer.abort()
        with pytest.raises(ArtifactError, match="16 bytes"):
            ArtifactWriter(
                tmp_path / "c",
                [ResourceSpec("r", 1)],
                components={"t": {"config": {}}},
                bindings={},
                artifact_id=b"short",
            )
        assert contents(tmp_path) == {}

    @pytest.mark.parametrize(
        "broken",
        [
            {"components": {"text": {"config": {"x": float("nan")}}}},
            {"components": {}},
            {"bindings": {"w": {"object": "nothing"}}},
            {"bindings": {"w": {"parts": ({"object": "m", "range": [0, 1]},)}}},
            {"uses": {"a": 1}},
            {"metadata": {"name": ""}},
            {"max_file_bytes": 100},
        ],
    )
    def test_an_invalid_description_creates_nothing(self, tmp_path, broken):
        arguments = {"components": {"text": {"config": {}}}, "bindings": {}, **broken}
        with pytest.raises(ArtifactError):
            ArtifactWriter(tmp_path / "sub" / "a", [TensorSpec("m", (2, 3), "bf16", "contiguous_le_v1")], **arguments)
        assert contents(tmp_path) == {}

    def test_errors_of_the_system_pass_through(self, tmp_path, demo_writer):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file") as caught:
            demo_writer(tmp_path / "file" / "demo.ninfer")
        assert isinstance(caught.value, FileExistsError | NotADirectoryError)
