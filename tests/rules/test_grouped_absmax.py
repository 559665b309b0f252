"""``grouped_absmax``: scales and codes to the bit, its helper, and what it refuses."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.rules import grouped_absmax, tiles
from ninferbuild.rules.groupwise import pick_device, quantize_matrix

Q4, Q5, Q6, Q8 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"
SEARCHED = (Q4, Q5, Q6, Q8)

BF16_3636 = 2.7120113372802734e-06
WORKED = [
    pytest.param(Q4, [-7, -1, 0, 1, 7, 3.5, -3.5, 0.25], 0x3C00, [-7, -1, 0, 1, 7, 4, -4, 0], id="halves"),
    pytest.param(Q4, [7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 0x3C00, [7, 0, 2, 2, 0, -2, -2], id="ties to even"),
    pytest.param(Q4, [BF16_3636] * 64, 0x0006, [7] * 64, id="quotient, not product"),
    pytest.param(Q4, [1e-38, -1e-38], 0x0001, [0, 0], id="tiny"),
    pytest.param(Q4, [7 * 2.0**-25, -7 * 2.0**-25], 0x0001, [4, -4], id="scale ties to zero"),
    pytest.param(Q4, [1.49 * 2.0**-24 * 7, -1.49 * 2.0**-24 * 7], 0x0001, [7, -8], id="reaches qmin"),
    pytest.param(Q4, [7 * 65504.0], 0x7BFF, [7], id="largest scale"),
    pytest.param(Q4, [458639.3], 0x7BFF, [7], id="rounds down to the largest scale"),
    pytest.param(Q4, [0.0, -0.0], 0x0000, [0, 0], id="zeros"),
]


def first_group(
    values: list[float], format: str, device: str, dtype: torch.dtype = torch.float32
) -> tuple[int, list[int]]:
    group = QUANT_FORMATS[format].group_size
    weight = torch.zeros(1, group, dtype=dtype)
    weight[0, : len(values)] = torch.tensor(values, dtype=dtype)
    result = quantize_matrix(weight, format, device=device)
    assert result.codes.dtype == torch.int8
    assert result.scales.dtype == torch.float16
    assert result.codes.device.type == device
    assert not result.codes[0, 1:].any()
    assert not result.codes[0, 0, len(values) :].any()
    return int(result.scales[0, 0].cpu().view(torch.int16)), result.codes[0, 0, : len(values)].tolist()


@pytest.mark.parametrize(("format", "values", "scale", "codes"), WORKED)
def test_worked_groups(format: str, values: list[float], scale: int, codes: list[int], device: str) -> None:
    assert first_group(values, format, device) == (scale, codes)


def test_code_is_the_rounded_product_with_the_rounded_reciprocal(device, floats) -> None:
    values = floats([0x41A0B334, 0x417C7BFF]).tolist()
    assert first_group(values, Q4, device) == (0x41BD, [7, 6])


def test_binary64_is_rounded_to_binary32_first(device: str) -> None:
    assert first_group([1 + 2.0**-30] * 32, Q8, device, torch.float64) == (0x2008, [127] * 32)


RAMP = [
    (Q4, [0x3750, 0], [-7, -7, -7, -6, -6, -6, -6, -5, -5, -5, -5, -5], 260, "27692230d648e770"),
    (Q5, [0x32D4, 0], [-15, -15, -14, -14, -13, -13, -12, -12, -11, -11, -10, -10], 516, "cdb1f4c40ee2748f"),
    (Q6, [0x2E9B, 0], [-31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21, -20], 516, "5efb1161f2295dd5"),
    (Q8, [0x2673, 0x2640, 0, 0], list(range(-127, -82, 4)), 264, "526c2564ec55dbd1"),
]  # fmt: skip
RAMP_BYTES = {
    Q4: [(0, "99a9aababbbbccccdcddedeeeeffff0000101121222233334444545555666677"), (256, "50370000")],
    Q5: [
        (0, "112233445566778899a9bacbdcedfe0f00112233445566778798a9bacbdcedfe"),
        (256, "ffffff7f00000000" + "00" * 8),
        (512, "d4320000"),
    ],
    Q6: [
        (0, "21436587a9cbed0f1032547698badcfe1032547698badcfe0021436587a9cbed"),
        (256, "aaaaaaeaffffffff0000000055555555" + "00" * 16),
        (512, "9b2e0000"),
    ],
    Q8: [],
}


@pytest.mark.parametrize(("format", "scales", "codes", "size", "digest"), RAMP)
def test_ramp(harness, model, device, format, scales, codes, size, digest) -> None:
    ramp = torch.tensor([[(i - 32) / 10 for i in range(64)]], dtype=torch.float32)
    result = quantize_matrix(ramp, format, device=device)
    assert model.words(result.scales)[0].tolist() == scales
    assert result.codes.flatten()[:12].tolist() == codes
    payload = harness.payload(grouped_absmax, harness.request(ramp, format, device=device))
    assert len(payload) == size
    assert hashlib.sha256(payload).hexdigest()[:16] == digest
    for offset, expected in RAMP_BYTES[format]:
        assert payload[offset : offset + len(expected) // 2].hex() == expected


MATRIX = [
    (Q4, 1.0, [0x3452, 0x3477, 0x3477, 0x3440], [-2, 0, 2, 5, 7, -6, -3, -1], 808,
     "f6cffbed0f1b531c451e5bd42e139ebc363eacc442082c38836322bc8dca832d"),
    (Q5, 1.0, [0x3009, 0x302B, 0x302B, 0x2FEF], [-4, 1, 5, 10, 14, -12, -7, -2], 1064,
     "d86a5468a0269b7d1e07b88b4c2759cf58249e7be571a54142a3facda4bfa0b0"),
    (Q6, 1.0, [0x2BCE, 0x2C08, 0x2C08, 0x2BAD], [-8, 2, 11, 21, 30, -25, -15, -5], 1320,
     "dc445393912423517e8cf6808afb4112f442655e2340afa439feb98fb144806d"),
    (Q8, 1.0, [0x239F, 0x239F, 0x23E0, 0x23D0, 0x23E0, 0x23BF, 0x237F, 0], [-33, 6, 45, 84, 123, -102, -63, -19], 1360,
     "40cdab6892720a153418f8ac856a6f9e548c9e2f1f94d454f46fd425f98bce9e"),
    (Q4, 1e-7, [1, 1, 1, 1], [-1, 0, 1, 2, 3, -3, -2, 0], 808,
     "25d9923fc6b984fb59fd5cd19ebe5b64620f673df474bd9cae48c938053b2e4e"),
    (Q8, 1e-7, [1] * 7 + [0], [-1, 0, 1, 2, 3, -3, -2, 0], 1360,
     "3239dd9d28b28cc3b1fbc5a834ef375c06fbcf7ce34e0eeb9a8f6e4ea345800c"),
]  # fmt: skip


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 512])
@pytest.mark.parametrize(("format", "factor", "scales", "codes", "size", "digest"), MATRIX)
def test_matrix(harness, model, matrix, device, rows_per_chunk, format, factor, scales, codes, size, digest) -> None:
    weight = matrix * torch.tensor(factor, dtype=torch.float32)
    result = quantize_matrix(weight, format, device=device)
    assert model.words(result.scales)[0].tolist() == scales
    assert result.codes.flatten()[:8].tolist() == codes
    request = harness.request(weight, format, rows_per_chunk=rows_per_chunk, device=device)
    payload = harness.payload(grouped_absmax, request)
    assert len(payload) == size
    assert hashlib.sha256(payload).hexdigest() == digest
    assert harness.assembled(grouped_absmax, request) == payload


def test_tiles_of_the_cpu_do_not_change_the_bytes(harness, matrix, monkeypatch) -> None:
    whole = harness.payload(grouped_absmax, harness.request(matrix, Q5))
    helper = quantize_matrix(matrix, Q5, device="cpu")
    monkeypatch.setattr(tiles, "CPU_TILE_ELEMENTS", 256)
    assert harness.payload(grouped_absmax, harness.request(matrix, Q5)) == whole
    tiled = quantize_matrix(matrix, Q5, device="cpu")
    assert torch.equal(tiled.codes, helper.codes)
    assert torch.equal(tiled.scales, helper.scales)


@pytest.mark.parametrize(
    ("parameters", "format", "digest"), [((1, 2), Q4, "ca08518d5d06cdc7"), ((3, 4), Q5, "d4c8371b04545130")]
)
def test_inputs_of_a_parent_follow_each_other(harness, device, parameters, format, digest) -> None:
    sources = [torch.tensor([[p * 2.0**r] * 128 for r in range(4)], dtype=torch.bfloat16) for p in parameters]
    payload = harness.payload(grouped_absmax, harness.request(sources, format, rows_per_chunk=3, device=device))
    assert hashlib.sha256(payload).hexdigest()[:16] == digest


def test_parent_of_another_shape_than_its_input(harness) -> None:
    values = torch.arange(128, dtype=torch.bfloat16)
    payloads = {
        harness.payload(grouped_absmax, harness.request(values.reshape(shape), Q8, shape=(1, 128)))
        for shape in ((128,), (4, 32), (1, 128))
    }
    assert [hashlib.sha256(payload).hexdigest()[:16] for payload in payloads] == ["36abb1246ac1c1c0"]


@pytest.mark.parametrize("format", SEARCHED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_any_floating_type_agrees_with_the_model(model, device, format, dtype) -> None:
    weight = (torch.randn(9, 333, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    result = quantize_matrix(weight, format, device=device)
    codes, scales = model.grouped(weight.double().numpy(), format)
    assert np.array_equal(result.codes.cpu().numpy(), codes)
    assert np.array_equal(model.words(result.scales), scales)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-30, 4),
    spread=st.integers(0, 12),
    format=st.sampled_from(SEARCHED),
)
def test_random_matrices_agree_with_the_model(model, seed: int, exponent: int, spread: int, format: str) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((3, 192)) * 10.0**exponent
    weight = (weight * 10.0 ** generator.uniform(-spread, 0, weight.shape)).astype(np.float32)
    result = quantize_matrix(torch.from_numpy(weight), format, device="cpu")
    codes, scales = model.grouped(weight, format)
    assert np.array_equal(result.codes.numpy(), codes)
    assert np.array_equal(model.words(result.scales), scales)


@pytest.mark.parametrize("format", SEARCHED)
def test_scale_of_every_bfloat16_magnitude(model, device, format) -> None:
    group = QUANT_FORMATS[format].group_size
    words = np.arange(1, 0x7F80, dtype=np.uint32)
    magnitudes = (words << 16).view(np.float32)
    with np.errstate(over="ignore"):
        expected = (magnitudes / np.float32(QUANT_FORMATS[format].qmax)).astype(np.float16)
    expected[expected == 0] = np.float16(2.0**-24)
    fits = np.isfinite(expected)
    count = int(fits.sum())
    weight = torch.zeros(count, group, dtype=torch.float32)
    weight[:, 3] = -torch.from_numpy(magnitudes[fits])
    for source in (weight, weight.bfloat16()):
        scales = model.words(quantize_matrix(source, format, device=device).scales)[:, 0]
        assert np.array_equal(scales, expected[fits].view(np.uint16))
    refused = torch.tensor([[float(magnitudes[count])]])
    with pytest.raises(ValueError, match="scale is not finite and positive"):
        quantize_matrix(refused, format, device=device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_refuses_values_that_are_not_finite(harness, device, bad, dtype) -> None:
    weight = torch.ones(4, 128, dtype=dtype)
    weight[2, 77] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_matrix(weight, Q4, device=device)
    with pytest.raises(ValueError, match="NaN or infinity"):
        harness.payload(grouped_absmax, harness.request(weight, Q4, device=device))
    with pytest.raises(ValueError, match="NaN or infinity"):
        harness.assembled(grouped_absmax, harness.request(weight, Q4, device=device))


def test_refuses_scales_that_overflow(harness, device) -> None:
    weight = torch.zeros(1, 64)
    weight[0, 0] = 458640.0
    with pytest.raises(ValueError, match="scale is not finite and positive"):
        harness.payload(grouped_absmax, harness.request(weight, Q4, device=device))
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_matrix(torch.full((1, 1), 1e39, dtype=torch.float64), Q4, device=device)


def test_refuses_integers_when_it_encodes(harness) -> None:
    request = harness.request(torch.ones(2, 128, dtype=torch.int32), Q4)
    prepared = grouped_absmax(request)
    with pytest.raises(TypeError, match="floating point"):
        prepared.produce(None)
    with pytest.raises(TypeError, match="floating point"):
        quantize_matrix(torch.ones(2, 128, dtype=torch.int8), Q4)


@pytest.mark.parametrize(("format", "shape"), [("bf16", (2, 128)), ("nvfp4", (128, 64)), (Q4, (256,))])
def test_refuses_other_targets(harness, format, shape) -> None:
    with pytest.raises(ValueError, match="grouped-integer matrix target"):
        grouped_absmax(harness.request(torch.ones(shape), format))


def test_helper_refuses_other_ranks_and_formats() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        quantize_matrix(torch.ones(128), Q4)
    for shape in ((0, 128), (3, 0)):
        with pytest.raises(ValueError, match="positive dimensions"):
            quantize_matrix(torch.ones(shape), Q4)
    with pytest.raises(ValueError, match="quantized numeric format"):
        quantize_matrix(torch.ones(1, 128), "bf16")


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device().type == pick_device("").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="cpu, cuda or cuda:N"):
        pick_device("meta")
    with pytest.raises(ValueError, match="cpu, cuda or cuda:N"):
        pick_device("gpu")


def test_encode_keeps_the_block_as_it_was(harness) -> None:
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    before = weight.clone()
    request = harness.request(weight, Q6)
    grouped_absmax.encode(weight, request.target, grouped_absmax.check(request), 0, torch.device("cpu"))
    assert torch.equal(weight, before)
