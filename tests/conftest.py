"""A clean environment for all tests, and fixtures of the end-to-end tests in this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import secrets
import time

from fixtures import fx
from fixtures.workbench import LOGGED_RECIPE, Bench, CallLog, Finished, install_logged_methods
from hypothesis import HealthCheck, settings
import pytest

from ninferbuild.memo import SETTLED_NS
from ninferbuild.rules import METHODS

MACHINE_SEED = "BUILD_MACHINE_SEED"

# How long an example takes says something about the machine and who shares it, nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the build machine once, before worker processes inherit the environment."""
    os.environ.setdefault(MACHINE_SEED, str(secrets.randbelow(10**9)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seed where it was used, whatever came of it."""
    ran = [report for reports in terminalreporter.stats.values() for report in reports]
    if any("test_build_machine" in getattr(report, "nodeid", "") for report in ran):
        terminalreporter.write_line(f"{MACHINE_SEED}={os.environ[MACHINE_SEED]}")


@pytest.fixture(scope="session")
def machine_seed() -> int:
    """What random histories of builds follow from."""
    return int(os.environ[MACHINE_SEED])


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own cache and resources stay out of the tests."""
    for name in ("NINFERBUILD_CACHE", "NINFER_ROOT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every FX checkpoint; tests must not write here."""
    return fx.write_all(tmp_path_factory.mktemp("checkpoints") / "fx")


@pytest.fixture(scope="session")
def settled(checkpoints: Path) -> Path:
    """The same, old enough for digests of its files to be remembered."""
    written = max(path.stat().st_ctime for path in checkpoints.rglob("*"))
    time.sleep(max(0.0, written + SETTLED_NS / 1e9 + 0.1 - time.time()))
    return checkpoints


@pytest.fixture(scope="session")
def logged_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of an installed distribution that registers methods which log their calls."""
    directory = tmp_path_factory.mktemp("site")
    install_logged_methods(directory)
    return directory


@pytest.fixture
def log(logged_distribution: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CallLog]:
    """The methods ``logged_absmax`` and ``logged_cast`` are registered; their log."""
    monkeypatch.syspath_prepend(logged_distribution)
    registered = ("logged_absmax", "logged_cast")
    monkeypatch.setattr(METHODS, "_found", None)
    assert set(registered) <= set(METHODS)
    yield CallLog(logged_distribution / "calls.log")
    for name in registered:
        METHODS._methods.pop(name, None)


@pytest.fixture
def bench(tmp_path: Path, log: CallLog) -> Bench:
    """A working directory whose ``recipe.py`` makes every object with a logged method."""
    root = tmp_path / "bench"
    root.mkdir()
    (root / "recipe.py").write_text(LOGGED_RECIPE)
    return Bench(root, log)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """The command line in this process."""
    from ninferbuild.cli import main

    def run(*args: object) -> Finished:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run
