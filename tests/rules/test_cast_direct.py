"""``cast_direct``: stored words, and what it refuses."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from ninferbuild.rules import cast_direct

ROUNDED = [
    (torch.float32, 1 + 2.0**-8, 0x3F80),
    (torch.float32, 1 + 2.0**-8 + 2.0**-20, 0x3F81),
    (torch.float32, 1 + 3 * 2.0**-8, 0x3F82),
    (torch.float32, 3.3895314e38, 0x7F7F),
    (torch.float32, 3.4e38, 0x7F80),
    (torch.float32, 2.0**-133, 0x0001),
    (torch.float32, 2.0**-134, 0x0000),
    (torch.float32, 1.5 * 2.0**-134, 0x0001),
    (torch.float64, 1 + 2.0**-8 + 2.0**-40, 0x3F80),
    (torch.float16, 65504.0, 0x4780),
    (torch.float16, 2.0**-24, 0x3380),
    (torch.float32, float("-inf"), 0xFF80),
    (torch.float64, -1e300, 0xFF80),
    (torch.float32, -0.0, 0x8000),
    (torch.float8_e4m3fn, -448.0, 0xC3E0),
    (torch.int64, 257, 0x4380),
    (torch.bool, 1, 0x3F80),
]


def word(harness, values: torch.Tensor, format: str, device: str) -> np.ndarray:
    payload = harness.payload(cast_direct, harness.request(values, format, shape=values.shape, device=device))
    return np.frombuffer(payload, np.uint16 if format == "bf16" else np.uint32)


@pytest.mark.parametrize(("dtype", "value", "expected"), ROUNDED)
def test_bf16_words(harness, device, dtype, value, expected) -> None:
    values = torch.tensor([0.0, value], dtype=torch.float64).to(dtype)
    assert word(harness, values, "bf16", device).tolist() == [0, expected]


def test_every_bf16_word_is_copied(harness, device) -> None:
    words = np.arange(65536, dtype=np.uint16)
    values = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    assert np.array_equal(word(harness, values, "bf16", device), words)


def test_every_fp32_nan_is_copied(harness, device, floats) -> None:
    words = [0x7FC01234, 0xFF800001, 0x7F800000, 0x80000000, 1]
    assert word(harness, floats(words), "fp32", device).tolist() == words


def test_bf16_rounding_of_sampled_words_agrees_with_integer_arithmetic(harness, model, device) -> None:
    words = np.arange(0, 0x7F800001, 10007, dtype=np.uint32)
    values = np.concatenate([words, words | np.uint32(0x80000000)]).view(np.float32)
    assert np.array_equal(word(harness, torch.from_numpy(values), "bf16", device), model.bf16(values))


def test_every_f16_number_becomes_its_bf16(harness, model, device) -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)]
    assert np.array_equal(
        word(harness, torch.from_numpy(values), "bf16", device), model.bf16(values.astype(np.float32))
    )


def test_fp32_from_other_types(harness, device) -> None:
    wide = torch.tensor([1 + 2.0**-24, 1 + 3 * 2.0**-24, 1e300, 2.0**-150], dtype=torch.float64)
    assert word(harness, wide, "fp32", device).tolist() == [0x3F800000, 0x3F800002, 0x7F800000, 0]
    integers = torch.tensor([2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**62 + 1], dtype=torch.int64)
    assert word(harness, integers, "fp32", device).view(np.float32).tolist() == [2**24, 2**24 + 4, -(2**24), 2.0**62]
    narrow = torch.tensor([1.5, -0.0]).bfloat16()
    assert word(harness, narrow, "fp32", device).tolist() == [0x3FC00000, 0x80000000]


def test_int32_truncates_and_keeps_the_bounds(harness, device) -> None:
    def stored(values: list[float], dtype: torch.dtype) -> list[int]:
        return word(harness, torch.tensor(values, dtype=dtype), "int32", device).view(np.int32).tolist()

    assert stored([3.7, -3.7, -(2.0**31), 2147483520.0], torch.float32) == [3, -3, -(2**31), 2147483520]
    assert stored([3.7, -3.7, 2147483647.0], torch.float64) == [3, -3, 2147483647]
    assert stored([3.75, -3.75], torch.bfloat16) == [3, -3]
    assert stored([2**31 - 1, -(2**31)], torch.int64) == [2**31 - 1, -(2**31)]
    assert stored([255, 0], torch.uint8) == [255, 0]
    assert stored([2**31 - 1], torch.uint32) == [2**31 - 1]
    assert stored([2**31 - 1], torch.uint64) == [2**31 - 1]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 3e9),
        (torch.float32, 2.0**31),
        (torch.float32, -(2.0**31) - 256),
        (torch.float32, float("nan")),
        (torch.float64, 2147483647.5),
        (torch.float64, -2147483648.5),
        (torch.float16, float("inf")),
        (torch.bfloat16, float("-inf")),
        (torch.int64, 2**31),
        (torch.int64, -(2**31) - 1),
        (torch.uint32, 2**31),
        (torch.uint64, 2**64 - 5),
    ],
)
def test_int32_refuses_what_it_cannot_hold(harness, device, dtype, value) -> None:
    values = torch.tensor([1, value], dtype=dtype)
    with pytest.raises(ValueError, match="outside the representable range"):
        word(harness, values, "int32", device)


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, "bf16"), (torch.float64, "fp32"), (torch.float16, "bf16"), (torch.bfloat16, "fp32")],
)
def test_refuses_nan_that_needs_a_conversion(harness, device, dtype, format) -> None:
    values = torch.zeros(300, dtype=dtype)
    values[211] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        word(harness, values, format, device)


def test_refuses_complex_numbers(harness) -> None:
    request = harness.request(torch.ones(2), "bf16")
    checked = cast_direct.check(request)
    with pytest.raises(TypeError, match="real numbers"):
        cast_direct.encode(torch.ones(2, dtype=torch.complex64), request.target, checked, 0, torch.device("cpu"))


def test_refuses_other_targets(harness) -> None:
    with pytest.raises(ValueError, match="direct target format"):
        cast_direct(harness.request(torch.ones(4, 128), "q4_g64_fp16"))


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("rows_per_chunk", [1, 2, 512])
def test_any_rank_and_chunk(harness, shape, rows_per_chunk) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    request = harness.request(values, "fp32", shape=shape, rows_per_chunk=rows_per_chunk)
    expected = values.numpy().tobytes()
    assert harness.payload(cast_direct, request) == expected
    assert harness.assembled(cast_direct, request) == expected


def test_inputs_of_a_parent_follow_each_other(harness, device) -> None:
    sources = [torch.tensor([[p * 2.0**r] * 128 for r in range(4)]).bfloat16() for p in (1, 2, 3, 4)]
    payload = harness.payload(cast_direct, harness.request(sources, "bf16", rows_per_chunk=3, device=device))
    assert hashlib.sha256(payload).hexdigest()[:16] == "6b8269bbdfb36bec"


def test_inputs_of_several_types_do_not_round_each_other(harness) -> None:
    sources = [torch.tensor([2**31 - 1, 2**24 + 1], dtype=torch.int64), torch.tensor([1.5, -2.5])]
    payload = harness.payload(cast_direct, harness.request(sources, "int32", shape=(4,)))
    assert np.frombuffer(payload, np.int32).tolist() == [2**31 - 1, 2**24 + 1, 1, -2]
