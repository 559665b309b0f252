"""Reading GGUF files: headers, tensors, and what is refused."""

from __future__ import annotations

from contextlib import suppress
import os
from pathlib import Path
import struct
import subprocess
import sys
from types import SimpleNamespace

from fixtures.gguf_files import gguf_bytes, key_value, string, tensor_entry, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from ninferbuild.errors import SourceChangedError
from ninferbuild.sources import gguf_header
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.opened import Sources, open_source
from ninferbuild.sources.safetensors import SafetensorsSource

Q8_0, Q4_K = 8, 12


def noise(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


@pytest.fixture
def raw(tmp_path):
    """``raw(bytes)`` → path of a file with these bytes."""

    def write(data: bytes) -> Path:
        path = tmp_path / "raw.gguf"
        path.write_bytes(data)
        return path

    return write


def test_layout_of_a_small_file(tmp_path):
    data = noise(68)
    path = write_gguf(tmp_path / "a.gguf", {"general.architecture": "qwen35"}, [("w", (2, 32), Q8_0, data)])
    with GGUFFile(path) as file:
        info = file.info("w")
        assert (file.header_bytes, file.data_offset, file.alignment) == (111, 128, 32)
        assert (info.shape, info.nbytes, info.type_name, info.elements) == ((2, 32), 68, "Q8_0", 64)
        assert file.kv == {"general.architecture": "qwen35"}
        assert file.file_bytes == path.stat().st_size
        assert file.data_bytes_available == file.file_bytes - 128
        assert file.tensor_bytes("w").tobytes() == data
        assert file.tensor_bytes("w", 3, 40).tobytes() == data[3:40]
        assert file.tensor_bytes("w", 5, 5).size == 0
        assert file.bytes_read == 68 + 37
        assert file.has("w")
        assert not file.has("v")


def test_values_of_every_type(raw):
    def entry(key, kind, data):
        return string(key) + struct.pack("<I", kind) + data

    def array(kind, count, data):
        return struct.pack("<IQ", kind, count) + data

    numbers = {
        "u8": (0, "B", 200),
        "i8": (1, "b", -3),
        "u16": (2, "H", 60000),
        "i16": (3, "h", -300),
        "u32": (4, "I", 2**32 - 1),
        "i32": (5, "i", -(2**31)),
        "f32": (6, "f", 0.5),
        "bool": (7, "?", True),
        "u64": (10, "Q", 2**64 - 1),
        "i64": (11, "q", -(2**63)),
        "f64": (12, "d", 1e300),
    }
    entries = [entry(key, kind, struct.pack(f"<{form}", value)) for key, (kind, form, value) in numbers.items()]
    entries.append(entry("text", 8, string("grün")))
    entries.append(entry("shorts", 9, array(3, 3, struct.pack("<3h", 1, -2, 3))))
    entries.append(entry("words", 9, array(8, 2, string("a") + string(b"\xff!"))))
    nested = array(9, 2, array(0, 2, b"\x01\x02") + array(8, 1, string("x")))
    entries.append(entry("nested", 9, nested))
    entries.append(entry("none", 9, array(4, 0, b"")))
    file = GGUFFile(raw(gguf_bytes(entries, [])))
    assert file.kv == {key: value for key, (_, _, value) in numbers.items()} | {
        "text": "grün",
        "shorts": [1, -2, 3],
        "words": ["a", "\N{REPLACEMENT CHARACTER}!"],
        "nested": [[1, 2], ["x"]],
        "none": [],
    }
    assert file.kv["bool"] is True


def test_long_arrays_cross_the_steps_of_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "STEP", 64)
    words = [f"token {i}" * (i % 5) for i in range(300)]
    words[77] = "long " * 50
    path = write_gguf(
        tmp_path / "a.gguf",
        {"words": words, "numbers": list(range(300)), "end": True},
        [("w", (1, 32), Q8_0, noise(34))],
    )
    file = GGUFFile(path)
    assert file.kv == {"words": words, "numbers": list(range(300)), "end": True}
    assert file.read_blocks("w").tobytes() == noise(34)


