"""Reserving the pages of files: on RAM disks only, never in the way, and never in what is read back."""

from __future__ import annotations

import os
from pathlib import Path
import threading

import pytest

from ninferbuild import reservation
from ninferbuild.publish import StagedFile
from ninferbuild.reservation import Reservation


@pytest.fixture
def staged(tmp_path: Path) -> StagedFile:
    return StagedFile(tmp_path / "out.ninfer", 1 << 20)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "STEP", 1 << 16)


@pytest.mark.usefixtures("small_steps")
def test_a_ram_disk_is_reserved_and_reads_as_zeros(staged: StagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "kind_of", lambda path: "tmpfs")
    staged.write(5 << 16, b"before")
    made = Reservation([(staged, 1 << 20)])
    staged.write(9 << 16, b"meanwhile")
    assert made._thread is not None
    made._thread.join()
    status = os.fstat(staged.descriptor)
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    wanted = bytearray(1 << 20)
    wanted[5 << 16 : (5 << 16) + 6] = b"before"
    wanted[9 << 16 : (9 << 16) + 9] = b"meanwhile"
    assert os.pread(staged.descriptor, 1 << 20, 0) == wanted
    made.end()


@pytest.mark.usefixtures("small_steps")
def test_a_disk_is_left_alone(staged: StagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "kind_of", lambda path: "ext4")
    Reservation([(staged, 1 << 20)]).end()
    assert os.fstat(staged.descriptor).st_blocks * 512 < 1 << 20


@pytest.mark.usefixtures("small_steps")
def test_it_ends_when_told_to(staged: StagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "kind_of", lambda path: "tmpfs")
    begun, go_on, steps = threading.Event(), threading.Event(), []

    def reserve(descriptor: int, begin: int, length: int) -> None:
        steps.append(begin)
        begun.set()
        go_on.wait()

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    made = Reservation([(staged, 1 << 20)])
    begun.wait()
    ending = threading.Thread(target=made.end)
    ending.start()
    while not made._ended.is_set():
        pass
    go_on.set()
    ending.join()
    staged.discard()
    assert steps == [0]


@pytest.mark.usefixtures("small_steps")
def test_a_full_disk_is_left_to_the_writers(staged: StagedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "kind_of", lambda path: "tmpfs")
    steps = []

    def reserve(descriptor: int, begin: int, length: int) -> None:
        steps.append(begin)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    made = Reservation([(staged, 1 << 20)])
    assert made._thread is not None
    made._thread.join()
    made.end()
    assert steps == [0]
