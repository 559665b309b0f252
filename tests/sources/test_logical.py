"""Logical sources and what is derived from them, described and opaque alike, against plain numpy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.sources.decoding import open_values
from ninferbuild.sources.logical import (
    EncodedRows,
    LogicalSource,
    StoredReader,
    array_source,
    concatenate_encoded,
    gather_source,
    leading_rows,
    select_rows,
    transpose_source,
)
from ninferbuild.sources.safetensors import tensor_source


def opaque(source: LogicalSource) -> LogicalSource:
    """The same values and rows behind readers that nothing is known about."""
    encoded = source.read_encoded
    return dataclasses.replace(
        source,
        read_values=lambda begin, end: source.read_values(begin, end),
        read_encoded=None if encoded is None else lambda begin, end: encoded(begin, end),
    )


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def both(values: np.ndarray) -> list[LogicalSource]:
    source = array_source(values, "m")
    return [source, opaque(source)]


class TestLogicalSource:
    def test_values_and_rows(self):
        source = array_source(matrix(3, 4), "m")
        assert source.values().tolist() == list(range(12))
        assert source.values(5).tolist() == [5, 6, 7, 8, 9, 10, 11]
        assert source.rows(1, 2).tolist() == [[4, 5, 6, 7]]
        for begin, end in ((-1, 2), (3, 2), (0, 13)):
            with pytest.raises(ValueError, match="logical range"):
                source.values(begin, end)
        with pytest.raises(ValueError, match="requires a matrix"):
            array_source(matrix(3, 4)[0], "v").rows(0, 1)

    def test_a_reader_that_returns_another_number_of_elements_is_refused(self):
        source = LogicalSource((4,), "bad", lambda begin, end: torch.zeros(3))
        with pytest.raises(ValueError, match="source returned 3 elements"):
            source.values()
        with pytest.raises(TypeError, match=r"must return a torch\.Tensor, not ndarray"):
            LogicalSource((3,), "bad", lambda begin, end: np.zeros(3)).values()

    def test_any_shape_of_the_result_is_flattened(self):
        source = LogicalSource((2, 2), "x", lambda begin, end: torch.arange(begin, end).reshape(1, -1, 1))
        assert source.values().tolist() == [0, 1, 2, 3]

    def test_documented_field_order_and_extra_keywords(self):
        rows = EncodedRows("nvfp4", torch.zeros(1), torch.zeros(1))
        source = LogicalSource(
            [2, 2], "x", lambda b, e: torch.zeros(e - b), lambda b, e: rows, lambda: b"w", lambda: b"i",
            files=("a.npy",), fingerprint="v1",
        )  # fmt: skip
        assert source.shape == (2, 2)
        assert (source.weight_divisor(), source.input_divisor()) == (b"w", b"i")
        assert (source.files, source.fingerprint) == (("a.npy",), "v1")
        with pytest.raises(dataclasses.FrozenInstanceError):
            source.label = "y"


class TestDescription:
    def test_replacing_a_reader_makes_a_source_opaque(self):
        source = array_source(matrix(2, 2), "m")
        assert source.description is not None
        assert dataclasses.replace(source, label="other").description is not None
        assert dataclasses.replace(source, read_values=lambda b, e: torch.zeros(e - b)).description is None
        assert dataclasses.replace(source, read_encoded=lambda b, e: None).description is None
        assert dataclasses.replace(source, shape=(4,)).description is None
        other = array_source(matrix(2, 2) + 1, "m")
        reader = other.read_values.__self__
        assert dataclasses.replace(source, read_encoded=reader.read_encoded).description is None

    def test_a_subclass_of_the_reader_is_opaque(self):
        class Mine(StoredReader):
            def read_values(self, begin, end):
                return torch.zeros(end - begin)

        described = array_source(matrix(2, 2), "m").description
        assert LogicalSource((2, 2), "m", Mine(lambda: described).read_values).description is None

    def test_errors_surface_when_the_description_is_asked_for(self):
        def fail():
            raise ValueError("missing source tensor")

        reader = StoredReader(fail, shape=(4, 4))
        source = transpose_source(
            select_rows(LogicalSource((4, 4), "x", reader.read_values), ((1, 2),)), (1, 0), (4, 1)
        )
        with pytest.raises(ValueError, match="missing source tensor"):
            _ = source.description

    def test_a_reader_holds_a_description_to_its_promised_shape(self):
        described = array_source(matrix(2, 2), "m").description
        reader = StoredReader(lambda: described, shape=(4, 1), name="m")
        with pytest.raises(ValueError, match="differs"):
            reader.describe()

    def test_a_description_is_made_once(self):
        described = array_source(matrix(2, 2), "m").description
        calls = []
        reader = StoredReader(lambda: calls.append(1) or described)
        source = LogicalSource((2, 2), "m", reader.read_values)
        assert source.values().tolist() == source.values().tolist()
        assert source.description is described
        assert len(calls) == 1

    def test_accessors_without_data(self):
        reader = StoredReader(lambda: array_source(matrix(2, 2), "m").description, name="blk")
        for read in (lambda: reader.read_encoded(0, 1), reader.weight_divisor, reader.input_divisor):
            with pytest.raises(ValueError, match="blk: selected source does not provide"):
                read()


class TestArraySource:
    @pytest.mark.parametrize(
        "values",
        [
            torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            torch.arange(6, dtype=torch.float16),
            torch.tensor(3.5, dtype=torch.float64),
            torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
            torch.tensor([True, False]),
            torch.empty(0, 4, dtype=torch.int64),
            torch.arange(4.0).to(torch.float8_e4m3fn),
        ],
    )
    def test_torch(self, values):
        source = array_source(values, "label")
        read = source.values()
        assert (source.shape, source.label, read.dtype) == (tuple(values.shape), "label", values.dtype)
        assert (
            torch.equal(read.view(torch.uint8), values.contiguous().reshape(-1).view(torch.uint8))
            or read.numel() == 0 == values.numel()
        )
        assert source.read_encoded is None

    @pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", "i1", "<i2", ">i4", "<i8", "u1", "<u4", "?"])
    def test_numpy(self, dtype):
        values = np.arange(6).reshape(2, 3).astype(dtype)
        assert np.array_equal(array_source(values.T, "x").values().numpy(), values.T.reshape(-1))

    def test_is_a_snapshot(self):
        for values in (np.ones(4, np.float32), torch.ones(4)):
            source = array_source(values, "x")
            values[:] = 7
            assert source.values().tolist() == [1, 1, 1, 1]

    def test_equal_arrays_have_equal_decoding(self):
        one, two = (array_source(matrix(2, 3), label).description for label in "ab")
        assert (one.shape, one.dtype, one.decoder) == (two.shape, two.dtype, two.decoder) == ((2, 3), "F32", "plain")
        assert one.parts[0].region.spans[0].file.identity() is None

    @pytest.mark.parametrize(
        "values", [[1, 2], np.zeros(2, np.complex64), np.array(["a"]), torch.zeros(2, dtype=torch.complex64)]
    )
    def test_other_values_are_refused(self, values):
        with pytest.raises(TypeError, match="x: array_source"):
            array_source(values, "x")


class TestSelectRows:
    def test_label_and_order(self):
        for source in both(matrix(5, 3)):
            chosen = select_rows(source, ((3, 5), (0, 1), (3, 4)))
            assert chosen.label == "rows(m, 3 spans, 4 rows)"
            assert chosen.shape == (4, 3)
            assert chosen.rows(0, 4)[:, 0].tolist() == [9, 12, 0, 9]
            assert chosen.values(4, 8).tolist() == [13, 14, 0, 1]

    def test_errors(self):
        for source in both(matrix(5, 3)):
            with pytest.raises(ValueError, match="requires a matrix and nonempty ranges"):
                select_rows(source, ())
            for bad in ((0, 6), (-1, 2), (2, 2), (3, 2)):
                with pytest.raises(ValueError, match="invalid selected rows"):
                    select_rows(source, ((0, 1), bad))
        with pytest.raises(ValueError, match="requires a matrix and nonempty ranges"):
            select_rows(array_source(np.zeros(3), "v"), ((0, 1),))

    def test_empty_read_keeps_the_type(self):
        for source in both(matrix(5, 3).astype(np.float64)):
            empty = select_rows(source, ((1, 2),)).values(2, 2)
            assert (empty.dtype, empty.numel()) == (torch.float64, 0)

    def test_encoded_rows_of_an_opaque_source(self):
        codes = torch.arange(5, dtype=torch.uint8).reshape(5, 1)

        def read(begin, end):
            return EncodedRows("f", codes[begin:end], codes[begin:end, 0], bytes(4) if begin < 3 else b"\1\0\0\0")

        source = LogicalSource((5, 1), "e", lambda b, e: torch.zeros(e - b), read, lambda: b"weight", lambda: b"input")
        chosen = select_rows(source, ((2, 3), (0, 1), (3, 5)))
        assert (chosen.weight_divisor(), chosen.input_divisor()) == (b"weight", b"input")
        assert chosen.read_encoded(0, 2).codes.tolist() == [[2], [0]]
        assert chosen.read_encoded(2, 4).weight_divisor == b"\1\0\0\0"
        with pytest.raises(ValueError, match="incompatible encoded row groups"):
            chosen.read_encoded(1, 3)
        with pytest.raises(ValueError, match="invalid encoded rows"):
            chosen.read_encoded(0, 5)

    def test_many_single_rows(self):
        count = 131_072
        rows = np.random.default_rng(0).permutation(count)
        chosen = gather_source(
            array_source(np.arange(count, dtype=np.int32).reshape(-1, 1), "m"), torch.from_numpy(rows)
        )
        assert chosen.label == f"rows(m, {count} spans, {count} rows)"
        read = torch.cat([chosen.rows(begin, begin + 8192) for begin in range(0, count, 8192)])
        assert np.array_equal(read.numpy()[:, 0], rows)

    def test_neighbouring_rows_of_an_opaque_source_are_one_read(self):
        reads = []

        def read(begin, end):
            reads.append((begin, end))
            return torch.arange(begin, end)

        chosen = gather_source(LogicalSource((100, 2), "m", read), [*range(10, 60), *range(5)])
        assert chosen.values(3, 105).tolist() == [*range(23, 120), *range(5)]
        assert reads == [(23, 120), (0, 5)]


class TestGatherSource:
    def test_order_and_kinds_of_indices(self):
        for indices in (torch.tensor([3, 0, 3]), np.array([3, 0, 3]), [3, 0, 3]):
            chosen = gather_source(array_source(matrix(4, 2), "m"), indices)
            assert chosen.label == "rows(m, 3 spans, 3 rows)"
            assert chosen.rows(0, 3).tolist() == [[6, 7], [0, 1], [6, 7]]

    def test_errors(self):
        source = array_source(matrix(4, 2), "m")
        for indices in ([], [4], [-1], torch.tensor([], dtype=torch.int64)):
            with pytest.raises(ValueError, match="outside source rows"):
                gather_source(source, indices)
        with pytest.raises(TypeError):
            gather_source(source, torch.tensor([0.5]))
        with pytest.raises(ValueError, match="must be a matrix"):
            gather_source(array_source(np.zeros(4), "v"), [0])


class TestTranspose:
    def test_label_and_values(self):
        values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        for source in both(values):
            turned = transpose_source(source, [2, 0, 1], (4, 6))
            assert turned.label == "transpose(m,(2, 0, 1))"
            assert turned.read_encoded is None
            assert np.array_equal(turned.values().numpy(), values.transpose(2, 0, 1).reshape(-1))
            assert np.array_equal(turned.values(5, 9).numpy(), values.transpose(2, 0, 1).reshape(-1)[5:9])

    def test_errors(self):
        for source in both(matrix(2, 3)):
            with pytest.raises(ValueError, match="do not permute"):
                transpose_source(source, (0, 0), (2, 3))
            with pytest.raises(ValueError, match=r"cannot have the shape|source returned"):
                transpose_source(source, (1, 0), (3, 3)).values()


class TestLeadingRows:
    def test_all_rows_are_the_source_itself(self):
        source = array_source(matrix(4, 2), "m")
        assert leading_rows(source, 0, 4) is source

    def test_ranks(self):
        assert leading_rows(array_source(matrix(4, 2), "m"), 1, 3).label == "rows(m, 1 spans, 2 rows)"
        for values in (np.arange(5.0), np.arange(24.0).reshape(4, 3, 2)):
            for source in both(values):
                part = leading_rows(source, 1, 3)
                assert (part.label, part.shape) == ("m", values[1:3].shape)
                assert np.array_equal(part.values().numpy(), values[1:3].reshape(-1))
                assert (part.description is None) == (source.description is None)

    def test_errors(self):
        with pytest.raises(ValueError, match="complete leading-axis rows"):
            leading_rows(array_source(np.array(1.0), "s"), 0, 1)
        for bounds in ((0, 6), (2, 2), (-1, 2)):
            with pytest.raises(ValueError, match="invalid selected rows"):
                leading_rows(array_source(np.zeros(5), "v"), *bounds)


class TestDerivation:
    def test_names_the_origin_and_the_steps(self):
        source = opaque(array_source(matrix(4, 2), "m"))
        assert source.derivation == (source, ())
        chosen = select_rows(source, ((2, 3), (3, 4), (0, 1)))
        assert chosen.derivation == (source, (("rows", (4, 2), ((2, 4), (0, 1))),))
        turned = transpose_source(chosen, (1, 0), (2, 3))
        assert turned.derivation == (
            source, (("rows", (4, 2), ((2, 4), (0, 1))), ("transpose", (3, 2), (1, 0))),
        )  # fmt: skip
        replaced = dataclasses.replace(chosen, read_values=lambda b, e: torch.zeros(e - b))
        assert replaced.derivation == (replaced, ())


def test_concatenate_encoded():
    def rows(format="f", divisor=None, packed=False):
        return EncodedRows(format, torch.ones(2, 3), torch.ones(2), divisor, packed)

    one = rows()
    assert concatenate_encoded([one], "no") is one
    stacked = concatenate_encoded([one, rows(), rows()], "no")
    assert (stacked.codes.shape, stacked.scales.shape) == ((6, 3), (6,))
    for other in (rows("g"), rows(divisor=b"1234"), rows(packed=True)):
        with pytest.raises(ValueError, match="cannot share"):
            concatenate_encoded([one, other], "rows cannot share")
    with pytest.raises(ValueError, match="cannot share"):
        concatenate_encoded([], "rows cannot share")


@st.composite
def transformations(draw):
    """A shape, and a chain of operations with what numpy makes of them."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    chain = []
    current = shape
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("rows", "transpose", "leading")))
        if kind == "rows" and len(current) == 2:
            bounds = st.tuples(st.integers(0, current[0] - 1), st.integers(1, current[0])).filter(lambda b: b[0] < b[1])
            ranges = tuple(draw(st.lists(bounds, min_size=1, max_size=4)))
            chain.append(("rows", ranges))
            current = (sum(end - begin for begin, end in ranges), current[1])
        elif kind == "leading":
            begin = draw(st.integers(0, current[0] - 1))
            end = draw(st.integers(begin + 1, current[0]))
            chain.append(("leading", begin, end))
            current = (end - begin, *current[1:])
        elif kind == "transpose":
            axes = tuple(draw(st.permutations(range(len(current)))))
            turned = tuple(current[axis] for axis in axes)
            if draw(st.booleans()) and len(turned) == 3:
                turned = (turned[0], turned[1] * turned[2])
            chain.append(("transpose", axes, turned))
            current = turned
    return shape, chain


