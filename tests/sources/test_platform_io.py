"""Reading at offsets."""

from __future__ import annotations

import os

import pytest

from ninferbuild import platform_io
from ninferbuild.sources.files import CheckpointFile


def with_pread(descriptor, offset, buffer):
    data = os.pread(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


@pytest.fixture
def descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    number = platform_io.open_for_reading(path)
    yield number
    os.close(number)


@pytest.mark.parametrize("largest", [1 << 30, 7])
def test_reads_in_several_calls_up_to_the_end(descriptor, largest, monkeypatch):
    monkeypatch.setattr(platform_io, "_LARGEST_READ", largest)
    buffer = bytearray(40)
    assert platform_io.read_into(descriptor, 10, memoryview(buffer)) == 40
    assert buffer == bytes(range(10, 50))
    assert platform_io.read_into(descriptor, 80, memoryview(buffer)) == 20
    assert buffer[:20] == bytes(range(80, 100))
    assert platform_io.read_into(descriptor, 200, memoryview(buffer)) == 0


def test_short_reads_of_the_system_are_continued(descriptor, monkeypatch):
    monkeypatch.setattr(
        platform_io, "_read_some", lambda number, offset, buffer: with_pread(number, offset, buffer[:3])
    )
    buffer = bytearray(40)
    assert platform_io.read_into(descriptor, 10, memoryview(buffer)) == 40
    assert buffer == bytes(range(10, 50))


def test_advice_never_fails(descriptor):
    platform_io.advise_sequential(descriptor)
    platform_io.advise_needed(descriptor, 0, 1 << 40)
    read, write = os.pipe()
    platform_io.advise_sequential(read)
    os.close(read)
    os.close(write)


def test_errors_of_the_system_name_the_file(tmp_path):
    file = CheckpointFile(tmp_path)  # a directory opens, but cannot be read
    with pytest.raises(IsADirectoryError) as caught:
        file.read_into(0, memoryview(bytearray(1)))
    assert caught.value.filename == str(tmp_path)
    file.close()