def test_the_header_digest_covers_the_header_and_nothing_else(tmp_path):
    def digest(name: str, key: str, data: bytes) -> bytes:
        return GGUFFile(write_gguf(tmp_path / name, {"key": key}, [("w", (1, 32), Q8_0, data)])).header_digest()

    first = digest("a.gguf", "x", noise(34))
    assert digest("b.gguf", "x", noise(34, 1)) == first
    assert digest("c.gguf", "y", noise(34)) != first


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_alignment(tmp_path, alignment):
    tensors = [(f"w{i}", (1, 32), Q8_0, noise(34, i)) for i in range(3)]
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {"x": "y"}, tensors, alignment))
    assert file.data_offset % alignment == 0
    assert file.alignment == alignment
    for name, _, _, data in tensors:
        assert file.info(name).offset % alignment == 0
        assert file.read_blocks(name).tobytes() == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes([], [], magic=b"GGUX"), "not a GGUF file"),
        (b"", "the file ends"),
        (b"GGUF\x03", "the file ends"),
        (gguf_bytes([], [], version=2), "unsupported GGUF version 2"),
        (gguf_bytes([], [], version=3 << 24), "a big-endian GGUF file"),
        (gguf_bytes([string("k") + struct.pack("<I", 13)], []), "unsupported GGUF value type 13 of 'k'"),
        (gguf_bytes([string("k") + struct.pack("<IIQ", 9, 13, 1) + b"1"], []), "unsupported GGUF value type 13"),
        (gguf_bytes([struct.pack("<Q", 1 << 40)], []), "runs past the header"),
        (gguf_bytes([struct.pack("<Q", 5) + b"abcd"], []), "GGUF string runs past the header"),
        (gguf_bytes([string("k") + struct.pack("<IQ", 8, 100)], []), "GGUF string runs past the header"),
        (gguf_bytes([string("k") + struct.pack("<IIQ", 9, 0, 1 << 60)], []), "array elements"),
        (gguf_bytes([string("k") + struct.pack("<IIQ", 9, 8, 1 << 60)], []), "array elements"),
        (gguf_bytes([string("k") + struct.pack("<IIQ", 9, 9, 1 << 60)], []), "array elements"),
        (gguf_bytes([string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40 + bytes(12)], []), "nested"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "the file ends"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "the file ends"),
        (gguf_bytes([], [string("w") + struct.pack("<I", 1 << 31) + bytes(64)]), "rank"),
        (gguf_bytes([string(b"\xff") + struct.pack("<IB", 0, 1)], []), "not UTF-8"),
        (gguf_bytes([key_value("k", 1), key_value("k", 2)], []), "duplicate key 'k'"),
        (gguf_bytes([], [tensor_entry("w", (32,), 8, 0), tensor_entry("w", (32,), 8, 64)]), "duplicate tensor 'w'"),
        (gguf_bytes([], [tensor_entry("w", (32,), 8, 16)]), "misaligned"),
        (gguf_bytes([], [tensor_entry("w", (32,), 8, 32)]), "does not follow the beginning"),
        (gguf_bytes([], [tensor_entry("v", (64,), 8, 0), tensor_entry("w", (32,), 8, 64)]), "'w' is overlapping 'v'"),
        (gguf_bytes([], [tensor_entry("v", (64,), 8, 0), tensor_entry("w", (32,), 8, 128)]), "'w' does not follow 'v'"),
        (gguf_bytes([key_value("general.alignment", 0)], []), "power of two"),
        (gguf_bytes([key_value("general.alignment", 48)], []), "power of two"),
        (gguf_bytes([key_value("general.alignment", "32")], []), "power of two"),
        (gguf_bytes([key_value("split.count", 2)], []), "gguf-split --merge"),
    ],
)
def test_refused_at_opening(raw, data, message):
    path = raw(data)
    with pytest.raises(ValueError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_blocks_of_another_size_under_the_same_type_are_noticed(raw):
    """Older writers used type 42 for 128 values in 34 bytes; the tensors then lie further apart or closer."""
    entries = [tensor_entry("v", (64, 256), 42, 0), tensor_entry("w", (64, 256), 42, 64 * 2 * 34)]
    with pytest.raises(ValueError, match=r"'w' is overlapping 'v' \(Q2_0\)"):
        GGUFFile(raw(gguf_bytes([], entries)))


def test_one_file_of_a_split_model_may_be_taken_as_it_stands(raw):
    path = raw(gguf_bytes([key_value("split.count", 2)], []))
    assert GGUFFile(path, shard=True).kv["split.count"] == 2
    assert GGUFFile(raw(gguf_bytes([key_value("split.count", 1)], []))).kv["split.count"] == 1


def test_a_huge_file_of_zeros_takes_no_memory(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 0, 1 << 38))
    os.truncate(path, 1 << 39)
    with pytest.raises(ValueError, match="array elements"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 38))
    os.truncate(path, 1 << 39)
    with pytest.raises(ValueError, match=f"string of {1 << 38} bytes"):
        GGUFFile(path)


