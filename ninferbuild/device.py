"""The devices that encode: resolved late, because asking for them imports torch."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ninferbuild.device_names import parse_device
from ninferbuild.target_schema import OptionError

if TYPE_CHECKING:
    import torch


class Device:
    """The devices of one build, resolved when they are first needed.

    Args:
        wanted: names of devices, or None for the best there are.

    Raises:
        UsageError: a name that no device can have. Whether there is such a device is not looked at.
    """

    def __init__(self, wanted: str | None):
        _parse(wanted if wanted is not None else "cpu")
        self._wanted = wanted

    @cached_property
    def all(self) -> tuple[torch.device, ...]:
        """Every device that encodes."""
        return resolve_devices(self._wanted)

    def __call__(self) -> torch.device:
        """The first device: where a user's function runs."""
        return self.all[0]

    def __str__(self) -> str:
        return ", ".join(map(str, self.all))


def resolve_devices(wanted: str | None) -> tuple[torch.device, ...]:
    """The devices of a name: ``cpu``, ``cuda`` (every GPU), ``cuda:1``, ``cuda:0,1``; None takes CUDA where there is.

    Raises:
        ValueError: no such device, or CUDA is unavailable.
    """
    import torch

    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = _parse(wanted)
    if numbers is None:
        return (torch.device("cpu"),)
    if not torch.cuda.is_available():
        raise ValueError(f"--device {wanted}: CUDA is unavailable here; use --device cpu")
    count = torch.cuda.device_count()
    if not numbers:
        # The first is "cuda" without a number: what a user's function is told does not depend on how many there are.
        return (torch.device("cuda"), *(torch.device("cuda", index) for index in range(1, count)))
    for number in numbers:
        if number >= count:
            raise ValueError(f"--device {wanted}: there is no GPU {number}; there are {count}, counted from 0")
    return tuple(torch.device("cuda", number) for number in numbers)


def _parse(wanted: str) -> tuple[int, ...] | None:
    try:
        return parse_device(wanted)
    except ValueError as error:
        raise OptionError(f"--device {wanted}: {error}") from None


def resolve_device(wanted: str | None) -> torch.device:
    """The first of :func:`resolve_devices`."""
    return resolve_devices(wanted)[0]
