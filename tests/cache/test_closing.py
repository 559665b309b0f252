"""A cache whose closing or opening is interrupted can be opened again by the same process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from ninferbuild.cache import Cache, pruning, store


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name"), [(store, "stamp"), (store.Store, "_stamp_if_alone"), (store.Index, "write")]
)
def test_interrupted_while_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    cache = Cache.open(tmp_path)
    cache.find(b"k" * 16, "a miss, which closing writes down")
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    with Cache.open(tmp_path) as again:  # waits for ever where a lock was kept
        assert again.stats().actions == 0


def test_interrupted_while_tidying_up_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache.open(tmp_path).close()
    (tmp_path / "sessions" / ("00" * 8)).touch()
    cache = Cache.open(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(pruning, "prune", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    with Cache.open(tmp_path) as again:
        assert again.compact().obstacles == ()


@pytest.mark.parametrize("name", ["_open_environments", "_tidy", "_drop_dead_leases"])
def test_interrupted_while_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Cache.open(tmp_path).close()
    (tmp_path / "sessions" / ("00" * 8)).touch()
    with monkeypatch.context() as patched:
        patched.setattr(store.Store, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            Cache.open(tmp_path)
    with Cache.open(tmp_path) as again:
        assert again.compact().obstacles == ()
    assert os.listdir(tmp_path / "sessions") == []


@pytest.mark.parametrize("call", range(3))
def test_interrupted_while_making_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Interrupted before a transaction of a new cache: while it is opened, or in the closing that follows."""
    original, calls = store.Index.write, []

    def counted(index: store.Index) -> object:
        calls.append(index)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return original(index)

    with monkeypatch.context() as patched:
        patched.setattr(store.Index, "write", counted)
        with contextlib.suppress(KeyboardInterrupt), Cache.open(tmp_path) as cache:
            cache.find(b"k" * 16, "a miss")
    assert calls
    with Cache.open(tmp_path) as again:
        assert again.stats().actions == 0


def test_interrupted_while_the_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is closed twice: another file may have got its number meanwhile."""
    cache = Cache.open(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    with Cache.open(tmp_path) as again:
        assert again.compact().obstacles == ()
