"""Checkpoints of the reference cases, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixtures import synthetic
from fixtures.golden import WriteCheckpoint, golden_target
import pytest

from ninferbuild.target import Target


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """Writes the checkpoint of a case once; its conversion arguments."""
    root = tmp_path_factory.mktemp("checkpoints")
    written: dict[str, dict[str, Any]] = {}

    def write(case: str) -> dict[str, Any]:
        if case not in written:
            written[case] = synthetic.write_case(case, root / case)
        return written[case]

    return write


@pytest.fixture
def target(checkpoint: WriteCheckpoint, tmp_path: Path) -> Callable[[str], Target]:
    """Target of a case, by name."""
    return lambda name: golden_target(name, checkpoint, tmp_path)
