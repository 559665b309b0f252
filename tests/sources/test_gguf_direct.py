"""Plain numbers of GGUF files as sources."""

from collections.abc import Iterator
from pathlib import Path

from fixtures.gguf_files import write_gguf
import numpy as np
import pytest
import torch

from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.gguf_direct import describe_direct, direct_source

WORDS = np.array([0x3F80, 0x7FC1, 0x8000, 0xFF81, 0xBF80, 0x0001], "<u2")
NUMBERS = np.linspace(-2, 3, 24, dtype="<f4").reshape(2, 3, 4)


@pytest.fixture
def gguf(tmp_path: Path) -> Iterator[GGUFFile]:
    path = write_gguf(
        tmp_path / "values.gguf",
        {},
        [
            ("words", (3, 2), 30, WORDS.tobytes()),
            ("numbers", NUMBERS.shape, 0, NUMBERS.tobytes()),
            ("halves", (4,), 1, np.array([1, -0.5, 2, 0], "<f2").tobytes()),
            ("blocks", (1, 32), 8, bytes(34)),
        ],
    )
    with GGUFFile(path) as gguf:
        yield gguf


def test_values_in_their_stored_type(gguf: GGUFFile) -> None:
    numbers = direct_source(gguf, "numbers")
    assert numbers.label == "numbers"
    assert numbers.shape == (2, 3, 4)
    assert (numbers.values().numpy().reshape(NUMBERS.shape) == NUMBERS).all()
    assert numbers.values(5, 9).tolist() == NUMBERS.reshape(-1)[5:9].tolist()
    assert direct_source(gguf, "halves").values().dtype == torch.float16
    assert describe_direct(gguf, "halves").dtype == "F16"


def test_bf16_words_keep_their_bits(gguf: GGUFFile) -> None:
    source = direct_source(gguf, "words", change=lambda stored: stored.select_rows(((2, 3), (0, 2))))
    assert source.values().view(torch.int16).numpy().view("<u2").tolist() == WORDS[[4, 5, 0, 1, 2, 3]].tolist()


def test_a_change_of_the_description(gguf: GGUFFile) -> None:
    source = direct_source(gguf, "numbers", (4, 6), lambda stored: stored.reshape((4, 6)).add(-1.0))
    assert source.description is not None
    assert (source.values().numpy() == NUMBERS.reshape(-1) - np.float32(1)).all()


def test_refusals(gguf: GGUFFile) -> None:
    with pytest.raises(ValueError, match="blocks: Q8_0 is not a direct format"):
        describe_direct(gguf, "blocks")
    with pytest.raises(KeyError, match="absent"):
        direct_source(gguf, "nothing")
    with pytest.raises(ValueError, match=r"numbers: described shape \(2, 3, 4\) differs from \(5,\)"):
        _ = direct_source(gguf, "numbers", (5,)).description