def test_a_truncated_data_section_stops_only_its_readers(tmp_path):
    data = noise(3 * 34)
    path = write_gguf(tmp_path / "a.gguf", {}, [("w", (3, 32), Q8_0, data)])
    os.truncate(path, 96 + 3 * 34 - 1)
    file = GGUFFile(path)
    assert file.data_offset == 96
    assert file.data_bytes_available == 101
    assert file.read_blocks("w", 0, 1).tobytes() == data[:34]
    with pytest.raises(ValueError, match="truncated"):
        file.read_blocks("w", 2, 3)
    with pytest.raises(ValueError, match="past the end of the file"):
        file.tensor_bytes("w")


def test_rows_of_rank_3(tmp_path):
    data = noise(2 * 3 * 68)
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {}, [("w", (2, 3, 64), Q8_0, data)]))
    rows = file.read_blocks("w")
    assert rows.shape == (6, 68)
    assert rows.tobytes() == data
    assert file.read_blocks("w", 3, 6).tobytes() == data[3 * 68 :]
    assert file.read_blocks("w", 2, 2).shape == (0, 68)
    for begin, end in ((0, 7), (-1, 2), (4, 3)):
        with pytest.raises(ValueError, match="outside"):
            file.read_blocks("w", begin, end)


def test_rows_that_end_within_a_block(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {}, [("w", (2, 48), Q8_0, noise(102))]))
    assert file.tensor_bytes("w").size == 102
    with pytest.raises(ValueError, match="48 columns are not whole blocks"):
        file.read_blocks("w")
    file = GGUFFile(write_gguf(tmp_path / "b.gguf", {}, [("w", (3, 48, 0), Q8_0, b""), ("s", (), 0, noise(4))]))
    with pytest.raises(ValueError, match="no rows"):
        file.read_blocks("w")
    with pytest.raises(ValueError, match="no rows"):
        _ = file.info("s").rows


def test_broken_blocks(raw):
    file = GGUFFile(raw(gguf_bytes([], [tensor_entry("w", (1, 40), Q8_0, 0)])))
    with pytest.raises(ValueError, match="40 elements are not whole blocks"):
        _ = file.info("w").nbytes
    with pytest.raises(ValueError, match="not whole blocks"):
        file.tensor_bytes("w")


def test_direct_values(tmp_path):
    words = np.array([0x0000, 0x8000, 0x3F80, 0xC0A0, 0x7F80, 0x7FC1], np.uint16)
    f32 = np.array([[0.0, -0.0, 1.5], [3e38, 1e-45, np.inf]], np.float32)
    f16 = np.array([1.0, -0.5, 6e-8, 65504.0], np.float16)
    path = write_gguf(
        tmp_path / "a.gguf",
        {},
        [
            ("f32", (2, 3), 0, f32.tobytes()),
            ("f16", (4,), 1, f16.tobytes()),
            ("bf16", (3, 2), 30, words.tobytes()),
            ("q", (1, 32), Q8_0, noise(34)),
            ("scalar", (), 0, f32[0, 2:].tobytes()),
        ],
    )
    file = GGUFFile(path)
    for name, expected in (("f32", f32), ("f16", f16.astype(np.float32)), ("scalar", np.float32(1.5))):
        values = file.read_direct(name)
        assert (values.dtype, values.shape) == (np.float32, expected.shape)
        assert values.tobytes() == expected.tobytes()
    values = file.read_direct("bf16")
    assert values.shape == (3, 2)
    assert (values.view(np.uint32).reshape(-1) == words.astype(np.uint32) << 16).all()
    assert (file.read_bf16_words("bf16") == words.reshape(3, 2)).all()
    with pytest.raises(ValueError, match="F32 is not a stored block format"):
        file.read_blocks("f32")
    with pytest.raises(ValueError, match="Q8_0 is not a direct format"):
        file.read_direct("q")
    with pytest.raises(ValueError, match="expected BF16, got F16"):
        file.read_bf16_words("f16")


