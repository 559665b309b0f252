"""Sending written bytes to the disk before a sync asks for them."""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import errno
import os
from pathlib import Path

import pytest

from ninferbuild import platform_io, writeback
from ninferbuild.publish import StagedFile
from ninferbuild.writeback import WriteBehind, joined

STEP = 4096


class Watched(StagedFile):
    """Keeps what it was told, and how much of it was not finished at the worst moment."""

    def __init__(self, target: Path):
        super().__init__(target)
        self.started: list[tuple[int, int]] = []
        self.finished: list[tuple[int, int]] = []
        self.most = 0

    def start_writeback(self, position: int, length: int) -> None:
        self.started.append((position, length))
        unfinished = sum(size for _, size in self.started) - sum(size for _, size in self.finished)
        self.most = max(self.most, unfinished)
        super().start_writeback(position, length)

    def finish_writeback(self, position: int, length: int) -> None:
        super().finish_writeback(position, length)
        self.finished.append((position, length))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(writeback, "STEP", STEP)
    made = Watched(tmp_path / "out")
    yield made
    made.discard()


@pytest.fixture
def forgotten(monkeypatch):
    """What the kernel was told to forget."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(platform_io, "advise_unneeded", lambda number, offset, length: found.append((offset, length)))
    return found


def write(behind: WriteBehind, file: StagedFile, begin: int, count: int) -> None:
    """``count`` kibibytes one after the other."""
    for position in range(begin, begin + count * 1024, 1024):
        file.write(position, bytes(1024))
        behind.wrote(file, position, 1024)


def test_little_is_gathered_until_a_step_is_full(file, forgotten):
    behind = WriteBehind(keep=True, window=100 * STEP)
    write(behind, file, 0, 11)
    assert file.started == [(0, STEP), (STEP, STEP)]
    assert file.finished == forgotten == []


def test_no_more_than_the_window_is_under_way(file, forgotten):
    behind = WriteBehind(keep=False, window=3 * STEP)
    write(behind, file, 0, 64)
    assert file.most <= 4 * STEP
    assert file.finished == forgotten == file.started[: len(file.finished)]
    behind.finish()
    assert file.finished == forgotten
    assert sum(length for _, length in forgotten) == 64 * 1024


def test_what_may_stay_in_memory_stays(file, forgotten):
    behind = WriteBehind(keep=True, window=3 * STEP)
    write(behind, file, 0, 64)
    behind.read(file, 0, 100)
    behind.finish()
    assert file.finished
    assert forgotten == []


def test_files_stay_in_memory_if_there_is_room_for_them(monkeypatch):
    monkeypatch.setattr(platform_io, "memory_bytes", lambda: 1000)
    assert writeback.stays_cached(500)
    assert not writeback.stays_cached(501)
    monkeypatch.setattr(platform_io, "memory_bytes", lambda: None)
    assert writeback.stays_cached(1 << 60)


def test_ranges_are_joined_in_file_order(tmp_path):
    one, other = StagedFile(tmp_path / "one"), StagedFile(tmp_path / "other")
    found = joined([(one, 8, 4), (other, 12, 4), (one, 0, 8), (one, 20, 1)])
    assert {(file.target.name, begin, length) for file, begin, length in found} == {
        ("one", 0, 12),
        ("one", 20, 1),
        ("other", 12, 4),
    }
    one.discard()
    other.discard()


def refusing(code: int) -> Callable[..., int]:
    """A ``sync_file_range`` that fails."""

    def call(*arguments: int) -> int:
        ctypes.set_errno(code)
        return -1

    return call


def test_a_system_that_cannot_write_ranges_writes_all(file, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for call in (None, refusing(errno.ENOSYS), refusing(errno.ESPIPE)):
        monkeypatch.setattr(platform_io, "_sync_file_range_call", lambda call=call: call)
        file.start_writeback(0, 1024)
        assert synced == []
        file.finish_writeback(0, 1024)
        assert synced.pop() == file.descriptor


def test_an_error_of_the_disk_is_told_and_names_the_file(file, monkeypatch):
    monkeypatch.setattr(platform_io, "_sync_file_range_call", lambda: refusing(errno.EIO))
    for step in (file.start_writeback, file.finish_writeback):
        with pytest.raises(OSError, match="cannot be written") as caught:
            step(0, 1024)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file.target))


def test_interrupted_waiting_goes_on(file, monkeypatch):
    answers = iter([-1, -1, 0])

    def call(*arguments: int) -> int:
        ctypes.set_errno(errno.EINTR)
        return next(answers)

    monkeypatch.setattr(platform_io, "_sync_file_range_call", lambda: call)
    file.finish_writeback(0, 1024)
    assert next(answers, None) is None


def test_files_of_different_file_systems_share_nothing(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    one, two = StagedFile(tmp_path / "one", 8192), StagedFile(other / "ninferbuild-two", 8192)
    try:
        with pytest.raises(OSError):
            platform_io.clone_range(one.descriptor, 0, 4096, two.descriptor, 0)
    finally:
        one.discard()
        two.discard()
