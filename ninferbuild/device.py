"""The device that encodes: resolved late, because asking for it imports torch."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Device:
    """The device of one build, resolved when it is first needed.

    Args:
        wanted: name of a device, or None for the best there is.
    """

    def __init__(self, wanted: str | None):
        self._wanted = wanted

    @cached_property
    def _device(self) -> torch.device:
        return resolve_device(self._wanted)

    def __call__(self) -> torch.device:
        return self._device


def resolve_device(wanted: str | None) -> torch.device:
    """The device of a name; None takes CUDA where there is one.

    Raises:
        ValueError: no such device, or CUDA is unavailable.
    """
    import torch

    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ValueError(f"--device {wanted}: no such device; use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {wanted}: CUDA is unavailable here; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {wanted}: only cpu and cuda are supported")
    return device