def test_types_without_a_block_format(raw):
    entries = [
        tensor_entry("x", (3, 5), 99, 0),
        tensor_entry("y", (4, 128), 142, 4096),
        tensor_entry("z", (4, 128), 143, 4096 + 160),
    ]
    file = GGUFFile(raw(gguf_bytes([], entries) + bytes(8192)))
    assert [info.type_name for info in file.tensors.values()] == ["99", "PQ2_0", "PTQ1_0"]
    assert (file.info("y").nbytes, file.info("z").nbytes) == (4 * 34, 4 * 28)
    assert file.tensor_bytes("y").size == 4 * 34
    for read in (file.tensor_bytes, file.read_blocks):
        with pytest.raises(ValueError, match="x: unknown ggml type 99"):
            read("x")
    with pytest.raises(ValueError, match="PQ2_0 is not a stored block format"):
        file.read_blocks("y")


@pytest.mark.parametrize(("kind", "name"), [(3, "Q4_1"), (34, "TQ1_0"), (39, "MXFP4")])
def test_a_type_that_is_not_read_is_named(tmp_path, kind, name):
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {}, [("x", (1, 256), kind, bytes(160))]))
    with pytest.raises(ValueError, match=rf"x: ggml type {kind} \({name}\), whose blocks cannot be read"):
        file.tensor_bytes("x")


def test_bytes_outside_a_tensor_and_absent_tensors(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {}, [("w", (1, 32), Q8_0, noise(34))]))
    for begin, end in ((0, 35), (-1, 4), (5, 4)):
        with pytest.raises(ValueError, match="outside 34 bytes"):
            file.tensor_bytes("w", begin, end)
    with pytest.raises(KeyError, match="'v' is absent"):
        file.info("v")


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf: no such GGUF file"):
        GGUFFile(tmp_path / "gone.gguf")
    with pytest.raises(ValueError, match="directory"):
        GGUFFile(tmp_path)


def test_a_file_that_changes_while_it_is_in_use(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, [("w", (1, 32), Q8_0, noise(34))])
    file = GGUFFile(path)
    assert file.identity().header == file.header_digest()
    file.close()
    write_gguf(path, {"k": 1}, [("w", (1, 32), Q8_0, noise(34))])
    with pytest.raises(SourceChangedError):
        file.read_blocks("w")
    with pytest.raises(SourceChangedError):
        file.identity()


def test_names_of_sources_decide_how_a_file_is_opened(tmp_path, monkeypatch):
    class Values:
        def __init__(self, path):
            self.path = path

    monkeypatch.setitem(sys.modules, "ninferbuild.sources.gguf_source", SimpleNamespace(GGUFSource=Values))
    path = write_gguf(tmp_path / "a.gguf", {}, [("w", (1, 32), Q8_0, noise(34))])
    for name in ("gguf", "ternary", "ngram"):
        assert type(open_source(name, path)) is GGUFFile
    for name in ("quantized", "vision", "mtp"):
        assert type(open_source(name, path)) is Values
    upper = path.rename(tmp_path / "a.GGUF")
    assert type(open_source("gguf", upper)) is SafetensorsSource


def test_the_owner_of_a_file(tmp_path, checkpoints):
    path = write_gguf(tmp_path / "a.gguf", {}, [("w", (1, 32), Q8_0, noise(34))])
    base = checkpoints.write_directory(tmp_path / "base", {"x": checkpoints.bf16([1.0])})
    with Sources(base, {"gguf": path}) as sources:
        (span,) = sources["gguf"].region("w").spans
        assert sources.name_of(span.file) == "gguf"
        assert sources.name_of(GGUFFile(path)) is None


GOOD = gguf_bytes(
    [key_value("general.architecture", "qwen35"), key_value("a", ["x", "yy"]), key_value("n", [1, 2, 3])],
    [tensor_entry("v", (2, 32), Q8_0, 0), tensor_entry("w", (256,), Q4_K, 96)],
)


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, len(GOOD) + 300),
)
def test_damaged_headers_are_refused_or_read_in_part(tmp_path_factory, edits, cut):
    data = bytearray(GOOD + noise(300))
    for position, value in edits:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data[:cut])
    with suppress(ValueError), GGUFFile(path) as file:
        for name, info in file.tensors.items():
            assert file.read_blocks(name).size == info.nbytes


def test_opening_needs_neither_torch_nor_numpy(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {"k": ["x"]}, [("w", (1, 32), Q8_0, noise(34))])
    program = (
        "import sys; from ninferbuild.sources.gguf import GGUFFile; file = GGUFFile(sys.argv[1]); file.region('w');"
        "file.identity(); print(sorted({'torch', 'numpy', 'gguf'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
