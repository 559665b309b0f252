from collections.abc import Callable
from pathlib import Path

from fixtures import fx
import pytest

from ninferbuild.sources.safetensors import SafetensorsSource


@pytest.fixture(scope="session")
def fx_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every FX checkpoint; tests must not write here."""
    return fx.write_all(tmp_path_factory.mktemp("recipes") / "fx")


@pytest.fixture
def open_fx(fx_root: Path) -> Callable[[str], SafetensorsSource]:
    """Opens one FX checkpoint by name; a new store each time."""
    return lambda name: SafetensorsSource(fx_root / name)
