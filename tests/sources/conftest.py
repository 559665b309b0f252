"""Checkpoints written byte by byte, so that tests do not rest on the reader's own ideas of the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
from pathlib import Path
import struct
from typing import Any

import numpy as np
import pytest

Stored = tuple[str, tuple[int, ...], bytes]


def stored(dtype: str, values: Any) -> Stored:
    """An array as a stored tensor; ``values`` has the item size of ``dtype``."""
    array = np.asarray(values)
    return dtype, array.shape, array.tobytes()


def bf16(values: Any) -> Stored:
    """Values that bfloat16 holds exactly."""
    words = np.asarray(values, dtype=np.float32).view(np.uint32)
    assert not (words & 0xFFFF).any()
    return stored("BF16", (words >> 16).astype(np.uint16))


def safetensors_bytes(tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def raw_file(path: Path, header: str | bytes, data: bytes = b"") -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_directory(path: Path, tensors: Mapping[str, Stored], config: Mapping[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


class Checkpoints:
    """The helpers above, as one fixture."""

    stored = staticmethod(stored)
    bf16 = staticmethod(bf16)
    safetensors_bytes = staticmethod(safetensors_bytes)
    raw_file = staticmethod(raw_file)
    write_directory = staticmethod(write_directory)


@pytest.fixture(scope="session")
def checkpoints() -> type[Checkpoints]:
    return Checkpoints


@pytest.fixture
def open_tensors(tmp_path: Path) -> Callable[..., Any]:
    """``open_tensors({name: stored}, config=None)`` → an open store over a directory that holds them."""
    from ninferbuild.sources.safetensors import SafetensorsSource

    def open_store(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None = None) -> SafetensorsSource:
        directory = tmp_path / f"checkpoint{len(list(tmp_path.iterdir()))}"
        return SafetensorsSource(write_directory(directory, tensors, config))

    return open_store
