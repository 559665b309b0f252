"""Errors found in the data while it is encoded, raised without stalling a GPU for every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


STACKED = 256
"""Conditions on a device that are put together, so that each takes a byte instead of memory of its own."""


class ErrorFlags:
    """Collects conditions that make an encoding invalid.

    A condition on a host tensor raises at once. A condition on an accelerator stays there: asking for it would wait
    for all work queued so far, and each step that combined it with others would be one more to queue. *The first* one
    that held counts, so that both kinds of device report the same error; :meth:`raise_if_any` waits once.

    Args:
        device: where the encoding is done.

    One object serves one action. On CUDA all calls have to be ordered among themselves: use one stream, or streams
    that wait for each other.
    """

    __slots__ = ("_conditions", "_device", "_errors", "_stacks")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._errors: list[tuple[type[Exception], str]] = []  # of each condition on the device, in order
        self._conditions: list[torch.Tensor] = []  # bool scalars, the latest of them
        self._stacks: list[torch.Tensor] = []  # bool vectors of those before

    def note(self, bad: torch.Tensor, message: str, kind: type[Exception] = ValueError) -> None:
        """Record that the data are invalid if any element of the bool tensor ``bad`` is true.

        Raises:
            kind: with ``message``, at once, when ``bad`` is on the host and holds.
        """
        if bad.ndim:
            bad = bad.any()
        if bad.device.type == "cpu":
            if bool(bad):
                raise kind(message)
            return
        self._errors.append((kind, message))
        self._conditions.append(bad.to(self._device))
        if len(self._conditions) == STACKED:
            self._stack()

    def _stack(self) -> None:
        import torch

        if self._conditions:
            self._stacks.append(torch.stack(self._conditions))
            self._conditions.clear()

    def raise_if_any(self) -> None:
        """Wait for the device and raise the first error that was noted. Must precede any use of the encoded bytes."""
        self._stack()
        if not self._stacks:
            return
        import torch

        held = torch.cat(self._stacks).cpu().nonzero()
        if len(held):
            kind, message = self._errors[int(held[0])]
            raise kind(message)
