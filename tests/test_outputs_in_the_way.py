"""What stands where an output goes: devices, files of other commands and of the project, parts left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import socket
import stat
from typing import Any

from fixtures import micro
from fixtures.donor import write_donor
from fixtures.micro_recipe import Options
from fixtures.micro_world import World
import pytest

from ninferbuild import build
from ninferbuild.artifact.framing import part_name
from ninferbuild.cli import main
from ninferbuild.job import Job
from ninferbuild.report import report_path


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("MICRO_SHIFT", "0")
    with micro.registered(tmp_path / "site"):
        made = World(tmp_path / "world")
        monkeypatch.chdir(made.work)
        yield made


def split(world: World, bound: int | None) -> None:
    world.state.options["a"] = Options(max_file_bytes=bound)
    world.write_texts()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the whole path may be too long for one


def _device(kind: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        try:
            os.mknod(path, kind | 0o600, os.makedev(1, 3) if kind == stat.S_IFCHR else os.makedev(7, 250))
        except PermissionError:
            pytest.skip("only root makes devices")

    return make


NODES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "character device": _device(stat.S_IFCHR),
    "block device": _device(stat.S_IFBLK),
}


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "behind a link"])
@pytest.mark.parametrize("kind", NODES)
def test_only_regular_files_are_replaced(
    world: World, capsys: pytest.CaptureFixture[str], kind: str, linked: bool
) -> None:
    out = world.target("a").out
    build(world.target("a"))
    write_donor(Path("donor.ninfer"))
    graft = ["graft", str(out), "--component", "draft", "--from", "donor.ninfer", "--overwrite"]
    matrix = ["imatrix", "--dat", "notes.txt", "--config", "m0/config.json", "--overwrite"]
    cases = [
        (out, ["build", "a", "--overwrite"], 1),
        (report_path(out), ["build", "a", "--overwrite"], 1),
        (report_path(out), ["lock", "a"], 1),
        (out.with_name(out.name + ".sha256"), ["lock", "a"], 1),
        (Path("ninferbuild.lock"), ["lock", "a"], 1),
        (Path("g.dot"), ["graph", "a", "--overwrite", "--out", "g.dot"], 2),
        (Path("v.safetensors"), [*matrix, "--out", "v.safetensors"], 2),
        (Path("new.ninfer"), [*graft, "--out", "new.ninfer"], 1),
        (Path("new.toml"), ["init", "n", "-f", "new.toml", "--model", "m0", "--recipe", "recipe.py"], 1),
    ]
    for path, command, code in cases:
        kept = path.rename(world.root / "kept") if path.exists() else None
        node = world.root / "node" if linked else path
        NODES[kind](node)
        if linked:
            path.symlink_to(node)
        before = os.lstat(node)
        capsys.readouterr()
        assert main(command) == code, command
        assert "is not a regular file; choose another output" in capsys.readouterr().err
        assert os.lstat(node) == before
        path.unlink()
        node.unlink(missing_ok=True)
        if kept is not None:
            kept.rename(path)


def test_a_part_is_a_regular_file(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    split(world, 16_384)
    out = world.target("a").out
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(part_name(out.name, 1))
    os.mkfifo(part)
    assert main(["build", "a", "--overwrite"]) == 1
    assert f"{part} is not a regular file" in capsys.readouterr().err
    assert stat.S_ISFIFO(part.lstat().st_mode)
    assert not out.exists()


@pytest.mark.parametrize("format", ["dot", "mermaid", "graphml", "json"])
def test_a_graph_replaces_graphs(world: World, capsys: pytest.CaptureFixture[str], format: str) -> None:
    graph = ["graph", "a", "--format", format, "--out"]
    assert main([*graph, "g"]) == 0
    text = Path("g").read_bytes()
    os.symlink("g", "link")
    assert main(["graph", "a", "--out", "link"]) == 0  # in another format, or the same
    assert main([*graph, "link"]) == 0
    assert Path("link").is_symlink()
    assert Path("g").read_bytes() == text
    for foreign in (b"", b"digraph mine {}\n", b'{"nodes": 1}', b"[targets.t]\n"):
        Path("g").write_bytes(foreign)
        capsys.readouterr()
        assert main([*graph, "g"]) == 2
        assert "--out: g exists and is not a graph that this command wrote" in capsys.readouterr().err
        assert Path("g").read_bytes() == foreign
    assert main([*graph, "g", "--overwrite"]) == 0
    assert Path("g").read_bytes() == text


def test_no_command_replaces_files_of_the_project(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    out = world.target("a").out
    assert main(["lock", "a"]) == 0
    write_donor(Path("donor.ninfer"))
    convert = ["convert", "--model", "m0", "--recipe", "recipe.py", "--set", "cache.dir=../cache", "--overwrite"]
    commands = [
        convert,
        ["graft", str(out), "--component", "draft", "--from", "donor.ninfer", "--overwrite"],
        ["graph", "a", "--overwrite"],
        ["imatrix", "--dat", "notes.txt", "--config", "m0/config.json", "--overwrite"],
    ]
    for name in ("ninferbuild.toml", "ninferbuild.lock"):
        for command in commands:
            before = Path(name).read_bytes()
            capsys.readouterr()
            assert main([*command, "--out", name]) == 2, command
            error = capsys.readouterr().err
            assert error.startswith(f"error: --out: {name} ")
            assert error.endswith("; choose another output\n")
            assert Path(name).read_bytes() == before
    for command in commands[2:]:
        before = out.read_bytes()
        capsys.readouterr()
        assert main([*command, "--out", str(out)]) == 2
        assert f"{out} is an artifact" in capsys.readouterr().err
        assert out.read_bytes() == before


def test_nothing_is_built_into_the_cache(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    build(world.target("a"))
    cached = next(path for path in sorted(world.cache.rglob("*")) if path.is_file())
    before = cached.read_bytes()
    os.symlink(world.cache, "elsewhere")
    through = Path("elsewhere") / cached.relative_to(world.cache)
    assert main(["graph", "a", "--out", str(cached), "--overwrite"]) == 2
    assert "--out: " in (error := capsys.readouterr().err)
    assert "lies in the cache" in error
    for out in (cached, through):
        assert main(["build", "a", "--set", f"out={out}", "--overwrite"]) == 2
        assert "lies in the cache" in capsys.readouterr().err
        assert cached.read_bytes() == before


def foreign_part(world: World) -> Path:
    out = world.target("a").out
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(part_name(out.name, 1))
    part.write_bytes(b"somebody's")
    return part


def test_a_foreign_part_is_refused_before_anything_is_encoded(world: World) -> None:
    split(world, 16_384)
    part = foreign_part(world)
    with pytest.raises(FileExistsError, match="belongs to no artifact made here"):
        build(world.target("a"))
    assert part.read_bytes() == b"somebody's"
    part.unlink()
    result = build(world.target("a"))
    assert result.executed == result.total  # nothing had been encoded
    assert len(result.files) > 2


@pytest.mark.parametrize("known", ["cache", "report"])
@pytest.mark.parametrize("bound", [16_384, None], ids=["split again", "one file"])
@pytest.mark.parametrize("entry", ["deleted", "foreign", "there"])
def test_parts_of_ours_are_replaced_or_removed(world: World, entry: str, bound: int | None, known: str) -> None:
    split(world, 16_384)
    first = build(world.target("a"))
    out = first.files[0][0]
    if entry == "deleted":
        out.unlink()
    elif entry == "foreign":
        out.write_bytes(b"somebody's")
    if known == "cache":
        report_path(out).unlink()
    else:
        world.cache.rename(world.root / "elsewhere")
    split(world, bound)
    result = build(world.target("a"), overwrite=entry == "foreign")
    left = {path.name for path in out.parent.iterdir()}
    assert left == {path.name for path, _ in result.files} | {report_path(out).name}
    assert build(world.target("a")).up_to_date


def test_a_part_that_is_not_of_the_set_is_kept(world: World) -> None:
    split(world, 16_384)
    out = build(world.target("a")).files[0][0]
    out.unlink()
    part = foreign_part(world)
    with pytest.raises(FileExistsError, match="belongs to no artifact made here"):
        build(world.target("a"))
    assert part.read_bytes() == b"somebody's"
    split(world, None)
    build(world.target("a"))
    assert part.read_bytes() == b"somebody's"


def test_an_output_that_is_up_to_date_needs_no_writable_directory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build(world.target("a")).files[0][0]
    access = os.access

    def read_only(path: Any, mode: int, **options: Any) -> bool:
        return access(path, mode, **options) and not (Path(path) == out.parent and mode & os.W_OK)

    monkeypatch.setattr(os, "access", read_only)
    assert build(world.target("a")).up_to_date
    monkeypatch.setattr(Job, "_stage", None)  # refused before
    out.write_bytes(out.read_bytes()[:-1])
    with pytest.raises(PermissionError, match="cannot be written; choose another output"):
        build(world.target("a"))
    out.unlink()
    with pytest.raises(PermissionError, match="cannot be written; choose another output"):
        build(world.target("a"))
