"""Canonical text tells apart what a function can tell apart, and nothing else."""

from __future__ import annotations

import math
import os
from pathlib import Path
import struct
import subprocess
import sys
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.canonical import canonical

DISTINCT = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**80,
    1 << 5000,
    0.0,
    -0.0,
    1.0,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0],
    1j,
    complex(0.0, -1.0),
    "",
    "1",
    "None",
    b"",
    b"1",
    bytearray(b"1"),
    Path("1"),
    Path("a/b"),
    (),
    [],
    {},
    set(),
    frozenset(),
    (1,),
    [1],
    {1},
    {1: 1},
    {"1": 1},
    {1: "1"},
    (1, 2),
    (2, 1),
    ((1,), 2),
    ("a, str b",),
    ("a", "b"),
    ('a", str "b',),
    range(3),
    ...,
    np.float32(1),
    np.float64(1),
    np.int64(1),
    np.bool_(True),
    np.dtype("<i4"),
    np.dtype(">i4"),
    np.dtype([("a", "<i4")]),
    np.zeros((2, 3), np.float32),
    np.zeros((3, 2), np.float32),
    np.zeros((2, 3), np.float64),
    np.zeros((2, 3), np.int32),
    np.zeros((2, 3), ">i4"),
    np.ones((2, 3), np.float32),
    np.asfortranarray(np.ones((2, 3), np.float32)),
    np.zeros((0, 3), np.float32),
    np.zeros((3, 0), np.float32),
    np.array(1.5),
    np.array(["a", None], object),
    np.array([["a", None]], object),
    np.array(["2020-01-01"], "M8[D]"),
    np.array(["2020-01-01"], "M8[s]"),
    np.zeros(2, [("a", "<i4"), ("b", "<f4")]),
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.ones(3, 2),
    torch.ones(2, 3).T,
    torch.zeros(2, 3, dtype=torch.bfloat16),
    torch.zeros(2, 3, dtype=torch.float16),
    torch.zeros(0),
    torch.tensor(0.0),
    torch.ones(2, requires_grad=True),
    torch.ones(2),
    torch.bfloat16,
    torch.float16,
    torch.device("cpu"),
]


def test_distinct_values_have_distinct_texts() -> None:
    texts = [canonical(value) for value in DISTINCT]
    assert len(set(texts)) == len(texts), sorted(text for text in texts if texts.count(text) > 1)
    assert not any("\n" in text for text in texts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x": {"a": (1,), "b": [2]}}, {"x": {"b": [2], "a": (1,)}}),
        ({1, 2, 3}, {3, 2, 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).copy()),
        (np.arange(12)[::2].copy(), np.arange(0, 12, 2)),
        (torch.arange(6), torch.arange(12)[:6]),
        ("ä\ud800", "ä\ud800"),
    ],
)
def test_equal_values_have_equal_texts(one: object, other: object) -> None:
    assert canonical(one) == canonical(other)


def test_a_memory_mapped_array_counts_as_its_content(tmp_path: Path) -> None:
    data = np.arange(24, dtype=np.int16).reshape(4, 6)
    np.save(tmp_path / "a.npy", data)
    assert canonical(np.load(tmp_path / "a.npy", mmap_mode="r")) == canonical(data)


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (object(), "builtins.object"),
        ({"a": [1, lambda: 1]}, "['a'][1]"),
        (Number(1), "Number"),
        (np.zeros(2, [("a", "O")]), "ndarray"),
        (np.ma.array([1], mask=[True]), "MaskedArray"),
        (torch.zeros(2, device="meta"), "dense"),
        (torch.zeros(2, 2).to_sparse(), "dense"),
        (iter([]), "iterator"),
    ],
)
def test_other_values_are_refused(value: object, fragment: str) -> None:
    with pytest.raises(TypeError) as caught:
        canonical(value)
    assert fragment in str(caught.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append([loop])
    with pytest.raises(TypeError, match="contains itself"):
        canonical(loop)
    shared = [1]
    assert canonical([shared, shared]) == canonical([[1], [1]])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: object, other: object) -> bool:
    """Strict equality, written independently."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        assert isinstance(other, dict)
        types = {(type(key), key) for key in one} == {(type(key), key) for key in other}
        return types and all(same(item, other[key]) for key, item in one.items())
    return one == other


@given(plain, plain)
def test_texts_are_equal_exactly_for_equal_values(one: object, other: object) -> None:
    assert (canonical(one) == canonical(other)) is same(one, other)


def test_texts_do_not_depend_on_the_hash_seed() -> None:
    script = (
        "from ninferbuild.canonical import canonical; print(canonical({'s': {'a', 'b', 'c'}, 'f': frozenset('xyz')}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(texts) == 1


def test_texts_are_pinned() -> None:
    """A change here changes every key that has parameters."""
    assert canonical({"clip": 0.0625, "bits": (4, True), "name": "x", "path": Path("a")}) == (
        'dict (str "bits": tuple (int 4, True), str "clip": float 0x1.0000000000000p-4, '
        'str "name": str "x", str "path": path "a")'
    )
    assert canonical(b"abc").startswith("bytes 3 ")
