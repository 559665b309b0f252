from __future__ import annotations

import os
from pathlib import Path
import struct
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from ninferbuild.artifact.framing import HEADER, MAGIC, PART_MAGIC
from ninferbuild.artifact.reader import Artifact
from ninferbuild.artifact.schema import ArtifactError, ResourceSpec
from ninferbuild.artifact.writer import ArtifactWriter


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class TestEntry:
    def test_what_an_open_artifact_shows(self, demo, demo_data):
        with Artifact.open(str(demo)) as artifact:
            assert artifact.path == demo
            assert artifact.artifact_id == bytes(range(16))
            assert artifact.payload_offset == 4096
            assert (artifact.payload_bytes, artifact.file_bytes) == (516, 4612)
            assert list(artifact.by_id) == [item.id for item in artifact.objects] == ["note", "m", "d"]
            assert {name: artifact.read_object(name) for name in artifact.by_id} == demo_data
            assert list(artifact.iter_object("m", 5)) == [demo_data["m"][i : i + 5] for i in (0, 5, 10)]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda data: b"", "header"),
            (lambda data: data[:31], "header"),
            (lambda data: b"NOTNINFR" + data[8:], "magic is missing"),
            (lambda data: MAGIC[:7] + b"\x02" + data[8:], "version 2 is obsolete"),
            (lambda data: MAGIC[:7] + b"\x04" + data[8:], "version 4 is unknown"),
            (lambda data: PART_MAGIC + data[8:], "continuation"),
            (lambda data: data[:8] + struct.pack("<Q", 0) + data[16:], "empty directory"),
            (lambda data: data[:8] + struct.pack("<Q", 2**64 - 1) + data[16:], "4612"),
            (lambda data: data[:8] + struct.pack("<Q", 800) + data[16:], "JSON"),
            (lambda data: data[:8] + struct.pack("<Q", 4065) + data[16:], "JSON"),
            (lambda data: data[:-1], "4611 bytes"),
            (lambda data: data + b"\0", "4613 bytes"),
            (lambda data: data[:2000], "2000"),
        ],
    )
    def test_refused(self, demo, change, message):
        demo.write_bytes(change(demo.read_bytes()))
        with pytest.raises(ArtifactError, match=message) as caught:
            Artifact(demo)
        assert str(caught.value).startswith(f"{demo}: ")

    def test_a_shorter_json_region_and_other_alignment_bytes(self, demo, demo_data):
        patch(demo, 8, struct.pack("<Q", 3000))
        patch(demo, 32 + 3000, b"\xff" * (4064 - 3000))
        with Artifact(demo) as artifact:
            assert artifact.payload_offset == 4096
            assert artifact.read_object("m") == demo_data["m"]

    def test_errors_of_the_system_pass_through(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            Artifact(tmp_path / "missing")
        with pytest.raises(IsADirectoryError):
            Artifact(tmp_path)

    def test_a_symbolic_link(self, demo):
        link = demo.parent / "link.ninfer"
        link.symlink_to(demo.name)
        with Artifact(link) as artifact:
            assert artifact.read_object("note") == b"abc"

    def test_reading_after_close(self, demo):
        artifact = Artifact(demo)
        pieces = artifact.iter_range(0, 516, 100)
        assert len(next(pieces)) == 100
        artifact.close()
        artifact.close()
        for read in (lambda: artifact.read_range(0, 1), lambda: artifact.read_object("m"), lambda: next(pieces)):
            with pytest.raises(ArtifactError, match="closed"):
                read()


class TestRanges:
    def test_across_files(self, split_set):
        expected = bytes((7 * i + 3) % 251 for i in range(20000))
        with Artifact(split_set) as artifact:
            assert artifact.file_bytes == 32288
            assert artifact.read_range(8190, 4).hex() == "6970777e"
            assert artifact.read_range(16382, 4).hex() == "dde4ebf2"
            assert artifact.read_object("data") == expected
            sizes = [len(piece) for piece in artifact.iter_range(100, 19000, 5000)]
            assert sizes == [5000, 3092, 5000, 3192, 2716]

    def test_pieces_are_the_range(self, split_set):
        expected = bytes((7 * i + 3) % 251 for i in range(20000))
        with Artifact(split_set) as artifact:

            @settings(deadline=None)
            @given(st.integers(0, 20000), st.integers(0, 20000), st.integers(1, 9000))
            def check(a, b, chunk):
                begin, end = min(a, b), max(a, b)
                pieces = list(artifact.iter_range(begin, end - begin, chunk))
                assert b"".join(pieces) == expected[begin:end]
                assert all(0 < len(piece) <= chunk for piece in pieces)

            check()

    def test_bad_ranges(self, demo):
        with Artifact(demo) as artifact:
            for offset, length in ((0, 517), (516, 1), (517, 0), (2**64 - 1, 2**64 - 1)):
                with pytest.raises(ArtifactError, match="exceeds payload"):
                    artifact.read_range(offset, length)
            for arguments in ((-1, 1), (0, -1), (True, 1), (0, 1.0), (0, 1, 0)):
                pieces = artifact.iter_range(*arguments)
                with pytest.raises(ArtifactError):
                    next(pieces)
            assert artifact.read_range(516, 0) == b""

    def test_objects_that_cannot_be_had(self, demo):
        data = demo.read_bytes()
        demo.write_bytes(data.replace(b'"bf16"', b'"bf15"'))
        with Artifact(demo) as artifact:
            with pytest.raises(ArtifactError, match="no object 'x'"):
                artifact.object("x")
            with pytest.raises(ArtifactError, match="bf15"):
                artifact.read_object("m")
            assert artifact.read_object("note") == b"abc"


class TestParts:
    def test_a_missing_part_is_missed_when_needed(self, split_set):
        Path(f"{split_set}.part-0001").unlink()
        with Artifact(split_set) as artifact:
            assert len(artifact.read_range(0, 100)) == 100
            assert artifact.read_range(20000, 0) == b""
            with pytest.raises(FileNotFoundError):
                artifact.read_range(8200, 10)

    def test_parts_are_found_by_their_recorded_names(self, split_set):
        part = Path(f"{split_set}.part-0001")
        expected = part.read_bytes()[4096:4106]
        part.rename(split_set.with_name("moved"))
        data = split_set.read_bytes()
        text = data[32:4096].rstrip().replace(b'"s.ninfer.part-0001"', b'"moved"')
        split_set.write_bytes(data[:32] + text.ljust(4064) + data[4096:])
        with Artifact(split_set) as artifact:
            assert artifact.read_range(8192, 10) == expected

    @pytest.mark.parametrize(
        "header",
        [
            HEADER.pack(PART_MAGIC, 1, bytes(16)),
            HEADER.pack(PART_MAGIC, 2, bytes(range(16))),
            HEADER.pack(MAGIC, 1, bytes(range(16))),
        ],
    )
    def test_a_part_of_something_else(self, split_set, header):
        patch(Path(f"{split_set}.part-0001"), 0, header)
        with Artifact(split_set) as artifact:
            assert artifact.read_range(0, 8192)
            for _ in range(2):
                with pytest.raises(ArtifactError, match="does not belong to this entry"):
                    artifact.read_range(8192, 1)

    @pytest.mark.parametrize("size", [12287, 12289, 20])
    def test_a_part_of_another_length(self, split_set, size):
        os.truncate(f"{split_set}.part-0001", size)
        with Artifact(split_set) as artifact, pytest.raises(ArtifactError):
            artifact.read_range(8192, 1)

    def test_a_file_that_shrinks_while_open(self, split_set):
        with Artifact(split_set) as artifact:
            assert artifact.read_range(8192, 1)
            os.truncate(f"{split_set}.part-0001", 5000)
            with pytest.raises(ArtifactError, match="ended"):
                artifact.read_range(8192, 8192)


TOKENS = [b"{", b"}", b"[[[[", b'"', b"1e999", b"-0", b"\\ud800", b"null", b"true"]


def small_set(directory: Path) -> Path:
    path = directory / "f.ninfer"
    with ArtifactWriter(
        path,
        [ResourceSpec("r", 9000)],
        components={"text": {"config": {"k": [1.5, "\u00e9", None]}, "resources": {"r": "r"}}},
        bindings={},
        max_file_bytes=8192,
    ) as writer:
        writer.write_zeros("r", 0, 9000)
    return path


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["f.ninfer", "f.ninfer.part-0001"]),
            st.sampled_from(["overwrite", "insert", "delete"]),
            st.integers(0, 420),
            st.binary(min_size=1, max_size=6) | st.sampled_from(TOKENS),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_damaged_files_give_only_the_documented_errors(changes):
    with tempfile.TemporaryDirectory() as name:
        path = small_set(Path(name))
        for file, kind, offset, data in changes:
            target = path.with_name(file)
            old = target.read_bytes()
            rest = old[offset:] if kind == "insert" else old[offset + len(data) :]
            target.write_bytes(old[:offset] + (b"" if kind == "delete" else data) + rest)
        try:
            with Artifact(path) as artifact:
                for item in artifact.objects:
                    artifact.read_object(item.id)
        except (ArtifactError, OSError):
            pass
