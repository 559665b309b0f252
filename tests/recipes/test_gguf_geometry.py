"""Row orders of exported Qwen3.5 hybrids: exact positions, and what the moves mean."""

from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
import pytest

from ninferbuild.recipes.gguf_geometry import QWEN_27B, QWEN_35B_A3B, Geometry, rows
from ninferbuild.sources import decoding
from ninferbuild.sources.logical import array_source, select_rows, transpose_source

TOY = Geometry(
    hidden=8,
    layers=4,
    vocabulary=16,
    attention_heads=2,
    key_value_heads=1,
    attention_dim=4,
    key_heads=2,
    value_heads=6,
    gdn_dim=2,
    taps=4,
    feed_forward=16,
)


def listed(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [row for begin, end in ranges for row in range(begin, end)]


def columns(geometry: Geometry) -> NDArray[np.int32]:
    return np.frombuffer(geometry.input_columns, dtype="<i4")


def test_toy_positions_and_columns() -> None:
    assert TOY.value_head_positions == (0, 2, 4, 1, 3, 5)
    assert columns(TOY).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_positions_of_the_27b_heads() -> None:
    positions = QWEN_27B.value_head_positions
    assert positions[:8] == (0, 16, 32, 1, 17, 33, 2, 18)
    assert positions[45:] == (15, 31, 47)


@pytest.mark.parametrize("base", [0, 4096])
def test_untiled_rows_of_the_27b(base: int) -> None:
    found = listed(QWEN_27B.untiled_rows(base))
    for logical, stored in {0: 0, 127: 127, 128: 2048, 255: 2175, 256: 4096, 384: 128, 6143: 6143}.items():
        assert found[logical] == base + stored
    assert len(found) == 6144


def test_input_columns_of_the_27b_undo_the_row_move() -> None:
    found = columns(QWEN_27B)
    for stored, element in {
        0: 0,
        127: 127,
        128: 384,
        1920: 5760,
        2048: 128,
        2176: 512,
        4096: 256,
        6143: 6143,
    }.items():
        assert found[stored] == element
    assert sorted(found) == list(range(6144))
    assert np.argsort(found).tolist() == listed(QWEN_27B.untiled_rows())
    digest = "1c3c6784c6d05c97852202c8727de993ce031d544caddf6cd638ad747f7934c9"
    assert sha256(QWEN_27B.input_columns).hexdigest() == digest


def test_input_columns_of_the_35b() -> None:
    found = columns(QWEN_35B_A3B)
    for stored, element in {128: 256, 1920: 3840, 2048: 128, 2176: 384, 4095: 4095}.items():
        assert found[stored] == element
    assert QWEN_35B_A3B.value_head_positions[:8] == (0, 16, 1, 17, 2, 18, 3, 19)
    digest = "2d7a73d361f0932e2fd5029a3c550e4ff5fc1af3f2a8d49db91713aee386f454"
    assert sha256(QWEN_35B_A3B.input_columns).hexdigest() == digest


def test_attention_rows_of_the_27b() -> None:
    query, gate = listed(QWEN_27B.attention_rows()), listed(QWEN_27B.attention_rows(gate=True))
    assert [query[row] for row in (0, 255, 256, 511, 6143)] == [0, 255, 512, 767, 12031]
    assert [gate[row] for row in (0, 255, 256, 6143)] == [256, 511, 768, 12287]
    assert sorted(query + gate) == list(range(12288))


def test_activations_gathered_by_columns_meet_the_stored_matrix() -> None:
    generator = np.random.default_rng(0)
    grouped, activation = generator.integers(-9, 9, (3, 12)), generator.integers(-9, 9, 12)
    gathered = columns(TOY)
    stored = grouped[:, gathered]
    assert (stored @ activation[gathered] == grouped @ activation).all()
    assert (stored[:, listed(TOY.untiled_rows())] == grouped).all()


def test_channels_keep_query_and_key_in_place() -> None:
    assert listed(TOY.channel_rows()) == [*range(8), 8, 9, 12, 13, 16, 17, 10, 11, 14, 15, 18, 19]
    assert TOY.channels == 20


def test_the_convolution_comes_back_transposed() -> None:
    stored = 8 * np.arange(20, dtype=np.float32)[:, None] + np.arange(4, dtype=np.float32)
    source = transpose_source(select_rows(array_source(stored, "conv"), TOY.channel_rows()), (1, 0), (4, 20))
    found = source.values().reshape(4, 20).numpy()
    row = [*range(0, 64, 8), 64, 72, 96, 104, 128, 136, 80, 88, 112, 120, 144, 152]
    assert found.tolist() == [[element + tap for element in row] for tap in range(4)]


def test_a_row_map_of_the_27b_is_short() -> None:
    """Neighbouring rows are one range, so that a parent is read in few pieces."""
    assert len(QWEN_27B.untiled_rows()) == 48
    assert len(QWEN_27B.attention_rows()) == 24
    assert rows(6, 4) == ((4, 10),)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_untile_moves_entries_of_heads(shape: tuple[int, ...]) -> None:
    stored = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    description = array_source(stored, "stored").description
    assert description is not None
    found = decoding.read_values(TOY.untile(description), 0, stored.size).numpy().reshape(shape)
    assert (found == stored[[0, 2, 4, 1, 3, 5]]).all()


@pytest.mark.parametrize(("shape", "entries"), [((5,), 5), ((12, 4), 12), ((), 0)])
def test_untile_refuses_another_axis(shape: tuple[int, ...], entries: int) -> None:
    description = array_source(np.zeros(shape, np.float32), "stored").description
    assert description is not None
    with pytest.raises(ValueError, match=f"axis 0 has {entries} entries, expected 6"):
        TOY.untile(description)


def test_value_heads_must_share_key_heads_evenly() -> None:
    with pytest.raises(ValueError, match="7 value heads are not a multiple of 2 key heads"):
        Geometry(8, 4, 16, 2, 1, 4, 2, 7, 2, 4, 16)
