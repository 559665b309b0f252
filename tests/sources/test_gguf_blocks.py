"""Matrices of GGUF blocks as sources: row maps, gathers, values, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from fixtures.gguf_files import BLOCKS, Tensor, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.artifact.formats import GGUF_FORMATS
from ninferbuild.sources.decoding import open_encoded, open_values
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_blocks import block_source
from ninferbuild.sources.logical import LogicalSource, gather_source, leading_rows, select_rows

F32, Q4_0, Q8_0, Q4_K = 0, 2, 8, 12


def blocks(type_id: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Noise uint8 ``[rows, row bytes]``."""
    values, size = BLOCKS[type_id]
    return np.random.default_rng(seed).integers(0, 256, (rows, columns // values * size), np.uint8)


def tensor(name: str, shape: tuple[int, ...], type_id: int, data: np.ndarray) -> Tensor:
    return name, shape, type_id, data.tobytes()


ROWS = blocks(Q8_0, 12, 64)
ROWS[:, 1::34] &= 0xBF  # finite scales
STACK = blocks(Q8_0, 6, 64, 1)


@pytest.fixture
def gguf(tmp_path: Path) -> GGUFFile:
    return GGUFFile(
        write_gguf(
            tmp_path / "m.gguf",
            {"general.architecture": "t"},
            [
                tensor("m", (12, 64), Q8_0, ROWS),
                tensor("stack", (2, 3, 64), Q8_0, STACK),
                tensor("k", (4, 256), Q4_K, blocks(Q4_K, 4, 256)),
                tensor("odd", (2, 48), Q8_0, np.zeros(102, np.uint8)),
                ("f32", (4, 32), F32, bytes(512)),
                ("unknown", (4, 32), 199, bytes(64)),
            ],
        )
    )


def values_of(rows: np.ndarray) -> np.ndarray:
    """``d * q`` of Q8_0 rows."""
    scales = rows.reshape(-1, 34)[:, :2].copy().view("<f2").astype(np.float32)
    return (scales * rows.reshape(-1, 34)[:, 2:].view(np.int8).astype(np.float32)).reshape(len(rows), -1)


def encoded(source: LogicalSource, begin: int, end: int) -> np.ndarray:
    assert source.read_encoded is not None
    found = source.read_encoded(begin, end)
    assert (found.weight_divisor, found.packed) == (None, False)
    assert (found.scales.numel(), found.scales.dtype) == (0, torch.float16)
    return found.codes.numpy()


ORDER = [7, 2, 11, 2]
MAPS: dict[str, Any] = {
    "array": lambda begin, end: np.array(ORDER, np.int64)[begin:end],
    "tensor": lambda begin, end: torch.tensor(ORDER)[begin:end],
    "list": lambda begin, end: ORDER[begin:end],
    "ranges": ((7, 8), (2, 3), (11, 12), (2, 3)),
}


@pytest.mark.parametrize("row_map", MAPS.values(), ids=MAPS)
def test_a_row_map_of_any_order_with_repeats(gguf: GGUFFile, row_map: Any) -> None:
    source = block_source(gguf, "m", (4, 64), row_map)
    assert source.label == "m[gguf_q8_0][4, 64]"
    assert source.read_encoded is not None
    assert source.read_encoded(0, 4).format == "gguf_q8_0"
    assert (encoded(source, 0, 4) == ROWS[ORDER]).all()
    assert (encoded(source, 1, 3) == ROWS[[2, 11]]).all()
    values = values_of(ROWS[ORDER]).reshape(-1)
    assert (source.values(70, 130).numpy() == values[70:130]).all()
    assert (source.values().numpy() == values).all()
    assert source.values(5, 5).shape == (0,)
    assert (source.rows(1, 2).numpy() == values[64:128]).all()
    assert source.weight_divisor is source.input_divisor is None


def test_rows_of_a_stack_of_matrices(gguf: GGUFFile) -> None:
    assert (encoded(block_source(gguf, "stack", (6, 64)), 0, 6) == STACK).all()
    second = block_source(gguf, "stack", (3, 64), [(3, 6)])
    assert (encoded(second, 0, 3) == STACK[3:]).all()
    assert second.description is not None
    (span,) = second.description.parts[0].region.spans
    assert span.end - span.begin == 3 * 68


def test_neighbouring_rows_are_one_range_and_the_map_is_asked_once(gguf: GGUFFile) -> None:
    calls = []

    def interleaved(begin: int, end: int) -> np.ndarray:
        calls.append((begin, end))
        rows = np.arange(begin, end)
        return rows // 2 * 4 + rows % 2

    source = block_source(gguf, "m", (6, 64), interleaved)
    assert calls == []
    assert source.description is not None
    (part,) = source.description.parts
    begin = gguf.region("m").spans[0].begin
    assert [((s.begin - begin) // 68, (s.end - begin) // 68) for s in part.region.spans] == [(0, 2), (4, 6), (8, 10)]
    assert (encoded(source, 0, 6) == ROWS[[0, 1, 4, 5, 8, 9]]).all()
    assert calls == [(0, 6)]


def test_derived_sources_keep_blocks(gguf: GGUFFile) -> None:
    whole = block_source(gguf, "m", (12, 64))
    for derived, rows in (
        (gather_source(whole, np.array([5, 1, 9])), [5, 1, 9]),
        (select_rows(whole, ((4, 6), (0, 2))), [4, 5, 0, 1]),
        (leading_rows(whole, 9, 12), [9, 10, 11]),
        (gather_source(block_source(gguf, "m", (4, 64), MAPS["list"]), [3, 0]), [2, 7]),
    ):
        assert (encoded(derived, 0, len(rows)) == ROWS[rows]).all()
        assert (derived.values().numpy() == values_of(ROWS[rows]).reshape(-1)).all()
        description = derived.description
        assert description is not None
        assert description.encoding == description.decoder == "gguf_q8_0"
        assert description.parts[0].region.length == len(rows) * 68
    for ids in ([-1], [12], []):
        with pytest.raises(ValueError, match="outside source rows"):
            gather_source(whole, ids)


def test_streams_read_each_byte_once(gguf: GGUFFile) -> None:
    source = block_source(gguf, "m", (4, 64), MAPS["ranges"])
    assert source.description is not None
    seen: list[bytes] = []

    def observe(part: int, data: memoryview) -> None:
        assert part == 0
        seen.append(bytes(data))

    before = gguf.bytes_read
    rows = open_encoded(source.description, observe)
    assert (np.concatenate([rows.read(1).codes.numpy(), rows.read(3).codes.numpy()]) == ROWS[ORDER]).all()
    assert b"".join(seen) == ROWS[ORDER].tobytes()
    assert gguf.bytes_read - before == 4 * 68
    seen.clear()
    stream = open_values(source.description, observe)
    found = torch.cat([stream.read(count) for count in (1, 100, 155)])
    assert (found.numpy() == values_of(ROWS[ORDER]).reshape(-1)).all()
    assert b"".join(seen) == ROWS[ORDER].tobytes()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none", KeyError, "tensor 'none' is absent"),
        ("f32", ValueError, r"m\.gguf: f32: F32 is not a stored block format"),
        ("unknown", ValueError, r"m\.gguf: unknown: unknown ggml type 199"),
        ("odd", ValueError, "odd: 48 columns are not whole blocks"),
    ],
)
def test_what_holds_no_rows_of_blocks(gguf: GGUFFile, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        block_source(gguf, name, (4, 32))


@pytest.mark.parametrize(
    ("shape", "row_map", "message"),
    [
        ((12, 32), None, r"m\.gguf: m: expected rows of 32 columns, got 64"),
        ((11, 64), None, "expected 11 rows, the row map names 12"),
        ((2, 64), [(0, 1)], "expected 2 rows, the row map names 1"),
        ((2, 64), [(11, 13)], "rows outside its 12 rows"),
        ((2, 64), [(-1, 1)], "rows outside its 12 rows"),
        ((2, 64), [(3, 1), (0, 4)], "rows outside its 12 rows"),
        ((2, 64), lambda begin, end: [-1, 0], "rows outside its 12 rows"),
        ((2, 64), lambda begin, end: np.array([0, 12]), "rows outside its 12 rows"),
    ],
)
def test_shapes_and_row_maps_that_do_not_fit(gguf: GGUFFile, shape: Any, row_map: Any, message: str) -> None:
    source = block_source(gguf, "m", shape, row_map)
    reads: tuple[Callable[[], object], ...] = (
        lambda: source.description,
        lambda: source.values(0, 1),
        lambda: source.read_encoded(0, 1) if source.read_encoded else None,
    )
    for read in reads:
        with pytest.raises(ValueError, match=message):
            read()


def test_row_maps_name_integers(gguf: GGUFFile) -> None:
    with pytest.raises(TypeError, match="integer"):
        _ = block_source(gguf, "m", (2, 64), lambda begin, end: np.array([0.0, 1.0])).description


def test_a_truncated_matrix(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "cut.gguf", {"general.architecture": "t"}, [tensor("m", (12, 64), Q8_0, ROWS)])
    os.truncate(path, path.stat().st_size - 40)
    source = block_source(GGUFFile(path), "m", (12, 64))
    with pytest.raises(ValueError, match="truncated"):
        _ = source.description


def test_many_gathered_rows_are_described_by_ranges(tmp_path: Path) -> None:
    count = 1 << 17
    rows = np.zeros((count + 4, 34), np.uint8)
    rows[:, 2:6] = np.arange(count + 4, dtype="<u4")[:, None].view(np.uint8)
    gguf = GGUFFile(write_gguf(tmp_path / "m.gguf", {}, [tensor("m", (count + 4, 32), Q8_0, rows)]))
    ids = np.arange(count)[::-1]
    gathered = gather_source(block_source(gguf, "m", (count + 4, 32)), ids)
    assert gathered.description is not None
    assert len(gathered.description.parts[0].region.spans) == count
    assert (encoded(gathered, count - 3, count) == rows[[2, 1, 0]]).all()
    mapped = block_source(gguf, "m", (count, 32), lambda begin, end: np.arange(begin, end) + 4)
    assert mapped.description is not None
    assert len(mapped.description.parts[0].region.spans) == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_type_and_any_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(sorted(GGUF_FORMATS)))
    record = GGUF_FORMATS[format]
    height, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    raw = blocks(record.ggml_type, height, width * record.block_elements, data.draw(st.integers(0, 9)))
    shape = (height, width * record.block_elements)
    path = write_gguf(
        tmp_path_factory.getbasetemp() / "any.gguf", {}, [tensor("m", shape, record.ggml_type, raw)], alignment=64
    )
    order = data.draw(st.lists(st.integers(0, height - 1), min_size=1, max_size=8))
    source = block_source(GGUFFile(path), "m", (len(order), shape[1]), lambda begin, end: order[begin:end])
    begin = data.draw(st.integers(0, len(order) - 1))
    end = data.draw(st.integers(begin + 1, len(order)))
    assert (encoded(source, begin, end) == raw[order[begin:end]]).all()
    whole = block_source(GGUFFile(path), "m", shape)
    expected = whole.values().reshape(shape)[order].reshape(-1)
    first, last = sorted(data.draw(st.tuples(st.integers(0, len(expected)), st.integers(0, len(expected)))))
    np.testing.assert_array_equal(source.values(first, last).numpy(), expected[first:last].numpy())


def test_describing_imports_neither_torch_nor_numpy(gguf: GGUFFile) -> None:
    code = (
        "import sys\n"
        "from ninferbuild.sources.gguf import GGUFFile\n"
        "from ninferbuild.sources.gguf_blocks import block_source\n"
        "from ninferbuild.sources.logical import gather_source\n"
        "source = block_source(GGUFFile(sys.argv[1]), 'm', (3, 64), lambda begin, end: range(begin + 4, end + 4))\n"
        "assert gather_source(source, [2, 0]).description.encoding == 'gguf_q8_0'\n"
        "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gguf.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
