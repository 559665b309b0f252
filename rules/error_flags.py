"""Errors found in the data while it is encoded, raised without stalling a GPU for every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ErrorFlags:
    """Collects conditions that make an encoding invalid.

    A condition on a host tensor raises at once. A condition on an accelerator stays there: asking for it would wait
    for all work queued so far. The flags keep *the first* condition that held, so that both kinds of device report
    the same error, and :meth:`raise_if_any` waits once.

    Args:
        device: where the encoding is done.

    One object serves one action. On CUDA all calls have to be ordered among themselves: use one stream, or streams
    that wait for each other.
    """

    __slots__ = ("_device", "_errors", "_first")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._errors: list[tuple[type[Exception], str]] = []
        self._first: torch.Tensor | None = None  # on the device: 1 + index into _errors of the first error, or 0

    def note(self, bad: torch.Tensor, message: str, kind: type[Exception] = ValueError) -> None:
        """Record that the data are invalid if any element of the bool tensor ``bad`` is true.

        Raises:
            kind: with ``message``, at once, when ``bad`` is on the host and holds.
        """
        if bad.device.type == "cpu":
            if bool(bad if bad.ndim == 0 else bad.any()):
                raise kind(message)
            return
        import torch

        if (kind, message) not in self._errors:
            self._errors.append((kind, message))
        flagged = bad.any().to(self._device, torch.int32) * (1 + self._errors.index((kind, message)))
        self._first = flagged if self._first is None else torch.where(self._first == 0, flagged, self._first)

    def raise_if_any(self) -> None:
        """Wait for the device and raise the first error that was noted. Must precede any use of the encoded bytes."""
        if self._first is not None and (first := int(self._first.item())):
            kind, message = self._errors[first - 1]
            raise kind(message)
