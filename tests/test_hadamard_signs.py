"""Sign vectors of rotated matrices, and the identities that make them useful."""

from __future__ import annotations

import numpy as np
import pytest

from ninferbuild.method import AuxiliaryValue

BLOCK = 1024


def hadamard(values: np.ndarray) -> np.ndarray:
    """``H`` of each block of 1024 along the last axis, by butterflies; ``H[i][j] = (-1)**popcount(i & j) / 32``."""
    found = values.reshape(-1, BLOCK).astype(np.float64)
    width = 1
    while width < BLOCK:
        pairs = found.reshape(-1, BLOCK // (2 * width), 2, width)
        found = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        width *= 2
    return (found / 32).reshape(values.shape)


def test_words() -> None:
    value = AuxiliaryValue.hadamard_signs([1, -1] * 512)
    assert (value.format, value.shape) == ("bf16", (1024,))
    assert value.data == bytes.fromhex("803f80bf") * 512
    assert AuxiliaryValue.hadamard_signs([1.0, -1.0] * 1024).shape == (2048,)


@pytest.mark.parametrize(
    ("signs", "message"),
    [
        ([1] * 1023 + [0], "element 1023 is 0"),
        ([-1, 2] * 512, "element 1 is 2"),
        ([float("nan")] * 1024, "element 0 is nan"),
        ([1] * 1000, "whole blocks of 1024, not 1000"),
        ([], "whole blocks of 1024, not 0"),
    ],
)
def test_what_is_no_sign_vector(signs: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuxiliaryValue.hadamard_signs(signs)


def test_the_transform_is_the_matrix_of_the_definition() -> None:
    unit = np.eye(BLOCK)[3]
    assert (32 * hadamard(unit))[:8].tolist() == [1, -1, -1, 1, 1, -1, -1, 1]
    expected = [[(-1) ** (i & j).bit_count() / 32 for j in range(BLOCK)] for i in (0, 5, 1023)]
    assert np.array_equal(hadamard(np.eye(BLOCK))[[0, 5, 1023]], expected)


def test_the_transform_is_its_own_inverse() -> None:
    values = np.random.default_rng(0).normal(size=(3, 2 * BLOCK))
    assert np.allclose(hadamard(hadamard(values)), values, rtol=0, atol=1e-13)


def test_a_rotated_matrix_gives_the_products_of_the_one_it_stands_for() -> None:
    generator = np.random.default_rng(1)
    weight, x = generator.normal(size=(5, 2 * BLOCK)), generator.normal(size=2 * BLOCK)
    words = np.frombuffer(AuxiliaryValue.hadamard_signs(generator.choice([1, -1], 2 * BLOCK)).data, "<u2")
    signs = (words.astype(np.uint32) << 16).view(np.float32)
    stored = hadamard(signs * weight)
    assert np.allclose(stored @ hadamard(signs * x), weight @ x, rtol=1e-12)
    assert np.allclose(signs * hadamard(stored), weight, rtol=0, atol=1e-13)
