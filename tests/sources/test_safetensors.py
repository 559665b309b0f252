"""The Safetensors store: selection of files, headers, reads, descriptors and bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
import struct
import threading

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch

from ninferbuild.errors import SourceChangedError
from ninferbuild.sources import files
from ninferbuild.sources.files import CheckpointFile, DescriptorPool
from ninferbuild.sources.safetensors import SafetensorsSource, TensorInfo, tensor_source

READABLE = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("dtype", READABLE)
def test_reads_what_the_safetensors_package_writes(dtype: str, tmp_path: Path) -> None:
    values = torch.arange(24).to(READABLE[dtype]).reshape(2, 3, 4)
    path = tmp_path / "one.safetensors"
    safetensors.torch.save_file({"t": values, "empty": values[:0].contiguous()}, path, metadata={"format": "pt"})
    store = SafetensorsSource(path)
    assert store.describe("t").dtype == dtype
    assert store.describe("t").shape == (2, 3, 4)
    read = store.read_flat("t", 5, 17)
    assert read.dtype == READABLE[dtype]
    assert torch.equal(read.view(torch.uint8), values.reshape(-1)[5:17].view(torch.uint8))
    nothing = store.read_flat("t", 3, 3)
    assert (nothing.dtype, nothing.shape) == (READABLE[dtype], (0,))
    assert store.read_flat("empty").numel() == 0
    assert store.bytes_read == 12 * values.element_size()


def test_selection_of_files(tmp_path, checkpoints):
    one, two = {"a": checkpoints.bf16([1.0])}, {"b": checkpoints.bf16([2.0])}
    root = tmp_path / "sharded"
    root.mkdir()
    (root / "model-1.safetensors").write_bytes(checkpoints.safetensors_bytes(one))
    (root / "model-2.safetensors").write_bytes(checkpoints.safetensors_bytes(two))
    index = root / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (root / "config.json").write_text('{"x": 1}')
    for path in (root, index):
        store = SafetensorsSource(path)
        assert (store.path, store.root, store.config) == (path, root, {"x": 1})
        assert store.weight_map == {"a": root / "model-1.safetensors", "b": root / "model-2.safetensors"}
        assert [store.read_flat(name).tolist() for name in "ab"] == [[1.0], [2.0]]

    shard = SafetensorsSource(root / "model-2.safetensors")
    assert (shard.root, shard.config, list(shard.weight_map)) == (root, {"x": 1}, ["b"])
    assert shard.has("b")
    assert not shard.has("a")

    single = SafetensorsSource(checkpoints.write_directory(tmp_path / "single", one))
    assert (list(single.weight_map), single.config) == (["a"], {})

    (tmp_path / "empty").mkdir()
    assert SafetensorsSource(tmp_path / "empty").weight_map == {}
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SafetensorsSource(tmp_path / "nowhere")


def test_describe_gives_file_offsets(tmp_path, checkpoints):
    data = checkpoints.safetensors_bytes({"a": checkpoints.stored("U8", np.arange(3, dtype=np.uint8)),
                                          "b": checkpoints.stored("U8", np.arange(9, dtype=np.uint8))})  # fmt: skip
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    info = SafetensorsSource(path).describe("b")
    assert info == TensorInfo(path, (9,), "U8", len(data) - 9, 9)
    assert data[info.offset : info.offset + info.bytes] == bytes(range(9))


def test_missing_tensor_and_bad_range(open_tensors, checkpoints):
    store = open_tensors({"a": checkpoints.bf16([1.0, 2.0])})
    with pytest.raises(ValueError, match="missing source tensor 'b'"):
        store.describe("b")
    for begin, end in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(ValueError, match="invalid element range"):
            store.read_flat("a", begin, end)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abc", "invalid source range"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[3,2]}}', b"abc", "invalid source range"),
        ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
         b"abc", "'b' and 'a' are overlapping"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
         b"ab", "duplicate name 'a'"),
        ("[1, 2]", b"", "corrupt Safetensors header"),
        ("not json at all", b"", "corrupt Safetensors header"),
        (b'{"\xff": 1}', b"", "corrupt Safetensors header"),
        ('{"a":{"dtype":"U8","shape":[1]}}', b"a", "'a' lacks dtype, shape or data_offsets"),
        ('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', b"a", "corrupt Safetensors header"),
        ('{"a":{"dtype":"U8","shape":"1","data_offsets":[0,1]}}', b"a", "corrupt Safetensors header"),
        ("{" + '"a":{' * 100_000, b"", "corrupt Safetensors header"),
    ],
)  # fmt: skip
def test_corrupt_headers(header, data, message, tmp_path, checkpoints):
    path = checkpoints.raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as caught:
        SafetensorsSource(path).has("a")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("data", "message"), [(b"", "truncated"), (b"1234567", "truncated"),
                                               (struct.pack("<Q", 9) + b"{}", "header exceeds file")])  # fmt: skip
def test_truncated_files(data, message, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        _ = SafetensorsSource(path).weight_map


def test_metadata_with_the_names_of_a_tensor_is_ignored(tmp_path, checkpoints):
    metadata = {"shape": "wide", "dtype": "float16", "data_offsets": "none"}
    path = tmp_path / "x.safetensors"
    path.write_bytes(checkpoints.safetensors_bytes({"a": checkpoints.bf16([1.0])}, metadata))
    store = SafetensorsSource(path)
    assert list(store.weight_map) == ["a"]
    assert store.read_flat("a").tolist() == [1.0]


def test_dtype_and_byte_count_are_checked_when_a_tensor_is_read(tmp_path, checkpoints):
    header = (
        '{"a":{"dtype":"I16","shape":[1],"data_offsets":[0,2]},"b":{"dtype":"F32","shape":[2],"data_offsets":[2,6]}}'
    )
    store = SafetensorsSource(checkpoints.raw_file(tmp_path / "x.safetensors", header, bytes(6)))
    assert store.describe("a").dtype == "I16"
    with pytest.raises(ValueError, match="unsupported source dtype I16"):
        store.read_flat("a")
    with pytest.raises(ValueError, match="byte count disagrees"):
        store.read_flat("b")


def test_index_errors_name_the_file(tmp_path, checkpoints):
    root = checkpoints.write_directory(tmp_path / "c", {"a": checkpoints.bf16([1.0])})
    index = root / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors", "b": "model.safetensors"}}))
    store = SafetensorsSource(root)
    assert store.has("a")
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors: missing file.*'a'"):
        store.describe("a")
    with pytest.raises(ValueError, match=r"model\.safetensors: missing source tensor 'b'"):
        store.describe("b")
    for text, message in (("{", "not valid JSON"), ("[]", "expected a JSON object"), ("{}", "weight_map"),
                          ('{"weight_map": {"a": 3}}', "names no file for 'a'")):  # fmt: skip
        index.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            SafetensorsSource(root).has("a")
        assert str(index) in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_bad_config(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        SafetensorsSource(tmp_path)


def test_file_that_shrinks_or_changes_is_refused(tmp_path, checkpoints):
    root = checkpoints.write_directory(tmp_path / "c", {"a": checkpoints.stored("U8", np.zeros(100, np.uint8))})
    path = root / "model.safetensors"
    store = SafetensorsSource(root)
    store.read_flat("a", 0, 1)
    os.truncate(path, path.stat().st_size - 50)  # the descriptor is open: reading runs into the end
    with pytest.raises(ValueError, match=r"model\.safetensors: the file ends at byte .* truncated"):
        store.read_flat("a")
    (span,) = store.tensor("a").parts[0].region.spans
    with pytest.raises(SourceChangedError, match=r"model\.safetensors"):
        span.file.identity()
    store.close()
    with pytest.raises(SourceChangedError, match=r"model\.safetensors"):
        store.read_flat("a", 0, 1)


def test_replaced_file_is_refused_although_size_and_second_agree(tmp_path, checkpoints):
    root = checkpoints.write_directory(tmp_path / "c", {"a": checkpoints.bf16([1.0])})
    path = root / "model.safetensors"
    store = SafetensorsSource(root)
    file = store.tensor("a").parts[0].region.spans[0].file
    before = file.identity()
    other = tmp_path / "other"
    other.write_bytes(checkpoints.safetensors_bytes({"a": checkpoints.bf16([2.0])}))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(other, path)
    assert before.size == path.stat().st_size
    with pytest.raises(SourceChangedError):
        file.identity()


def test_identity(tmp_path, checkpoints):
    root = checkpoints.write_directory(tmp_path / "c", {"a": checkpoints.bf16([1.0])})
    (tmp_path / "link").symlink_to(root)
    store = SafetensorsSource(tmp_path / "link")
    file = store.tensor("a").parts[0].region.spans[0].file
    identity = file.identity()
    stat = (root / "model.safetensors").stat()
    assert identity.path == os.path.realpath(root / "model.safetensors")
    assert (identity.inode, identity.size, identity.mtime_ns) == (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    assert len(identity.header) == 16
    assert file.path == tmp_path / "link" / "model.safetensors"
    assert store.owns(file)

    renamed = checkpoints.write_directory(tmp_path / "d", {"b": checkpoints.bf16([1.0])})
    other = SafetensorsSource(renamed)
    assert other.tensor("b").parts[0].region.spans[0].file.identity().header != identity.header
    assert not other.owns(file)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors through /proc")
def test_descriptors_are_bounded_and_given_back(tmp_path, checkpoints, monkeypatch):
    monkeypatch.setattr(files, "DESCRIPTORS", DescriptorPool(limit=4))
    root = tmp_path / "c"
    root.mkdir()
    names = [f"t{number}" for number in range(30)]
    for number, name in enumerate(names):
        data = checkpoints.safetensors_bytes({name: checkpoints.bf16([float(number)])})
        (root / f"{name}.safetensors").write_bytes(data)
    weight_map = {name: f"{name}.safetensors" for name in names}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = open_descriptors()
    with SafetensorsSource(root) as store:
        for _ in range(2):
            assert [store.read_flat(name).item() for name in names] == list(range(30))
            assert open_descriptors() - before <= 4
        errors: list[Exception] = []

        def read_all() -> None:
            try:
                for _ in range(20):
                    assert [store.read_flat(name).item() for name in names] == list(range(30))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=read_all) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert open_descriptors() - before <= 4
        assert store.bytes_read == 2 * 30 * (2 + 4 * 20)
    assert open_descriptors() == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors through /proc")
def test_descriptor_closed_while_in_use_stays_open_for_its_reader(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    file = CheckpointFile(path)
    pool = DescriptorPool()
    before = open_descriptors()
    with pool.use(file) as descriptor:
        pool.forget(file)
        assert os.pread(descriptor, 3, 0) == b"abc"
    assert open_descriptors() == before
    assert len(pool) == 0


class TestTensorSource:
    def test_flat_view(self, open_tensors, checkpoints):
        values = np.arange(60, dtype=np.float32).reshape(5, 12)
        store = open_tensors({"t": checkpoints.bf16(values)})
        source = tensor_source(store, "t", (2, 3, 4), offset=7, source_shape=(5, 12))
        assert source.label == f"{store.path}:t[7:31]"
        assert source.read_encoded is None
        assert np.array_equal(source.values().float().numpy(), values.reshape(-1)[7:31])
        assert np.array_equal(source.values(3, 9).float().numpy(), values.reshape(-1)[10:16])
        assert source.description is not None
        assert source.description.parts[0].region.length == 48

    def test_shape_is_checked_at_the_first_use(self, open_tensors, checkpoints):
        store = open_tensors({"t": checkpoints.bf16(np.zeros((2, 3)))})
        source = tensor_source(store, "t", (3, 2))
        missing = tensor_source(store, "missing", (3, 2))
        with pytest.raises(ValueError, match="expected source shape"):
            source.values(0, 1)
        with pytest.raises(ValueError, match="expected source shape"):
            _ = source.description
        with pytest.raises(ValueError, match="missing source tensor"):
            missing.values(0, 0)
        beyond = tensor_source(store, "t", (4,), offset=3, source_shape=(2, 3))
        with pytest.raises(ValueError, match="lie outside"):
            beyond.values(0, 1)

    def test_scalar(self, open_tensors, checkpoints):
        store = open_tensors({"t": checkpoints.bf16(3.0)})
        source = tensor_source(store, "t", ())
        assert source.values().tolist() == [3.0]

    def test_a_store_of_ones_own_is_read_through_its_methods(self, open_tensors, checkpoints):
        class Doubled(SafetensorsSource):
            def read_flat(self, name, begin=0, end=None):
                return super().read_flat(name, begin, end) * 2

        plain = open_tensors({"t": checkpoints.bf16([1.0, 2.0, 3.0])})
        source = tensor_source(Doubled(plain.path), "t", (3,))
        assert source.description is None
        assert source.values(1, 3).tolist() == [4.0, 6.0]
        with pytest.raises(ValueError, match="expected source shape"):
            tensor_source(Doubled(plain.path), "t", (4,)).values(0, 1)


VALID = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}'


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(VALID) + 7), st.binary(min_size=0, max_size=3)), max_size=4),
       cut=st.integers(0, 30))  # fmt: skip
def test_damaged_files_give_only_value_errors(edits, cut, tmp_path):
    data = bytearray(struct.pack("<Q", len(VALID)) + VALID + bytes(8))
    for position, new in edits:
        data[position : position + 1] = new
    path = tmp_path / "damaged.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(data[: len(data) - cut])
    with SafetensorsSource(path) as store:
        failure: ValueError | None = None
        try:
            for name in store.weight_map:
                store.describe(name)
                store.read_flat(name)
        except ValueError as error:
            failure = error
    assert failure is None or str(path) in str(failure)
