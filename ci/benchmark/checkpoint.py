"""Writing checkpoints: deterministic random values at the speed of the disk, or sparse files of any size."""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
from pathlib import Path
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmark.geometry import Geometry, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_WORDS = 33_554_393
"""Words of the block of random values: a prime, so that repeats of it fall on ever other groups, rows and blocks."""

SMALL_BLOCK_WORDS = 1_299_709
"""The same for models of a few megabytes."""

STEP_WORDS = 1_000_003
"""How far into the block each tensor starts behind the one before it."""

SHARD_BYTES = 4_000_000_000
MARK_WORDS = 8


def random_block(words: int = BLOCK_WORDS) -> NDArray[np.uint16]:
    """BF16 words ``[words]`` like those of trained weights: normal, with scales that differ along the block.

    No word is NaN, infinite or so large that a format cannot hold it.
    """
    generator = np.random.default_rng(27)
    values = generator.standard_normal(words, dtype=np.float32)
    scales = 0.02 * np.exp(0.3 * generator.standard_normal(words // 512 + 1)).astype(np.float32)
    values *= np.repeat(scales, 512)[:words]
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_random(directory: Path, geometry: Geometry, block: NDArray[np.uint16]) -> int:
    """Write a checkpoint whose tensors are cut out of ``block``, each from a place of its own; its tensors' bytes."""
    data = block.data.cast("B")
    start = 0
    total = 0
    for path, tensors in _shards(directory, geometry):
        with path.open("wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(_header(tensors)))
            for tensor in tensors:
                left, position = tensor.bytes, start
                while left:
                    piece = data[position : position + left]
                    _write_all(file.fileno(), piece)
                    left, position = left - len(piece), 0
                total += tensor.bytes
                start = (start + 2 * STEP_WORDS) % len(data)
            os.fsync(file.fileno())
    return total


def write_sparse(directory: Path, geometry: Geometry, *, marked: bool) -> int:
    """Write a checkpoint of files that take almost no space; its tensors' bytes.

    Args:
        marked: begin every logical parameter with bytes of its own, so that no two have one digest; all else is
            zero. Otherwise only headers are written, and the bytes that a tensor has to begin with.
    """
    total = 0
    serial = 0
    for path, tensors in _shards(directory, geometry):
        header = _header(tensors)
        with path.open("wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(header))
            offset = len(header)
            for tensor in tensors:
                if marked:
                    for row in tensor.parts:
                        begin = tensor.bytes // tensor.shape[0] * row
                        os.pwrite(file.fileno(), _mark(serial)[: tensor.bytes - begin], offset + begin)
                        serial += 1
                if tensor.begins:
                    os.pwrite(file.fileno(), tensor.begins, offset)
                offset += tensor.bytes
                total += tensor.bytes
            os.ftruncate(file.fileno(), offset)
            os.fsync(file.fileno())
    return total


def _mark(serial: int) -> bytes:
    """BF16 words that no other ``serial`` gives, all of them ordinary numbers near 0.02."""
    words = [0x3C80 | (serial >> (7 * index)) & 0x7F for index in range(MARK_WORDS)]
    return struct.pack(f"<{MARK_WORDS}H", *words)


def _shards(directory: Path, geometry: Geometry) -> Iterator[tuple[Path, list[Tensor]]]:
    """The files of a checkpoint with their tensors. Everything but these files has been written."""
    directory.mkdir(parents=True)
    tensors = list(geometry.tensors())
    limit = min(SHARD_BYTES, sum(tensor.bytes for tensor in tensors) // 2 + 1)
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled and filled + tensor.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.bytes for tensor in tensors)}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", geometry.config())
    _write_resources(directory, geometry.vocabulary)
    for name, shard in zip(names, shards, strict=True):
        yield directory / name, shard


def _header(tensors: list[Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_resources(directory: Path, vocabulary: int) -> None:
    """Tokenizer files as large as a real model's: a token an id and as many merges."""
    ordinary = vocabulary - 16
    special = [{"id": ordinary + index, "content": f"<|special {index}|>", "special": True} for index in range(8)]
    model = {
        "type": "BPE",
        "vocab": {f"token{index}": index for index in range(ordinary)},
        "merges": [[f"to{index}", f"ken{index}"] for index in range(ordinary)],
    }
    _write_json(directory / "tokenizer.json", {"model": model, "added_tokens": special})
    decoder = {str(token["id"]): {"content": token["content"], "special": True} for token in special}
    _write_json(directory / "tokenizer_config.json", {"model_max_length": 262144, "added_tokens_decoder": decoder})
    _write_json(directory / "generation_config.json", {"eos_token_id": [ordinary]})
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]
