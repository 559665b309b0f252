"""Outputs that are damaged, and outputs that are links: what is ours is replaced, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
from pathlib import Path

from fixtures.crash_bench import ACTIONS, ENTRY, REPORT, SMALL_SEGMENTS, Bench, Scene, scene
from fixtures.crash_points import Point, flip_bits
from fixtures.processes import serving
import pytest

from ninferbuild.artifact.reader import Artifact
from ninferbuild.build import ATTEMPTS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("damaged")
    with serving(directory) as processes:
        yield scene(directory / "scene", processes)


def _cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def _spoil_magic(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


DAMAGE = {"empty": _cut(0), "10 bytes": _cut(10), "1000 bytes": _cut(1000), "its magic": _spoil_magic}


@pytest.mark.parametrize("known", ["cache", "report"])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("way", ["single", "split"])
def test_what_is_left_of_our_output_is_replaced(made: Scene, tmp_path: Path, way: str, damage: str, known: str) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.finish(way)
    DAMAGE[damage](bench.out / ENTRY)
    if known == "cache":
        (bench.out / REPORT).unlink()
    else:
        bench.cache.rename(tmp_path / "elsewhere")
    bench.finish(way, executed=0 if known == "cache" else ACTIONS)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_nothing_shows_to_be_ours_is_kept(made: Scene, tmp_path: Path, damage: str) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.put("single")
    (bench.out / REPORT).unlink()
    DAMAGE[damage](bench.out / ENTRY)
    left = bench.files()
    ended = bench.build("single")
    assert ended.code == 1
    assert "is not an artifact made by ninferbuild (or is damaged)" in ended.err
    assert bench.files() == left


@pytest.mark.parametrize("content", [b"mine", b"my notes\n" * 100])
def test_a_foreign_file_where_our_output_was_is_kept(made: Scene, tmp_path: Path, content: bytes) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.finish("single")
    (bench.out / ENTRY).write_bytes(content)
    ended = bench.build("changed")
    assert ended.code == 1
    assert "--overwrite" in ended.err
    assert (bench.out / ENTRY).read_bytes() == content
    bench.finish("changed", "--overwrite")


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("way", ["single", "split"])
def test_a_link_stays_and_what_it_leads_to_is_written(made: Scene, tmp_path: Path, way: str, dangling: bool) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.put("absent")
    far = tmp_path / "far"
    far.mkdir()
    if not dangling:
        (far / "real.ninfer").write_bytes(made.clean["fewer"][ENTRY])
    (bench.out / ENTRY).symlink_to(far / "real.ninfer")
    for executed in (ACTIONS, 0):
        ended = bench.build(way)
        assert ended.code == 0, ended
        assert ended.json["actions"]["executed"] == executed
        assert ended.json["out"] == str(far / "real.ninfer")
    assert [path.name for path in bench.out.iterdir()] == [ENTRY]
    assert (bench.out / ENTRY).is_symlink()
    assert (far / f"real.ninfer{REPORT.removeprefix(ENTRY)}").exists()
    assert not any(path.name.startswith(".") for path in far.iterdir())
    with Artifact(bench.out / ENTRY) as artifact:
        assert artifact.artifact_id.hex() == bench.artifact_id(way)
        for item in artifact.objects:
            assert len(artifact.read_object(item.id)) == item.bytes


def test_a_link_that_leads_round_in_circles_is_refused(made: Scene, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.put("absent")
    (bench.out / ENTRY).symlink_to(ENTRY)
    ended = bench.build("single")
    assert ended.code == 1
    assert f"{bench.out / ENTRY}: is a symbolic link that leads nowhere" in ended.err


def test_many_damaged_blocks_are_healed_by_one_build(made: Scene, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "bench", made)
    bench.finish("single")
    (bench.out / ENTRY).unlink()
    flip_bits(str(bench.cache), "blocks", 7, 60)
    bench.finish("single")
    bench.check_cache()


def test_damage_that_comes_back_is_healed_as_long_as_it_meets_other_actions(made: Scene, tmp_path: Path) -> None:
    """Each time the build links, another payload has been damaged."""
    bench = Bench(tmp_path / "bench", made)
    bench.finish("single", points=[SMALL_SEGMENTS])
    (bench.out / ENTRY).unlink()
    points = [
        Point("ninferbuild.link:_write_payload", "flip", call=call, arg=flips)
        for call, seed in enumerate((1, 2, 3, 4), 1)
        for flips in [{"cache": str(bench.cache), "what": "blocks", "seed": seed, "count": 2}]
    ]
    ended = bench.finish("single", points=points)
    assert ended.err.count("it will be made again") >= ATTEMPTS
