"""Names of devices."""

from __future__ import annotations

import pytest
import torch

from ninferbuild.device import Device, resolve_device, resolve_devices


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


@pytest.mark.usefixtures("gpus")
def test_cuda_is_every_gpu_and_numbers_are_those() -> None:
    assert [str(device) for device in resolve_devices("cuda")] == ["cuda", "cuda:1", "cuda:2"]
    assert [str(device) for device in resolve_devices("cuda:2,0")] == ["cuda:2", "cuda:0"]
    assert resolve_devices(None) == resolve_devices("cuda")
    assert str(Device("cuda:1,2")) == "cuda:1, cuda:2"
    assert resolve_device("cuda:2,0") == torch.device("cuda", 2)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("cuda:3", "there are 3"),
        ("cuda:0,0", "once"),
        ("cuda:a", "by number"),
        ("tpu", "no such device"),
        ("cpu:0", "no such device"),
    ],
)
def test_unusable_names_say_what_to_do(name: str, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        resolve_devices(name)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_devices(None) == (torch.device("cpu"),)
    with pytest.raises(ValueError, match="--device cpu"):
        resolve_devices("cuda")
