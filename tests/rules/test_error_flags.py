"""Errors in the data: at once on the host, the first one later on a device."""

from __future__ import annotations

import pytest
import torch

from ninferbuild.rules import ErrorFlags, grouped_absmax


def flags(device: str) -> ErrorFlags:
    return ErrorFlags(torch.device(device))


def test_host_conditions_raise_at_once() -> None:
    errors = flags("cpu")
    errors.note(torch.tensor([False, False]), "fine")
    with pytest.raises(TypeError, match="broken"):
        errors.note(torch.tensor([[False], [True]]), "broken", TypeError)


def test_nothing_noted(device) -> None:
    errors = flags(device)
    errors.raise_if_any()
    errors.note(torch.zeros(3, dtype=torch.bool, device=device), "fine")
    errors.raise_if_any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnDevice:
    def note(self, errors: ErrorFlags, bad: bool, message: str, kind: type[Exception] = ValueError) -> None:
        errors.note(torch.tensor([False, bad], device="cuda"), message, kind)

    def test_first_error_is_raised_late(self) -> None:
        errors = flags("cuda")
        for bad, message, kind in [
            (False, "a", ValueError), (True, "b", TypeError), (True, "a", ValueError), (False, "b", TypeError)
        ]:  # fmt: skip
            self.note(errors, bad, message, kind)
        with pytest.raises(TypeError, match=r"^b$"):
            errors.raise_if_any()

    def test_encode_defers_to_the_flags_it_is_given(self, harness) -> None:
        weight = torch.ones(2, 128, device="cuda")
        weight[1, 1] = float("nan")
        request = harness.request(torch.ones(2, 128), "q4_g64_fp16", device="cuda")
        errors, checked, cuda = flags("cuda"), grouped_absmax.check(request), torch.device("cuda")
        planes = grouped_absmax.encode(weight, request.target, checked, 0, cuda, errors)
        assert [plane.device.type for plane in planes] == ["cuda", "cuda"]
        with pytest.raises(ValueError, match="NaN or infinity"):
            errors.raise_if_any()
        with pytest.raises(ValueError, match="NaN or infinity"):
            grouped_absmax.encode(weight, request.target, checked, 0, cuda)


class Elsewhere:
    """Stands for a bool scalar on a device, which is only looked at in the end."""

    ndim = 0
    device = torch.device("cuda")

    def __init__(self, value: bool):
        self.value = value

    def to(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.value)


@pytest.mark.parametrize("first", [0, 1, 255, 256, 257, 700])
def test_the_first_of_very_many_counts(first: int) -> None:
    errors = flags("cuda")
    for number in range(800):
        kind = TypeError if number == first else ValueError
        errors.note(Elsewhere(number in (first, first + 1, 799)), f"condition {number}", kind)  # type: ignore[arg-type]
    for _ in range(2):  # asking changes nothing
        with pytest.raises(TypeError, match=f"^condition {first}$"):
            errors.raise_if_any()


def test_none_of_very_many() -> None:
    errors = flags("cuda")
    for number in range(600):
        errors.note(Elsewhere(False), f"condition {number}")  # type: ignore[arg-type]
    errors.raise_if_any()
