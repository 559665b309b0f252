"""Which device encodes."""

from __future__ import annotations

import torch


def pick_device(preferred: str | torch.device | None = "cuda") -> torch.device:
    """The device to work on: ``preferred``, or the CPU when CUDA is asked for (or nothing is) and not available.

    Raises:
        ValueError: ``preferred`` is neither a CPU nor a CUDA device; other back ends lack binary64, which the
            exact quotients need.
    """
    try:
        device = torch.device("cuda" if preferred is None or preferred == "" else preferred)
    except RuntimeError as error:
        raise ValueError(f"unknown device {preferred!r}: use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {preferred!r} cannot encode bit for bit: use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device
