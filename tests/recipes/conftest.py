from collections.abc import Callable
from pathlib import Path

import pytest

from ninferbuild.sources.safetensors import SafetensorsSource


@pytest.fixture
def open_fx(checkpoints: Path) -> Callable[[str], SafetensorsSource]:
    """Opens one FX checkpoint by name; a new store each time."""
    return lambda name: SafetensorsSource(checkpoints / name)
