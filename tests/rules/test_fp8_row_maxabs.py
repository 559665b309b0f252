"""``fp8_row_maxabs``: scales and codes to the bit, its helper, and what it refuses."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.rules import fp8_row_maxabs, tiles
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.fp8_words import e4m3fn_words, quantize_bf16_rows, quantize_rows

FP8 = "fp8_e4m3fn_row_bf16"
STEP = 2.0**-133  # of the smallest bfloat16 numbers

WORKED = [
    ([0.0, -0.0, 0.0], 0x0000, "00 00 00"),
    ([448, 1.0625, 1.1875, -1.0625, -1.1875], 0x3F80, "7E 38 3A B8 BA"),
    ([1, -0.0, 0.5, -1, -0.5], 0x3B12, "7E 80 76 FE F6"),
    ([2, -2, 1, -1], 0x3B92, "7E FE 76 F6"),
    ([3, 1, -0.1, 0.001, -1e-4], 0x3BDB, "7E 71 D7 22 88"),
    ([100, 33.3, -7.77, 0.02, 0], 0x3E65, "7E 71 E1 1B 00"),
    ([1e-30, 5e-31], 0x0939, "7E 76"),
    ([448 * 33 * STEP], 0x0021, "7E"),
    ([3.3e38, 1], 0x7B0E, "7E 00"),
    ([1, -1, 0.5, 0.3, -0.0, 0.001], 0x3B12, "7E FE 76 70 80 2E"),
    ([448, -224, 1, 2, 3, 4], 0x3F80, "7E F6 38 40 44 48"),
    ([0.1, 0.2, -0.3, 0.05, 0.01, 0.007], 0x3A30, "71 79 FE 69 57 52"),
]


def quantize(weight: torch.Tensor, device: str):
    errors = ErrorFlags(torch.device(device))
    words = quantize_rows(weight.to(device), errors)
    errors.raise_if_any()
    return words


@pytest.mark.parametrize(("values", "scale", "codes"), WORKED)
def test_worked_rows(model, device, values, scale, codes) -> None:
    words = quantize(torch.tensor([values], dtype=torch.float32), device)
    assert model.words(words.scales).tolist() == [scale]
    assert words.codes.cpu().numpy().tobytes() == bytes.fromhex(codes)


def test_helper_gives_the_same_words(model) -> None:
    for values, scale, codes in WORKED:
        words = quantize_bf16_rows(torch.tensor([values]).bfloat16())
        assert words.codes.dtype == torch.uint8
        assert words.scales.dtype == torch.bfloat16
        assert model.words(words.scales).tolist() == [scale]
        assert words.codes.numpy().tobytes() == bytes.fromhex(codes)


def test_binary64_is_rounded_twice(device: str) -> None:
    value = 1 + 2.0**-8 + 2.0**-40  # binary32: the tie 1 + 2^-8, bfloat16: 1
    words = quantize(torch.tensor([[value, 448.0]], dtype=torch.float64), device)
    assert words.codes.cpu().tolist() == [[0x38, 0x7E]]


def test_object_of_three_rows(harness, device) -> None:
    weight = torch.tensor([[448, 1.0625, -1.1875, 0], [0, -0.0, 0, -0.0], [2, -2, 1, -1]])
    payload = harness.payload(fp8_row_maxabs, harness.request(weight, FP8, device=device))
    assert payload.hex() == "7e38ba00" + "00000000" + "7efe76f6" + "00" * 244 + "803f0000923b"


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 512])
def test_matrix(harness, model, matrix, device, rows_per_chunk) -> None:
    request = harness.request(matrix, FP8, rows_per_chunk=rows_per_chunk, device=device)
    payload = harness.payload(fp8_row_maxabs, request)
    assert len(payload) == 1034
    assert payload[:8].hex() == "ee5b72797dfbf5e8"
    assert payload[-10:] == bytes.fromhex("8f3b") * 5
    assert hashlib.sha256(payload).hexdigest() == "3bbd7908da56147d1dd48da9a584ed05822c9e29c05a396ece872c8a5dbe78e5"
    assert harness.assembled(fp8_row_maxabs, request) == payload


def test_tiles_of_the_cpu_do_not_change_the_bytes(harness, matrix, monkeypatch) -> None:
    whole = harness.payload(fp8_row_maxabs, harness.request(matrix, FP8))
    monkeypatch.setattr(tiles, "CPU_TILE_ELEMENTS", 400)
    assert harness.payload(fp8_row_maxabs, harness.request(matrix, FP8)) == whole


def test_every_bfloat16_maximum(model, device) -> None:
    words = np.arange(1, 0x7F80, dtype=np.uint32)
    maxima = (words << 16).view(np.float32)
    scales = model.bf16((maxima.astype(np.float64) / 448).astype(np.float32))
    scales[scales == 0] = 1
    accepted = scales >= 0x21
    assert maxima[~accepted].max() < 448 * 32.5 * STEP < maxima[accepted].min()
    weight = torch.from_numpy(maxima[accepted])[:, None].bfloat16()
    result = quantize(-weight, device)
    assert np.array_equal(model.words(result.scales), scales[accepted])
    with np.errstate(all="ignore"):
        reciprocals = (1 / (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)).astype(np.float32)
        products = np.clip(maxima * reciprocals, -448, 448)
    assert np.array_equal(result.codes.cpu().numpy()[:, 0], model.e4m3(-products[accepted]))
    for refused in (maxima[~accepted][-1], maxima[0]):
        with pytest.raises(ValueError, match="non-finite value"):
            quantize(torch.tensor([[float(refused)]]), device)


def neighbours_of_all_boundaries() -> np.ndarray:
    """Every E4M3FN magnitude, every midpoint between two, and the binary32 numbers around them."""
    table = np.array(
        [m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
    )
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    around = [points, np.nextafter(points, np.float32(-1)), np.nextafter(points, np.float32(1e9))]
    magnitudes = np.concatenate(around)
    magnitudes = magnitudes[(magnitudes >= 0) & (magnitudes <= 448)]
    return np.concatenate([magnitudes, -magnitudes])


def cast(values: np.ndarray, device: str) -> np.ndarray:
    return e4m3fn_words(torch.from_numpy(values).to(device)).cpu().numpy()


def test_codes_at_every_boundary(model, device) -> None:
    values = neighbours_of_all_boundaries()
    assert np.array_equal(cast(values, device), model.e4m3(values))
    tie = np.float32(2.0**-10)
    edge = np.array([tie, -tie, np.nextafter(tie, np.float32(1)), 0.0, -0.0, 448], np.float32)
    assert cast(edge, device).tobytes().hex() == "008001" + "00807e"


def test_codes_of_sampled_words(model, device) -> None:
    top = int(np.float32(448).view(np.uint32))
    values = np.arange(0, top + 1, 1009, dtype=np.uint32).view(np.float32)
    for signed in (values, -values):
        assert np.array_equal(cast(signed, device), model.e4m3(signed))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 30))
def test_random_rows_agree_with_the_model(model, seed: int, exponent: int) -> None:
    generator = np.random.default_rng(seed)
    weight = torch.from_numpy(generator.standard_normal((4, 77)).astype(np.float32) * np.float32(10.0**exponent))
    words = quantize_bf16_rows(weight.bfloat16())
    x = weight.bfloat16().float().numpy()
    scales = model.bf16((np.abs(x).max(1).astype(np.float64) / 448).astype(np.float32))
    reciprocals = (1 / (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)).astype(np.float32)
    assert np.array_equal(model.words(words.scales), scales)
    assert np.array_equal(words.codes.numpy(), model.e4m3(np.clip(x * reciprocals[:, None], -448, 448)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_refuses_values_that_are_not_finite_in_bfloat16(harness, device, bad) -> None:
    weight = torch.ones(3, 5)
    weight[1, 4] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        harness.payload(fp8_row_maxabs, harness.request(weight, FP8, device=device))


def test_refuses_rows_whose_reciprocal_overflows(harness, device) -> None:
    for maximum in (1e-36, 448 * 32 * STEP):
        weight = torch.tensor([[1.0, 0.0], [maximum, 0.0]])
        with pytest.raises(ValueError, match="non-finite value"):
            harness.payload(fp8_row_maxabs, harness.request(weight, FP8, device=device))


def test_refuses_other_targets(harness) -> None:
    with pytest.raises(ValueError, match="row-scaled FP8 matrix format"):
        fp8_row_maxabs(harness.request(torch.ones(1, 64), "q4_g64_fp16"))
    with pytest.raises(ValueError, match="row-scaled FP8 matrix format"):
        fp8_row_maxabs(harness.request(torch.ones(64), FP8))


def test_helper_refuses_other_types_and_shapes() -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        quantize_bf16_rows(torch.ones(2, 2))
    for shape in ((4,), (0, 4), (4, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match="rank 2 and positive dimensions"):
            quantize_bf16_rows(torch.ones(shape).bfloat16())
