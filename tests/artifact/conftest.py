"""Data that several modules of these tests need: one small artifact, and words with a pattern."""

from __future__ import annotations

from collections.abc import Callable
import copy
from pathlib import Path
import struct
from typing import Any

import pytest
import torch

from ninferbuild.artifact.formats import QUANT_FORMATS
from ninferbuild.artifact.layouts import row_split_geometry
from ninferbuild.artifact.schema import ResourceSpec, TensorSpec, plan_objects
from ninferbuild.artifact.writer import ArtifactWriter

IDENTITY = bytes(range(16))

DEMO: dict[str, Any] = {
    "components": {
        "text": {
            "config": {
                "architectures": ["Demo"],
                "eps": 1e-06,
                "label": 'é"\\\n\u0001/',
                "flag": True,
                "none": None,
            },
            "resources": {"note.txt": "note"},
        }
    },
    "bindings": {
        "text/w": {"object": "m"},
        "text/swap": {"parts": [{"object": "m", "range": [3, 6]}, {"object": "m", "range": [0, 3]}]},
    },
    "uses": [
        {
            "parameter": "text/w",
            "input": "text/x",
            "activation_policy": "AllowA8",
            "auxiliaries": {"activation_input_divisor": {"object": "d"}},
        }
    ],
    "metadata": {"name": "demo"},
}

DEMO_SPECS = (
    ResourceSpec("note", 3),
    TensorSpec("m", (2, 3), "bf16", "contiguous_le_v1"),
    TensorSpec("d", (), "fp32", "contiguous_le_v1"),
)

DEMO_DATA = {
    "note": b"abc",
    "m": struct.pack("<6H", 0x3F80, 0xBF80, 0x0000, 0x8000, 0x7F80, 0x7FC1),
    "d": struct.pack("<f", 2.5),
}


@pytest.fixture
def demo_value() -> dict[str, Any]:
    """The directory of the demo artifact as a JSON value, free to be changed."""
    value = copy.deepcopy(DEMO)
    value["objects"] = [item.to_json() for item in plan_objects(DEMO_SPECS)]
    value["provenance"] = {}
    value["files"] = [{"path": None, "payload_bytes": 516}]
    return value


@pytest.fixture
def demo_writer() -> Callable[..., ArtifactWriter]:
    """A writer of the demo artifact at the path given."""

    def open_writer(path: Path, **options: Any) -> ArtifactWriter:
        return ArtifactWriter(path, DEMO_SPECS, **DEMO, artifact_id=IDENTITY, **options)

    return open_writer


@pytest.fixture
def demo(tmp_path: Path, demo_writer: Callable[..., ArtifactWriter]) -> Path:
    """The demo artifact on disk."""
    path = tmp_path / "demo.ninfer"
    with demo_writer(path) as writer:
        for name, data in DEMO_DATA.items():
            writer.write_object(name, data)
    return path


@pytest.fixture
def demo_data() -> dict[str, bytes]:
    return dict(DEMO_DATA)


@pytest.fixture
def split_set(tmp_path: Path) -> Path:
    """One resource of 20000 bytes in an entry and two parts."""
    path = tmp_path / "s.ninfer"
    components = {"text": {"config": {}, "resources": {"data": "data"}}}
    data = bytes((7 * i + 3) % 251 for i in range(20000))
    with ArtifactWriter(
        path,
        [ResourceSpec("data", 20000)],
        components=components,
        bindings={},
        max_file_bytes=12288,
        artifact_id=IDENTITY,
    ) as writer:
        writer.write_object("data", (data[i : i + 7000] for i in range(0, 20000, 7000)))
    return path


def pattern(name: str, rows: int = 3, columns: int = 130) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical codes and scales: ``q[n, k] = (5n + 7k) mod range + qmin``, scale word ``0x3000 + 0x40 n + g``."""
    record = QUANT_FORMATS[name]
    geometry = row_split_geometry(record, (rows, columns))
    n, k = torch.arange(rows).unsqueeze(1), torch.arange(geometry.padded_columns)
    codes = (5 * n + 7 * k) % (record.qmax - record.qmin + 1) + record.qmin
    codes[:, columns:] = 0
    g = torch.arange(geometry.groups)
    words = 0x3000 + 0x40 * n + g
    words[:, -(-columns // record.group_size) :] = 0
    codes = codes.to(torch.int8).reshape(rows, geometry.groups, record.group_size)
    return codes, words.to(torch.int16).view(torch.float16)


def fp8_pattern() -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes ``[4, 100]`` and bfloat16 scales ``[4]``."""
    n, k = torch.arange(4).unsqueeze(1), torch.arange(100)
    codes = (31 * n + 7 * k) % 127 | torch.where((n + k) % 3 == 0, 0x80, 0)
    scales = (0x3C00 + 0x11 * torch.arange(4)).to(torch.int16).view(torch.bfloat16)
    return codes.to(torch.uint8), scales


def nvfp4_pattern(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes ``[N, K / 2]`` and natural scales ``[N, K / 16]``."""
    n = torch.arange(rows).unsqueeze(1)
    codes = (13 * n + 5 * torch.arange(columns // 2) + 3) % 256
    scales = (11 * n + 31 * torch.arange(columns // 16) + 1) % 127
    return codes.to(torch.uint8), scales.to(torch.uint8)


class Patterns:
    """The functions above, as one fixture."""

    grouped = staticmethod(pattern)
    fp8 = staticmethod(fp8_pattern)
    nvfp4 = staticmethod(nvfp4_pattern)


@pytest.fixture
def patterns() -> type[Patterns]:
    return Patterns
