"""Running the command line in this process, with the real engine or a stand-in that records its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
import sys
from types import ModuleType
from typing import Any

import pytest

from ninferbuild.cli import main
from ninferbuild.target import Target


@dataclass
class Ran:
    """What one command left behind."""

    code: int
    out: str
    err: str

    def failed(self, code: int, *parts: str) -> None:
        """It ended with ``code`` and one line on standard error that holds ``parts``; nothing on standard output."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        for part in parts:
            assert part in self.err


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> Ran:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkpoint directory and two targets, in the working directory."""
    (tmp_path / "model").mkdir()
    (tmp_path / "ninferbuild.toml").write_text(
        'default = ["a"]\n[defaults]\nmodel = "model"\nrecipe = "qwen3_6_27b"\n'
        '[targets.a]\n[targets.b]\ndevice = "cpu"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NINFERBUILD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@dataclass
class Result:
    target: Target
    out: Path | None
    up_to_date: bool = False
    artifact_id: str = "00ff"
    objects: int = 55
    total: int = 3
    executed: int = 2
    cached: int = 1
    seconds: float = 1.26

    @property
    def files(self) -> tuple[tuple[Path | None, int], ...]:
        return ((self.out, 4096),)

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target.name, "executed": self.executed}


@dataclass
class Engine:
    """Stands in for ``ninferbuild.build``. ``act`` is called within each build, and may print or raise."""

    calls: list[tuple[Target, dict[str, Any]]] = field(default_factory=list)
    act: Callable[[Target], None] = lambda target: None
    up_to_date: bool = False

    def build(self, target: Target, **options: Any) -> Result:
        progress = options.pop("progress")
        self.calls.append((target, options))
        progress.start(2, 100)
        progress.note("encoding on cpu")
        progress.action(1, 2, "first (+1): bf16 (4,)", "run")
        progress.advance(50)
        self.act(target)
        progress.done(1, "run")
        progress.action(2, 2, "second: bf16 (4,)", "cached")
        progress.done(2, "cached")
        return Result(target, target.out if options["link"] else None, self.up_to_date)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    module = ModuleType("ninferbuild.build")
    module.build = engine.build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ninferbuild.build", module)
    return engine
