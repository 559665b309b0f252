"""Ternary matrices of GGUF files as sources: row maps, gathers, what is refused, and importing them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import subprocess
import sys

from fixtures.gguf_files import Tensor, write_gguf
import numpy as np
import pytest
import torch

from ninferbuild.artifact.codecs import row_split
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.logical import gather_source, leading_rows, select_rows
from ninferbuild.sources.ternary import ternary_rows, ternary_source

F32, Q8_0, PQ2_0, PTQ1_0 = 0, 8, 142, 143


def matrix(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Codes int8 ``[rows, K/128, 128]``, scale words uint16 ``[rows, K/128]``, and their PQ2_0 blocks."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-1, 2, (rows, columns // 128, 128)).astype(np.int8)
    scales = generator.integers(1, 0x7C00, (rows, columns // 128)).astype("<u2")
    stored = (codes + 1).astype(np.uint8).reshape(rows, columns // 128, 32, 4)
    packed = (stored << np.array([0, 2, 4, 6], np.uint8)).sum(axis=-1).astype(np.uint8)
    blocks = np.concatenate([scales.view(np.uint8).reshape(rows, columns // 128, 2), packed], axis=-1)
    return codes, scales, blocks.tobytes()


CODES, SCALES, RAW = matrix(16, 256)
TENSORS: tuple[Tensor, ...] = (
    ("m", (16, 256), PQ2_0, RAW),
    ("old", (1, 128), PTQ1_0, bytes.fromhex("45cf6c45cf6c45cf6c45cf6c45cf6c459431bb9431bb943130bb8022")),
    ("stack", (2, 2, 128), PQ2_0, bytes(34 * 4)),
    ("odd", (2, 64), PQ2_0, bytes(34)),
    ("q8", (4, 32), Q8_0, bytes(4 * 34)),
    ("norm", (128,), F32, bytes(512)),
    ("unknown", (4, 128), 199, bytes(64)),
)


@pytest.fixture
def gguf(tmp_path: Path) -> GGUFFile:
    return GGUFFile(write_gguf(tmp_path / "m.gguf", {"general.architecture": "t"}, TENSORS))


def words(scales: torch.Tensor) -> np.ndarray:
    return scales.contiguous().view(torch.int16).numpy().view(np.uint16)


def test_rows_as_they_are_stored(gguf: GGUFFile) -> None:
    found = ternary_rows(gguf, "m", 3, 7)
    assert found.format == "t2_g128_fp16"
    assert (found.codes.numpy() == CODES[3:7]).all()
    assert (words(found.scales) == SCALES[3:7]).all()
    assert ternary_rows(gguf, "m").codes.shape == (16, 2, 128)
    assert ternary_rows(gguf, "old").codes.reshape(-1).tolist() == [(5 * j) % 3 - 1 for j in range(128)]


def test_a_row_map_of_any_order_with_repeats(gguf: GGUFFile) -> None:
    source = ternary_source(gguf, "m", (4, 256), [(9, 10), (3, 4), (12, 13), (3, 4)])
    assert source.read_encoded is not None
    assert (source.read_encoded(0, 4).codes.numpy() == CODES[[9, 3, 12, 3]]).all()
    assert (words(source.read_encoded(0, 4).scales) == SCALES[[9, 3, 12, 3]]).all()
    assert (source.read_encoded(1, 3).codes.numpy() == CODES[[3, 12]]).all()
    values = CODES[[9, 3, 12, 3]] * SCALES[[9, 3, 12, 3]].view("<f2").astype(np.float32)[:, :, None]
    assert (source.values().numpy() == values.reshape(-1)).all()
    assert (source.values(200, 300).numpy() == values.reshape(-1)[200:300]).all()
    assert source.values(5, 5).shape == (0,)
    assert source.label == "m[t2_g128_fp16][4, 256]"


def test_derived_sources_keep_codes_and_scales(gguf: GGUFFile) -> None:
    whole = ternary_source(gguf, "m", (16, 256))
    for derived, rows in (
        (gather_source(whole, np.array([7, 2])), [7, 2]),
        (select_rows(whole, ((4, 6), (0, 2))), [4, 5, 0, 1]),
        (leading_rows(whole, 13, 16), [13, 14, 15]),
    ):
        assert derived.read_encoded is not None
        found = derived.read_encoded(0, len(rows))
        assert (found.codes.numpy() == CODES[rows]).all()
        assert (words(found.scales) == SCALES[rows]).all()
        description = derived.description
        assert description is not None
        assert description.encoding == "t2_g128_fp16"
        assert description.parts[0].region.length == len(rows) * 2 * 34


@pytest.mark.parametrize(
    ("name", "shape", "error", "message"),
    [
        ("none", (1, 128), KeyError, "tensor 'none' is absent"),
        ("q8", (4, 32), ValueError, "q8: Q8_0 is not a ternary format"),
        ("norm", (1, 128), ValueError, "norm: F32 is not a ternary format"),
        ("unknown", (4, 128), ValueError, "unknown: 199 is not a ternary format"),
        ("stack", (4, 128), ValueError, r"stack: row access requires rank 2, got \(2, 2, 128\)"),
        ("odd", (2, 64), ValueError, "odd: 64 columns are not whole blocks"),
    ],
)
def test_what_is_no_ternary_matrix(
    gguf: GGUFFile, name: str, shape: tuple[int, int], error: type[Exception], message: str
) -> None:
    source = ternary_source(gguf, name, shape)
    reads: tuple[Callable[[], object], ...] = (
        lambda: source.description,
        lambda: source.read_encoded(0, 1) if source.read_encoded else None,
        lambda: ternary_rows(gguf, name),
    )
    for read in reads:
        with pytest.raises(error, match=message):
            read()


def test_a_source_of_another_shape(gguf: GGUFFile) -> None:
    with pytest.raises(ValueError, match=r"m\.gguf: m: described shape \(16, 256\) differs from \(16, 128\)"):
        _ = ternary_source(gguf, "m", (16, 128)).description


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 17), (4, 3), (5, 5)])
def test_rows_outside(gguf: GGUFFile, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"m: row range \[{begin},{end}\) is outside 16"):
        ternary_rows(gguf, "m", begin, end)


def test_a_truncated_matrix(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "cut.gguf", {"general.architecture": "t"}, TENSORS[:1])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 40)  # the last block, and the padding behind it
    gguf = GGUFFile(path)
    with pytest.raises(ValueError, match="past the end of the file"):
        ternary_rows(gguf, "m")


def test_describing_imports_no_torch(gguf: GGUFFile) -> None:
    code = (
        "import sys\n"
        "from ninferbuild.sources.gguf import GGUFFile\n"
        "from ninferbuild.sources.logical import gather_source\n"
        "from ninferbuild.sources.ternary import ternary_source\n"
        "source = ternary_source(GGUFFile(sys.argv[1]), 'm', (3, 256), [(5, 7), (0, 1)])\n"
        "assert gather_source(source, [2, 0]).description.encoding == 't2_g128_fp16'\n"
        "assert not {'torch', 'numpy', 'gguf'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gguf.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_planes_of_known_codes() -> None:
    codes = torch.tensor([[(5 * j) % 3 - 1 for j in range(128)]], dtype=torch.int8).view(1, 1, 128)
    scales = torch.tensor([[0x2280]], dtype=torch.int16).view(torch.float16)
    payload = row_split.encode_row_split(codes, scales, "t2_g128_fp16", (1, 128))
    assert payload[:32] == (b"\xc7\x71\x1c" * 11)[:32]
    assert payload[256:] == b"\x80\x22"
    padded = torch.zeros(1, 2, 128, dtype=torch.int8)
    padded[0, 0, :8] = torch.tensor([-1, 0, 1, 1, -1, 0, 0, 1])
    payload = row_split.encode_row_split(padded, torch.tensor([[1.5, 0.25]]).half(), "t2_g128_fp16", (1, 130))
    assert len(payload) == 260
    assert payload[:2] == b"\x53\x43"
    assert payload[256:] == b"\x00\x3e\x00\x34"
