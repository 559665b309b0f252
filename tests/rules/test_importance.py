"""Parameters of ``grouped_search``, and the importance vectors that they lead to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
import torch

from ninferbuild.errors import SourceChangedError
from ninferbuild.rules import grouped_absmax, grouped_search, importance
from ninferbuild.rules.scale_search import encode_matrix, grouped_format

Q4 = "q4_g64_fp16"

Vectors = Mapping[str, torch.Tensor]


@pytest.fixture
def imatrix(tmp_path: Path) -> Callable[[Vectors], str]:
    """Writes a file of vectors, the same one each time, and gives its path."""

    def write(vectors: Vectors) -> str:
        path = tmp_path / "importance.safetensors"
        save_file({name: vector.numpy().copy() for name, vector in vectors.items()}, path)
        return str(path)

    return write


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(4, 200, generator=torch.Generator().manual_seed(6))


def weighted(weight: torch.Tensor, vector: torch.Tensor | None) -> bytes:
    """The payload, without gaps, that a vector leads to."""
    from ninferbuild.rules.error_flags import ErrorFlags

    vector = None if vector is None else vector.double()
    planes = encode_matrix(weight, grouped_format(Q4), vector, ErrorFlags(weight.device))
    return b"".join(plane.numpy().tobytes() for plane in planes)


def payload(harness: Any, sources: Any, **parameters: Any) -> bytes:
    """The payload of a parent, without gaps: that of Q4 has one before its scales, which ends at a multiple of 256."""
    request = harness.request(sources, Q4, parameters=parameters)
    rows, columns = request.target.shape
    found: bytes = harness.payload(grouped_search, request)
    codes = rows * -(-columns // 128) * 64
    return found[:codes] + found[-(-codes // 256) * 256 :]


VECTOR = torch.tensor([((7 * i) % 11) / 4 for i in range(200)])


def test_the_vector_of_the_parameter_weighs_its_columns(harness, imatrix, weight) -> None:
    path = imatrix({"p0": VECTOR, "p1": VECTOR * 9, "other": VECTOR[:3]})
    assert payload(harness, weight, imatrix=path) == weighted(weight, VECTOR)
    assert payload(harness, weight) == weighted(weight, None) != weighted(weight, VECTOR)


def test_packed_inputs_share_the_mean_of_the_vectors_there_are(harness, imatrix, weight) -> None:
    pair = [weight[:2].clone(), weight[2:].clone()]
    ramp = torch.arange(200, dtype=torch.float32)
    for vectors, mean in (
        ({"p0": VECTOR, "p1": VECTOR}, VECTOR),
        ({"p1": VECTOR}, VECTOR),
        ({"p0": 2 * ramp + 1, "p1": 2 * ramp + 3}, 2 * ramp + 2),
        ({"p2": VECTOR}, None),
        ({}, None),
    ):
        assert payload(harness, pair, imatrix=imatrix(vectors)) == weighted(weight, mean)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_rows_of_a_chunk_do_not_matter(harness, imatrix, weight, rows) -> None:
    path = imatrix({"p0": VECTOR})
    pair = [weight[:2].clone(), weight[2:].clone()]
    request = harness.request(pair, Q4, parameters={"imatrix": path, "negative_scales": True}, rows_per_chunk=rows)
    whole = harness.request(pair, Q4, parameters={"imatrix": path, "negative_scales": True})
    assert harness.payload(grouped_search, request) == harness.payload(grouped_search, whole)
    assert harness.assembled(grouped_search, request) == harness.payload(grouped_search, whole)


# What enters the key


def facts(harness: Any, sources: Any, **parameters: Any) -> tuple[str, ...]:
    return grouped_search.check(harness.request(sources, Q4, parameters=parameters)).facts  # type: ignore[no-any-return]


def test_the_key_holds_the_vector_and_nothing_else_of_the_file(harness, imatrix, weight, tmp_path) -> None:
    first = facts(harness, weight, imatrix=imatrix({"p0": VECTOR}))
    assert len(first) == 1
    assert str(tmp_path) not in first[0]
    assert facts(harness, weight, imatrix=imatrix({"other": VECTOR * 3, "p0": VECTOR})) == first
    changed = VECTOR.clone()
    changed[17] += 1e-6
    assert facts(harness, weight, imatrix=imatrix({"p0": changed})) not in ((), first)
    assert facts(harness, weight, imatrix=imatrix({"other": VECTOR})) == facts(harness, weight) == ()


def test_a_pair_has_the_key_of_its_mean(harness, imatrix, weight) -> None:
    pair = [weight[:2].clone(), weight[2:].clone()]
    apart = facts(harness, pair, imatrix=imatrix({"p0": VECTOR * 0, "p1": VECTOR * 2}))
    assert apart == facts(harness, weight, imatrix=imatrix({"p0": VECTOR}))


def test_paths_and_defaults_are_not_keyed() -> None:
    keyed = grouped_search.keyed_parameters
    assert keyed({"imatrix": "somewhere", "negative_scales": True}) == {"negative_scales": True}
    assert keyed({"imatrix": "", "negative_scales": False}) == keyed({}) == {}


# The file


def test_a_falsy_path_means_none(harness, weight) -> None:
    for nothing in ("", None):
        assert payload(harness, weight, imatrix=nothing) == weighted(weight, None)


def test_a_path_starts_from_the_working_directory(harness, imatrix, weight, monkeypatch, tmp_path) -> None:
    imatrix({"p0": VECTOR})
    monkeypatch.chdir(tmp_path)
    assert payload(harness, weight, imatrix="importance.safetensors") == weighted(weight, VECTOR)
    with pytest.raises(FileNotFoundError, match=r"other\.safetensors: there is no such importance matrix"):
        facts(harness, weight, imatrix="other.safetensors")


def test_an_edit_of_the_file_is_seen_at_once(harness, imatrix, weight) -> None:
    for factor in range(1, 20):
        changed = VECTOR.clone()
        changed[factor] += 1
        assert payload(harness, weight, imatrix=imatrix({"p0": changed})) == weighted(weight, changed)


def test_a_header_is_kept_while_its_file_stays_as_it_is(harness, imatrix, weight, monkeypatch) -> None:
    monkeypatch.setattr(importance, "SETTLED_NS", -(10**12))
    path = imatrix({"p0": VECTOR})
    assert importance.open_importance(path) is importance.open_importance(path)
    before = importance.open_importance(path)
    Path(path).unlink()
    imatrix({"longer": VECTOR, "p0": VECTOR})
    assert importance.open_importance(path) is not before


def test_few_headers_are_kept(imatrix, tmp_path) -> None:
    for number in range(importance.KEPT_FILES + 3):
        save_file({}, tmp_path / f"{number}.safetensors")
        importance.open_importance(str(tmp_path / f"{number}.safetensors"))
    assert len(importance._kept) == importance.KEPT_FILES


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_changes_under_way_ends_the_build(harness, imatrix, weight, gone) -> None:
    path = imatrix({"p0": VECTOR})
    prepared = grouped_search(harness.request(weight, Q4, parameters={"imatrix": path}))
    Path(path).unlink()
    if not gone:
        imatrix({"p0": VECTOR * 2, "more": VECTOR})
    with pytest.raises(SourceChangedError, match="importance matrix changed while it was in use"):
        prepared.produce(None)


# What is refused


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clip": 1.0}, r"weight/000000: unknown grouped_search parameters \['clip'\]"),
        ({"b": 1, "a": 1, "imatrix": ""}, r"unknown grouped_search parameters \['a', 'b'\]"),
        ({"negative_scales": 1}, "grouped_search negative_scales must be a bool"),
        ({"negative_scales": None}, "must be a bool"),
        ({"imatrix": 3}, "imatrix must be a path"),
    ],
)
def test_parameters(harness, weight, parameters, message) -> None:
    with pytest.raises(ValueError, match=message):
        facts(harness, weight, **parameters)


@pytest.mark.parametrize(("format", "shape"), [("bf16", (2, 128)), (Q4, (256,)), ("t2_g128_fp16", (2, 128))])
def test_other_targets(harness, format, shape) -> None:
    with pytest.raises(ValueError, match="grouped_search requires a grouped-integer matrix target"):
        grouped_search(harness.request(torch.ones(shape), format, parameters={"clip": 1.0}))


def test_the_order_of_checks(harness, imatrix, weight) -> None:
    bad = {"imatrix": "missing", "negative_scales": 1}
    with pytest.raises(ValueError, match="must be a bool"):
        grouped_search.check(harness.request(weight, Q4, shape=(5, 200), parameters=bad))
    bad["negative_scales"] = False
    with pytest.raises(ValueError, match="weight/000000: parent and logical source counts differ"):
        grouped_search.check(harness.request(weight, Q4, shape=(5, 200), rows_per_chunk=0, parameters=bad))
    with pytest.raises(ValueError, match="rows_per_chunk must be positive"):
        grouped_search.check(harness.request(weight, Q4, rows_per_chunk=0, parameters=bad))
    with pytest.raises(FileNotFoundError):
        grouped_search.check(harness.request(weight, Q4, parameters=bad))


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({"p0": VECTOR[:100]}, r"weight/000000: imatrix vector length differs from K=200"),
        ({"p0": VECTOR.reshape(1, 200)}, "imatrix vector length differs from K=200"),
        ({"p0": VECTOR.double()}, "must be stored as F32, not F64"),
        ({"p0": -VECTOR}, "importance must be finite and nonnegative"),
        ({"p0": VECTOR / 0}, "importance must be finite and nonnegative"),
    ],
)
def test_vectors(harness, imatrix, weight, vectors, message) -> None:
    with pytest.raises(ValueError, match=message):
        facts(harness, weight, imatrix=imatrix(vectors))


def test_files_of_other_kinds(harness, weight, tmp_path) -> None:
    with pytest.raises(ValueError, match="one Safetensors file, not a directory"):
        facts(harness, weight, imatrix=str(tmp_path))
    (tmp_path / "other").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match="Safetensors header exceeds file"):
        facts(harness, weight, imatrix=str(tmp_path / "other"))


def test_integers_are_refused_when_they_are_read(harness) -> None:
    prepared = grouped_search(harness.request(torch.ones(2, 128, dtype=torch.int32), Q4))
    with pytest.raises(TypeError, match="grouped_search source must provide floating-point values"):
        prepared.produce(None)


def test_equal_weights_are_not_absmax(harness, weight) -> None:
    assert harness.payload(grouped_search, harness.request(weight, Q4)) != harness.payload(
        grouped_absmax, harness.request(weight, Q4)
    )


def test_vectors_are_read_in_float32(imatrix) -> None:
    found = importance.open_importance(imatrix({"p0": VECTOR})).vector("p0")
    assert found is not None
    assert found.dtype == np.float32
    assert np.array_equal(found, VECTOR.numpy())
