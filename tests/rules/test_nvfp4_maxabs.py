"""``nvfp4_maxabs``: divisor, scales and codes to the bit, the two passes, and what it refuses."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from ninferbuild.method import AuxiliaryValue
from ninferbuild.rules import nvfp4_maxabs, tiles
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.nvfp4_words import e2m1_codes, largest_magnitude, quantize_rows, weight_divisor

NVFP4 = "nvfp4"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1])

F32 = np.float32


def e2m1(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Codes by distance to every magnitude; of two at the same distance the even code."""
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - E2M1)
    nearest = distance.min(-1, keepdims=True)
    even_first = np.where(distance == nearest, np.arange(8) % 2, 2)
    return even_first.argmin(-1).astype(np.uint8) | np.where(np.signbit(values), 8, 0).astype(np.uint8)


def reference(weight: np.ndarray[Any, Any], model: Any) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Divisor, natural scale words and one code a byte of a float matrix ``[N, K]``."""
    x = weight.astype(F32)
    amax = np.abs(x).max()
    divisor = F32(2688.0 / np.float64(amax)) if amax else F32(1)
    y = (x * divisor).reshape(len(x), -1, 16)
    quotient = (np.abs(y).max(-1).astype(np.float64) / 6).astype(F32)
    scales = model.e4m3(np.minimum(quotient, F32(448)))
    numbers = E4M3[scales].astype(F32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(numbers == 0, F32(0), y / numbers)
    return divisor, scales, e2m1(t).reshape(x.shape)


def payload_of(divisor: Any, scales: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> bytes:
    """The object, placed word by word."""
    rows, columns = codes.shape
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).tobytes()
    start = -(-len(packed) // 256) * 256
    plane = np.zeros(scales.size, np.uint8)
    r, g = np.meshgrid(np.arange(rows), np.arange(columns // 16), indexing="ij")
    place = (r // 128 * (columns // 64) + g // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4
    plane[place] = scales
    return packed.ljust(start, b"\0") + plane.tobytes() + np.array(divisor, "<f4").tobytes()


def random_weight(seed: int, rows: int = 128, columns: int = 64, spread: int = 12) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    blocks = generator.integers(-spread, 1, (rows, columns // 16, 1)).astype(np.float64)
    values = generator.standard_normal((rows, columns // 16, 16)) * 2.0**blocks
    values[generator.random(values.shape) < 0.05] = -0.0
    return values.reshape(rows, columns).astype(F32)


def encode_row(values: list[float], device: str) -> tuple[float, str, str]:
    row, errors = torch.tensor([values], dtype=torch.float32, device=device), ErrorFlags(torch.device(device))
    divisor = weight_divisor(largest_magnitude(row), errors)
    errors.raise_if_any()
    codes, scales = quantize_rows(row, divisor)
    return divisor.item(), scales.cpu().numpy().tobytes().hex(), codes.cpu().numpy().tobytes().hex()


def test_worked_rows(device: str) -> None:
    first = [6, -6, 5, 4, 3, 2, 1.5, 1, 0.5, 0.25, -0.25, -1, -2.5, 3.5, 0, -0.0]
    second = [sign * n / 1024 for sign in (1, -1) for n in range(1, 9)]
    codes = "F7 66 45 23 01 A8 6C 80 32 54 66 77 BA DC EE FF"
    assert encode_row([*first, *second], device) == (448.0, "7e31", codes.replace(" ", "").lower())
    assert encode_row([1.0] + [0] * 15 + [1e-7] + [0] * 15, device) == (2688.0, "7e00", "07" + "00" * 15)
    assert encode_row([0.0] * 16, device) == (1.0, "00", "00" * 8)
    assert encode_row([0.5, -0.25] + [0] * 14, device)[0] == 5376.0


def test_ties_signs_and_saturation(device: str) -> None:
    values = torch.tensor([0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.75], device=device)
    assert e2m1_codes(values).tolist() == [0, 8, 0, 2, 2, 4, 4, 6, 6, 7, 10]


def test_codes_around_every_boundary(device: str) -> None:
    points = np.concatenate([E2M1, (E2M1[1:] + E2M1[:-1]) / 2, [6.5, 100.0, 2688 * 512.0]]).astype(F32)
    around = np.concatenate([points, np.nextafter(points, F32(-1)), np.nextafter(points, F32(1e9))])
    values = np.concatenate([around, -around])
    assert np.array_equal(e2m1_codes(torch.from_numpy(values).to(device)).cpu().numpy(), e2m1(values))


def test_codes_of_sampled_words(device: str) -> None:
    magnitudes = np.arange(0, int(F32(64).view(np.uint32)), 1009 * 13, dtype=np.uint32).view(F32)
    for values in (magnitudes, -magnitudes):
        assert np.array_equal(e2m1_codes(torch.from_numpy(values).to(device)).cpu().numpy(), e2m1(values))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-110, 120),
    spread=st.integers(0, 24),
    columns=st.sampled_from([64, 128, 320]),
)
def test_random_matrices_agree_with_the_reference(harness, model, seed, exponent, spread, columns) -> None:
    weight = random_weight(seed, 128, columns, spread) * F32(2.0**exponent)
    payload = harness.payload(nvfp4_maxabs, harness.request(torch.from_numpy(weight), NVFP4))
    assert payload == payload_of(*reference(weight, model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_element_types_are_taken_as_binary32(harness, model, device, dtype) -> None:
    weight = torch.from_numpy(random_weight(3, 128, 192)).to(dtype)
    if dtype == torch.float64:
        weight = weight * (1 + 2.0**-30)
    payload = harness.payload(nvfp4_maxabs, harness.request(weight, NVFP4, device=device))
    assert payload == payload_of(*reference(weight.double().numpy(), model))


@pytest.mark.parametrize("rows_per_chunk", [1, 200, 512, 4096])
def test_packed_inputs_share_a_divisor_whatever_the_blocks(harness, model, device, rows_per_chunk) -> None:
    pieces = [random_weight(seed, rows, 64) * F32(seed) for seed, rows in ((1, 40), (2, 300), (3, 44))]
    sources = [torch.from_numpy(piece) for piece in pieces]
    request = harness.request(sources, NVFP4, rows_per_chunk=rows_per_chunk, device=device)
    payload = harness.payload(nvfp4_maxabs, request)
    assert payload == payload_of(*reference(np.concatenate(pieces), model))


def test_tiles_of_the_cpu_do_not_change_the_bytes(harness, monkeypatch) -> None:
    request = harness.request(torch.from_numpy(random_weight(5, 256, 128)), NVFP4)
    whole = harness.payload(nvfp4_maxabs, request)
    monkeypatch.setattr(tiles, "CPU_TILE_ELEMENTS", 128 * 7)
    assert harness.payload(nvfp4_maxabs, request) == whole


def test_dequantised_values_are_near(harness) -> None:
    from ninferbuild.artifact.codecs.nvfp4 import dequantize_nvfp4

    weight = torch.from_numpy(random_weight(7, 128, 64, spread=0))
    payload = harness.payload(nvfp4_maxabs, harness.request(weight, NVFP4))
    error = (dequantize_nvfp4(payload, weight.shape, dtype=torch.float32) - weight).abs().reshape(128, 4, 16)
    # Half the step from 4 to 6, and what rounding the scale to three bits of mantissa adds to it.
    assert bool((error <= weight.abs().reshape(128, 4, 16).amax(-1, keepdim=True) / 6 * 1.08).all())


def test_the_profile_is_part_of_the_key(harness) -> None:
    checked = nvfp4_maxabs.check(harness.request(torch.ones(128, 64), NVFP4))
    assert checked.facts == ("profile: NVFP4_MAXABS_DIVISOR_RNE_V1",)
    assert not checked.auxiliaries


def test_divisors_of_activations_come_from_the_recipe(harness) -> None:
    weight = torch.ones(128, 64)
    key = ("p0", "input", "activation_input_divisor")
    with pytest.raises(ValueError, match="p0: a calibrated activation divisor is required"):
        nvfp4_maxabs(harness.request(weight, NVFP4, policies={("p0", "input"): "AllowA4"}))
    given_value = AuxiliaryValue.activation_divisor(3.0)
    for policy in ("A16Only", "AllowA8", "AllowA4"):
        changes = {"policies": {("p0", "input"): policy}, "auxiliary_overrides": {key: given_value}}
        assert nvfp4_maxabs(harness.request(weight, NVFP4, **changes)).auxiliaries == {key: given_value}
        if policy != "AllowA4":
            assert not nvfp4_maxabs(harness.request(weight, NVFP4, policies=changes["policies"])).auxiliaries


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_refuses_values_that_are_not_finite(harness, device, bad) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(256, 64, dtype=dtype)
        weight[200, 63] = bad
        with pytest.raises(ValueError, match="NVFP4 source contains NaN or infinity"):
            harness.payload(nvfp4_maxabs, harness.request(weight, NVFP4, device=device))


def test_refuses_weights_without_a_finite_divisor(harness, device) -> None:
    smallest = np.nextafter(F32(2688 / float(np.finfo(F32).max)), F32(1))
    assert harness.payload(nvfp4_maxabs, harness.request(torch.full((128, 64), float(smallest)), NVFP4, device=device))
    with pytest.raises(ValueError, match="divisor that is not finite"):
        harness.payload(nvfp4_maxabs, harness.request(torch.full((128, 64), 1e-36), NVFP4, device=device))


def test_refuses_other_targets(harness) -> None:
    for request in (
        harness.request(torch.ones(1, 64), "q4_g64_fp16"),
        harness.request(torch.ones(64), "bf16"),
    ):
        with pytest.raises(ValueError, match="nvfp4_maxabs requires an NVFP4 matrix target"):
            nvfp4_maxabs(request)
    with pytest.raises(ValueError, match="accepts no numerical parameters"):
        nvfp4_maxabs(harness.request(torch.ones(128, 64), NVFP4, parameters={"clip": 1}))
    with pytest.raises(ValueError, match="one divisor, not 2"):
        nvfp4_maxabs(harness.request(torch.ones(256, 64), NVFP4, divisors=2))


@pytest.mark.parametrize("shape", [(127, 64), (128, 24)])
def test_refuses_broken_tiles(harness, shape) -> None:
    with pytest.raises(ValueError, match="NVFP4 parent requires complete 128-row and 16-column tiles"):
        nvfp4_maxabs(harness.request(torch.ones(shape), NVFP4))