@settings(max_examples=200, deadline=None)
@given(transformations(), st.data())
def test_chains_equal_numpy(case, data):
    shape, chain = case
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    described = array_source(values, "m")
    hidden = opaque(described)
    for step in chain:
        if step[0] == "rows":
            values = np.concatenate([values[begin:end] for begin, end in step[1]])
            described, hidden = (select_rows(source, step[1]) for source in (described, hidden))
        elif step[0] == "leading":
            values = values[step[1] : step[2]]
            described, hidden = (leading_rows(source, step[1], step[2]) for source in (described, hidden))
        else:
            values = values.transpose(step[1]).reshape(step[2])
            described, hidden = (transpose_source(source, step[1], step[2]) for source in (described, hidden))
    flat = values.reshape(-1)
    begin = data.draw(st.integers(0, flat.size))
    end = data.draw(st.integers(begin, flat.size))
    assert described.shape == hidden.shape == values.shape
    assert described.label == hidden.label
    assert hidden.description is None
    assert described.description is not None
    for source in (described, hidden):
        assert source.values(begin, end).tolist() == flat[begin:end].tolist()
        assert source.values().dtype == torch.int32

    stream = open_values(described.description)
    read = [stream.read(begin), stream.read(end - begin), stream.read(flat.size - end)]
    assert torch.cat(read).tolist() == flat.tolist()


