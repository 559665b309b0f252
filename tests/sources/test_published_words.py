"""Scalars and codes as published checkpoints hold them: which way a scale goes, and what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ninferbuild.sources.compressed_tensors import has_matrix, matrix_source
from ninferbuild.sources.logical import select_rows

FP8 = "fp8_e4m3fn_row_bf16"
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
CODES = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


@pytest.fixture
def matrix(open_tensors: Callable[..., Any], checkpoints: Any) -> Callable[..., Any]:
    """A store with the matrix ``p`` (2, 16); scalars by name, as FP32 values or words of any shape."""

    def make(codes: str, scales: tuple[int, ...] = (0x38, 0x40), **scalars: Any) -> Any:
        tensors = {
            f"p.{codes}": checkpoints.stored("U8", np.array([CODES, CODES], np.uint8)),
            "p.weight_scale": checkpoints.stored("F8_E4M3", np.array([scales], np.uint8).T),
            "p.weight_shape": checkpoints.stored("I64", np.array([2, 16])),
        }
        for name, value in scalars.items():
            tensors[f"p.{name}"] = checkpoints.stored("F32", np.array(value, np.float32))
        return open_tensors(tensors)

    return make


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_compressed_tensors_scalars_are_divisors(shape: tuple[int, ...], matrix: Callable[..., Any]) -> None:
    store = matrix("weight_packed", weight_global_scale=np.full(shape, 2.0), input_global_scale=np.full(shape, 1.5))
    source = matrix_source(store, "p.weight", (2, 16))
    assert source.values().tolist() == [*(value / 2 for value in TABLE), *TABLE]
    assert source.weight_divisor() == bytes.fromhex("00000040")
    assert source.input_divisor() == bytes.fromhex("0000c03f")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_model_opt_scalars_are_multipliers(shape: tuple[int, ...], matrix: Callable[..., Any]) -> None:
    store = matrix("weight", weight_scale_2=np.full(shape, 2.0), input_scale=np.full(shape, 4.0))
    source = matrix_source(store, "p.weight", (2, 16))
    assert source.values()[:16].tolist() == [2 * value for value in TABLE]
    assert source.weight_divisor() == bytes.fromhex("0000003f")
    assert source.input_divisor() == bytes.fromhex("0000803e")
    assert source.read_encoded(0, 2).codes.tolist() == [CODES, CODES]


@pytest.mark.parametrize(
    ("multiplier", "divisor"), [(0x40400000, 0x3EAAAAAB), (0x3900F990, 0x45FE10A6), (0x39324207, 0x45B7D2D3)]
)
def test_a_reciprocal_is_rounded_once(multiplier: int, divisor: int, matrix: Callable[..., Any]) -> None:
    value = np.array(multiplier, np.uint32).view(np.float32)
    source = matrix_source(matrix("weight", weight_scale_2=value, input_scale=value), "p.weight", (2, 16))
    assert source.weight_divisor() == source.input_divisor() == divisor.to_bytes(4, "little")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), [2.0, 2.0]])
@pytest.mark.parametrize(
    ("codes", "weight", "activation"),
    [("weight_packed", "weight_global_scale", "input_global_scale"), ("weight", "weight_scale_2", "input_scale")],
)
def test_scalars_that_are_no_scales(
    bad: Any, codes: str, weight: str, activation: str, matrix: Callable[..., Any]
) -> None:
    message = "expected a source FP32 scalar" if isinstance(bad, list) else "divisor must be finite and positive"
    source = matrix_source(matrix(codes, **{weight: bad, activation: bad}), "p.weight", (2, 16))
    with pytest.raises(ValueError, match=f"{weight}: {message}"):
        source.weight_divisor()
    fine = matrix_source(matrix(codes, **{weight: 2.0, activation: bad}), "p.weight", (2, 16))
    with pytest.raises(ValueError, match=f"{activation}: {message}"):
        fine.input_divisor()
    assert len(fine.weight_divisor()) == 4


@pytest.mark.parametrize("word", [0x80, 0x7F])
def test_block_scales_that_are_none(word: int, matrix: Callable[..., Any]) -> None:
    store = matrix("weight", scales=(0x38, word), weight_scale_2=2.0)
    with pytest.raises(ValueError, match=r"p\.weight_scale: expected nonnegative finite E4M3FN scales"):
        matrix_source(store, "p.weight", (2, 16)).read_encoded(0, 2)


@pytest.mark.parametrize(("codes", "divisor"), [("weight", 0.25), ("weight_packed", 2.0)])
def test_the_name_of_the_codes_says_which_way_the_scale_goes(
    codes: str, divisor: float, matrix: Callable[..., Any]
) -> None:
    store = matrix(codes, weight_global_scale=2.0, weight_scale_2=4.0, input_global_scale=2.0, input_scale=4.0)
    source = matrix_source(store, "p.weight", (2, 16), "nvfp4")
    assert source.weight_divisor() == source.input_divisor() == np.float32(divisor).tobytes()


@pytest.mark.parametrize(("codes", "scale"), [("weight", "weight_global_scale"), ("weight_packed", "weight_scale_2")])
def test_a_scale_of_the_other_tool_is_not_taken(codes: str, scale: str, matrix: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"missing source tensor 'p\.(weight_scale_2|weight_global_scale)'"):
        _ = matrix_source(matrix(codes, **{scale: 2.0}), "p.weight", (2, 16)).description


def test_a_scale_of_channels_is_refused(matrix: Callable[..., Any]) -> None:
    store = matrix("weight", weight_scale_2=2.0, pre_quant_scale=np.ones(16))
    for format in (None, "nvfp4"):
        with pytest.raises(ValueError, match="p: pre_quant_scale is not supported"):
            _ = matrix_source(store, "p.weight", (2, 16), format).description


@pytest.mark.parametrize(
    ("scale", "rounded"), [(0x3AA137F4, 0x3AA1), (0x3EAAAAAB, 0x3EAB), (0x3B008080, 0x3B01), (0x3B018000, 0x3B02)]
)
def test_one_fp8_scale_is_rounded_to_bf16_for_every_row(
    scale: int, rounded: int, open_tensors: Callable[..., Any], checkpoints: Any
) -> None:
    import torch

    codes = np.array([[0x38, 0xB8, 0x40], [0x30, 0xB0, 0x80], [0, 1, 2]], np.uint8)
    store = open_tensors(
        {
            "p.weight": checkpoints.stored("F8_E4M3", codes),
            "p.weight_scale": checkpoints.stored("F32", np.array(scale, np.uint32).view(np.float32)),
            "p.input_scale": checkpoints.stored("F32", np.float32(0)),  # activations are scaled as they come
        }
    )
    source = matrix_source(store, "p.weight", (3, 3), FP8)
    rows = source.read_encoded(0, 3)
    assert rows.scales.view(torch.int16).tolist() == [rounded] * 3
    assert rows.codes.tolist() == codes.tolist()
    with pytest.raises(ValueError, match="does not provide input_divisor"):
        source.input_divisor()


def test_half_a_scale_a_row(open_tensors: Callable[..., Any], checkpoints: Any) -> None:
    store = open_tensors(
        {
            "p.weight": checkpoints.stored("F8_E4M3", np.zeros((4, 8), np.uint8)),
            "p.weight_scale": checkpoints.bf16([1.0, 1.0]),
        }
    )
    with pytest.raises(ValueError, match=r"p\.weight_scale: expected one .*scale per row or one global scale"):
        _ = matrix_source(store, "p.weight", (4, 8), FP8).description


def test_query_and_gate_rows_keep_the_divisors_of_their_tensor(
    open_tensors: Callable[..., Any], checkpoints: Any
) -> None:
    rows = np.arange(512, dtype=np.int64)
    codes = np.repeat((rows % 251)[:, None], 32, axis=1).astype(np.uint8)
    store = open_tensors(
        {
            "q.weight_packed": checkpoints.stored("U8", codes),
            "q.weight_scale": checkpoints.stored("F8_E4M3", np.full((512, 4), 0x38, np.uint8)),
            "q.weight_global_scale": checkpoints.stored("F32", np.array([3.0], np.float32)),
            "q.input_global_scale": checkpoints.stored("F32", np.array([5.0], np.float32)),
        }
    )
    whole = matrix_source(store, "q.weight", (512, 64), "nvfp4")
    for ranges in (((0, 128), (256, 384)), ((128, 256), (384, 512))):
        part = select_rows(whole, ranges)
        expected = np.concatenate([codes[begin:end] for begin, end in ranges])
        assert np.array_equal(part.read_encoded(0, 256).codes.numpy(), expected)
        assert (part.weight_divisor(), part.input_divisor()) == (whole.weight_divisor(), whole.input_divisor())


def test_which_matrices_a_store_has(matrix: Callable[..., Any]) -> None:
    store = matrix("weight_packed")
    assert has_matrix(store, "p.weight")
    assert not has_matrix(store, "q.weight")
    assert has_matrix(matrix("weight"), "p.weight")
