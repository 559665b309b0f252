"""Requests, and an independent model of the arithmetic, for the tests of encode rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from fixtures.memory_writer import MemoryWriter
import numpy as np
import pytest
import torch

from ninferbuild.artifact.formats import default_layout, get_format
from ninferbuild.artifact.layouts import planes
from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.artifact.tensor_output import TensorOutput
from ninferbuild.method import Method, MethodInput, PrepareRequest
from ninferbuild.rules.rule import Rule
from ninferbuild.sources.logical import LogicalSource, array_source

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Harness:
    """What tests do with rules."""

    @staticmethod
    def spec(shape: Sequence[int], format: str, divisors: int = 1) -> TensorSpec:
        return TensorSpec("weight/000000", tuple(shape), format, default_layout(format), divisors)

    @classmethod
    def request(
        cls,
        sources: torch.Tensor | LogicalSource | Sequence[torch.Tensor | LogicalSource],
        format: str,
        *,
        shape: Sequence[int] | None = None,
        rows_per_chunk: Any = 512,
        device: str = "cpu",
        divisors: int = 1,
        **changes: Any,
    ) -> PrepareRequest:
        """A parent of ``sources``; their parameters are ``p0``, ``p1``, …, each used by ``input``."""
        if isinstance(sources, torch.Tensor | LogicalSource):
            sources = [sources]
        inputs = []
        for index, source in enumerate(sources):
            name = f"p{index}"
            stored = array_source(source, name) if isinstance(source, torch.Tensor) else source
            inputs.append(MethodInput(name, stored, ((name, "input"),)))
        if shape is None:
            first = inputs[0].source.shape
            shape = first if len(inputs) == 1 else (sum(item.source.shape[0] for item in inputs), *first[1:])
        fields: dict[str, Any] = {
            "policies": {use: "A16Only" for item in inputs for use in item.uses},
            "parameters": {},
            "auxiliary_overrides": {},
        }
        fields.update(changes)
        return PrepareRequest(
            target=cls.spec(shape, format, divisors),
            inputs=tuple(inputs),
            device=device,
            rows_per_chunk=rows_per_chunk,
            **fields,
        )

    @staticmethod
    def payload(method: Method, request: PrepareRequest) -> bytes:
        """The object that the method writes through the documented interface."""
        writer = MemoryWriter(request.target)
        method(request).produce(TensorOutput(writer, request.target.id))
        return writer.payload()

    @staticmethod
    def assembled(rule: Rule, request: PrepareRequest) -> bytes:
        """The object from the planes of :meth:`Rule.encode`, each appended in order."""
        target, checked = request.target, rule.check(request)
        geometry = planes(target.layout, target.format, target.shape, target.divisors)
        pieces: list[list[bytes]] = [[] for _ in geometry]
        for first, block in rule.blocks(request):
            encoded = rule.encode(block, target, checked, first, torch.device(request.device))
            assert len(encoded) == len(geometry)
            for piece, plane in zip(pieces, encoded, strict=True):
                assert plane.dtype == torch.uint8
                assert plane.ndim == 1
                piece.append(plane.cpu().numpy().tobytes())
        data = b""
        for piece, plane in zip(pieces, geometry, strict=True):
            joined = b"".join(piece)
            assert len(joined) == plane.bytes
            data += joined + bytes(plane.extent - plane.bytes)
        return data


class Model:
    """The arithmetic again, in NumPy and without tricks."""

    @staticmethod
    def words(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """The bit patterns of a tensor of 16-bit words."""
        return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)

    @staticmethod
    def grouped(weight: np.ndarray[Any, Any], format: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Codes int8 ``[N, R, G]`` and scale words uint16 ``[N, R]`` of a float array ``[N, K]``."""
        record: Any = get_format(format)
        rows, columns = weight.shape
        padded = -(-columns // 128) * 128
        x = np.zeros((rows, padded), np.float32)
        with np.errstate(all="ignore"):
            x[:, :columns] = weight.astype(np.float32)
            x = x.reshape(rows, padded // record.group_size, record.group_size)
            maxima = np.abs(x).max(-1)
            scales = (maxima.astype(np.float64) / record.qmax).astype(np.float32).astype(np.float16)
            scales[(scales == 0) & (maxima > 0)] = np.float16(2.0**-24)
            reciprocals = np.where(scales > 0, 1 / scales.astype(np.float64), 0).astype(np.float32)
            codes = np.clip(np.rint(x * reciprocals[..., None]), record.qmin, record.qmax).astype(np.int8)
        return codes, scales.view(np.uint16)

    @staticmethod
    def e4m3(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """E4M3FN words of binary32 values within ±448 by search in the table of all words; ties to the even word."""
        table = np.array(
            [(m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:-1]
        )
        magnitude = np.abs(values.astype(np.float64))
        above = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
        below = np.maximum(above - 1, 0)
        down, up = magnitude - table[below], table[above] - magnitude
        pick = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
        pick = np.where(table[above] == magnitude, above, pick)
        return (pick | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)

    @staticmethod
    def bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """bfloat16 words of binary32 values that are not NaN, by integer arithmetic."""
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    return Harness


@pytest.fixture(scope="session")
def model() -> type[Model]:
    return Model


@pytest.fixture
def matrix() -> torch.Tensor:
    """A float32 matrix of 5 × 200 multiples of 1/64 that has no pattern along rows or groups."""
    i = torch.arange(5 * 200)
    return ((((37 * i + 5 * (i // 7) + 11 * 77) % 251) - 125).float() / 64).reshape(5, 200)


@pytest.fixture
def floats() -> Callable[[Sequence[int]], torch.Tensor]:
    """Binary32 tensors from their words."""
    return lambda words: torch.from_numpy(np.array(words, np.uint32).view(np.float32).copy())


@pytest.fixture
def opaque() -> Callable[[torch.Tensor], LogicalSource]:
    """A source with a reader of its own, as a recipe makes one."""

    def make(values: torch.Tensor) -> LogicalSource:
        flat = values.reshape(-1)
        assert flat.numel() == prod(values.shape)
        return LogicalSource(tuple(values.shape), "opaque", lambda begin, end: flat[begin:end])

    return make