class TestModelTransformations:
    """The views that a model adapter makes of the tensors of a checkpoint."""

    def test_interleaved_query_and_gate(self, open_tensors, checkpoints):
        values = np.arange(512, dtype=np.float32).reshape(32, 16)
        store = open_tensors({"q_proj.weight": checkpoints.stored("F32", values)})
        source = tensor_source(store, "q_proj.weight", (32, 16))
        query = select_rows(source, ((0, 8), (16, 24)))
        gate = select_rows(source, ((8, 16), (24, 32)))
        assert np.array_equal(query.rows(0, 16).numpy(), np.concatenate([values[0:8], values[16:24]]))
        assert np.array_equal(gate.rows(0, 16).numpy(), np.concatenate([values[8:16], values[24:32]]))

    def test_fused_query_key_value(self, open_tensors, checkpoints):
        values = np.arange(256, dtype=np.float32).reshape(16, 16)
        store = open_tensors({"qkv": checkpoints.stored("F32", values)})
        source = tensor_source(store, "qkv", (16, 16))
        for begin, end in ((0, 4), (4, 8), (8, 16)):
            part = select_rows(source, ((begin, end),))
            assert np.array_equal(part.rows(0, end - begin).numpy(), values[begin:end])
            (span,) = part.description.parts[0].region.spans
            assert span.end - span.begin == (end - begin) * 16 * 4

    def test_convolution(self, open_tensors, checkpoints):
        values = np.arange(48, dtype=np.float32).reshape(16, 1, 3)
        store = open_tensors({"conv1d": checkpoints.bf16(values)})
        source = transpose_source(tensor_source(store, "conv1d", (16, 1, 3)), (2, 0, 1), (3, 16))
        assert source.label == f"transpose({Path(store.path)}:conv1d[0:48],(2, 0, 1))"
        assert np.array_equal(source.rows(0, 3).float().numpy(), values[:, 0, :].T)

    def test_patch_embedding_and_bias_and_experts(self, open_tensors, checkpoints):
        patch = np.arange(96, dtype=np.float32).reshape(8, 3, 1, 2, 2)
        bias = np.arange(24, dtype=np.float32)
        experts = np.arange(3 * 16 * 16, dtype=np.float32).reshape(3, 16, 16)
        tensors = {"p": patch, "b": bias, "e": experts}
        store = open_tensors({name: checkpoints.stored("F32", values) for name, values in tensors.items()})
        flat = tensor_source(store, "p", (8, 12), source_shape=(8, 3, 1, 2, 2))
        assert np.array_equal(flat.rows(2, 5).numpy(), patch.reshape(8, 12)[2:5])
        key = tensor_source(store, "b", (8,), offset=8, source_shape=(24,))
        assert key.values().tolist() == list(range(8, 16))
        up = tensor_source(store, "e", (8, 16), offset=2 * 256 + 128, source_shape=(3, 16, 16))
        assert np.array_equal(up.rows(0, 8).numpy(), experts[2, 8:])
