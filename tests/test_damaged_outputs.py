"""An output that somebody changed is not taken for up to date, wherever the change lies."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path

from fixtures import micro
from fixtures.micro_recipe import Options
from fixtures.micro_world import World
import pytest

from ninferbuild import build
from ninferbuild.artifact.framing import HEADER
from ninferbuild.artifact.reader import Artifact


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("MICRO_SHIFT", "0")
    with micro.registered(tmp_path / "site"):
        made = World(tmp_path / "world")
        made.state.options["a"] = Options(max_file_bytes=16_384)
        made.write_texts()
        yield made


def places(entry: Path) -> dict[str, tuple[str, int]]:
    """Name → (file, position) of bytes of each kind."""
    with Artifact(entry) as artifact:
        first, second = artifact.objects[:2]
        start, files = artifact.payload_offset, artifact.directory.files
        assert first.offset + first.bytes < second.offset < files[0].payload_bytes
        assert len(files) > 1
        part = str(files[1].path)
        return {
            "an object": (entry.name, start + second.offset),
            "between objects": (entry.name, start + first.offset + first.bytes),
            "before the payload": (entry.name, start - 1),
            "an object in a part": (part, 4096),
            "before the payload of a part": (part, HEADER.size),
            "the header of a part": (part, HEADER.size - 1),
        }


PLACES = (
    "an object",
    "between objects",
    "before the payload",
    "an object in a part",
    "before the payload of a part",
    "the header of a part",
)


@pytest.mark.parametrize("place", PLACES)
def test_a_changed_byte_is_noticed(world: World, place: str) -> None:
    target = world.target("a")
    paths = [path for path, _ in build(target).files]
    before = {path.name: path.read_bytes() for path in paths}
    name, position = places(target.out)[place]
    changed = bytearray(before[name])
    changed[position] ^= 0x20
    (target.out.parent / name).write_bytes(changed)
    os.utime(target.out.parent / name, ns=(1, 1))
    result = build(target)
    assert (result.executed, result.up_to_date) == (0, False)
    assert {path.name: path.read_bytes() for path in paths} == before


def test_a_touched_output_is_up_to_date(world: World) -> None:
    target = world.target("a")
    for path, _ in build(target).files:
        os.utime(path, ns=(1, 1))
    assert build(target).up_to_date
