"""Bytes and tensors: conversions and checks that every codec needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.layouts import Plane

if TYPE_CHECKING:
    Payload = bytes | bytearray | memoryview | torch.Tensor

    WordFaults = tuple[tuple[torch.Tensor, str], ...]
    """(boolean scalar on the device of the words, what it means when true)"""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of ``tensor`` in C order as 1-D uint8 on its device; shares storage when it is contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def payload_tensor(payload: Payload, expected: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``payload`` as a 1-D uint8 tensor on ``device``.

    Raises:
        TypeError: a tensor of another element type or rank.
        ValueError: not ``expected`` bytes.
    """
    if isinstance(payload, torch.Tensor):
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise TypeError(f"a payload is a 1-D uint8 tensor, not {list(payload.shape)} {payload.dtype}")
        length = payload.numel()
    else:
        length = memoryview(payload).nbytes
    if length != expected:
        raise ValueError(f"the payload has {length} bytes; the encoded size is {expected}")
    if isinstance(payload, torch.Tensor):
        return payload.to(device)
    # A copy, because torch cannot express that a tensor is read-only.
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The memory of ``tensor`` in C order."""
    return as_bytes(tensor).cpu().numpy().tobytes()


def host_memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a 1-D uint8 tensor on the host; shared when it is there already."""
    return tensor.contiguous().cpu().numpy().data


def assemble(planes: Sequence[Plane], pieces: Iterable[torch.Tensor]) -> bytes:
    """The bytes of an object from the bytes of its planes; padding between planes is zero."""
    out = bytearray(planes[-1].offset + planes[-1].extent)
    for plane, piece in zip(planes, pieces, strict=True):
        out[plane.offset : plane.offset + plane.bytes] = host_memory(piece)
    return bytes(out)


def split(payload: Payload, planes: Sequence[Plane], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """The bytes of each plane of an object, 1-D uint8 views on ``device``. Raises as :func:`payload_tensor`."""
    data = payload_tensor(payload, planes[-1].offset + planes[-1].bytes, device)
    return [data[plane.offset : plane.offset + plane.bytes] for plane in planes]


def require(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> None:
    """Check element type and shape; None stands for any size.

    Raises:
        TypeError: they differ.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=False)
    )
    if tensor.dtype != dtype or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise TypeError(f"{name} must be {dtype} [{wanted}], not {tensor.dtype} {list(tensor.shape)}")


def decoded_type(dtype: torch.dtype | None) -> torch.dtype:
    """The element type of decoded values: ``dtype``, or bfloat16 for None. Raises ``TypeError`` unless it is floating.

    Decoders take None where they could name the type, because a default is looked up when the module is imported.
    """
    chosen = torch.bfloat16 if dtype is None else dtype
    if not chosen.is_floating_point:
        raise TypeError(f"decoded values need a floating type, not {chosen}")
    return chosen


def raise_faults(faults: WordFaults) -> None:
    """Raises ``ValueError`` with the message of the first fault that is true. Synchronises with the device."""
    for flag, message in faults:
        if bool(flag):
            raise ValueError(message)
