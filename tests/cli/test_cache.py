"""``cache …``: which cache, and what is said about it. How the cache does it is tested with the cache."""

from __future__ import annotations

import json
from pathlib import Path
import time
from typing import Any

import pytest

from ninferbuild.cache import ActionRecord, BuildRecord, Cache
from ninferbuild.cli.plain import plain
from ninferbuild.digest import combine

SIZE = 30_000


def fill(directory: Path, identity: str, count: int = 2) -> list[bytes]:
    """Actions of a target, with a build that used them; their keys."""
    keys = [bytes([index]) * 16 for index in range(1, count + 1)]
    with Cache.open(directory) as cache:
        with cache.writer() as writer:
            for key in keys:
                block = writer.block(key[:1] * SIZE)
                blocks = ((block, SIZE),)
                record = ActionRecord(
                    key, "manifest", "encode", "cast_direct", "bf16", blocks, SIZE, combine([block]), made_by=identity
                )
                writer.action(record, b"probe")
        cache.record_build(BuildRecord(identity, tuple(keys), "00", time.time()))
    return keys


@pytest.fixture
def filled(project: Path) -> list[bytes]:
    return fill(project / "cache", f"{project}/ninferbuild.toml#a")


def test_dir(project: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, then the target file, then the platform's directory."""
    assert run("cache", "dir").out == f"{project}/cache\n"
    with (project / "ninferbuild.toml").open("a") as file:
        file.write('[cache]\ndir = "of-the-file"\n')
    assert json.loads(run("cache", "dir", "--json").out) == {"dir": f"{project}/cache"}
    monkeypatch.delenv("NINFERBUILD_CACHE")
    assert run("cache", "dir").out == f"{project}/of-the-file\n"
    assert run("cache", "dir", "-f", "ninferbuild.toml").out == f"{project}/of-the-file\n"
    (project / "ninferbuild.toml").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(project / "xdg"))
    assert run("cache", "dir").out.endswith("ninferbuild\n")


@pytest.mark.parametrize("command", ["stats", "ls", "prune", "compact", "verify", "rm"])
def test_no_cache(project: Path, run: Any, command: str) -> None:
    arguments = ("00",) if command == "rm" else ()
    run("cache", command, *arguments).failed(1, f"no cache in {project}/cache")
    assert not (project / "cache").exists()


def test_stats(project: Path, run: Any, filled: list[bytes]) -> None:
    facts = json.loads(run("cache", "stats", "--json").out)
    assert (facts["actions"], facts["live_bytes"], facts["hit_rate"]) == (2, 2 * SIZE, None)
    assert facts["formats"]["bf16"]["actions"] == 2
    text = run("cache", "stats").out
    assert "live bytes: 60.0 kB\n" in text
    assert "hit rate: -\n" in text
    assert "cast_direct" in text


def test_ls(project: Path, run: Any, filled: list[bytes]) -> None:
    rows = json.loads(run("cache", "ls", "--json").out)
    assert {row["key"] for row in rows} == {key.hex() for key in filled}
    assert len(json.loads(run("cache", "ls", "--target", "a", "--json").out)) == 2
    assert json.loads(run("cache", "ls", "--target", "b", "--json").out) == []
    assert json.loads(run("cache", "ls", "--target", "z.ninfer", "--json").out) == []
    lines = run("cache", "ls").out.splitlines()
    assert lines[0].split()[:3] == ["key", "kind", "method"]
    assert {line.split()[0] for line in lines[1:]} == {key.hex() for key in filled}


def test_ls_of_a_converted_output(project: Path, run: Any) -> None:
    fill(project / "cache", str(project / "z.ninfer"))
    assert len(json.loads(run("cache", "ls", "--target", "z.ninfer", "--json").out)) == 2


def test_prune(project: Path, run: Any, filled: list[bytes]) -> None:
    dry = json.loads(run("cache", "prune", "--max-size", "0", "--dry-run", "--json").out)
    assert dry["keys"] == [key.hex() for key in filled]
    assert "actions: 0" in run("cache", "prune", "--older-than", "30d").out.splitlines()
    assert "actions: 2" in run("cache", "prune", "--target", "a").out.splitlines()
    assert json.loads(run("cache", "ls", "--json").out) == []


@pytest.mark.parametrize(
    ("args", "part"),
    [(("--max-size", "2X"), "'2X'"), (("--older-than", "30"), "'30'"), (("--keep-builds", "-1"), "--keep-builds")],
)
def test_prune_refuses(project: Path, run: Any, filled: list[bytes], args: tuple[str, ...], part: str) -> None:
    ran = run("cache", "prune", *args)
    assert ran.code == 2
    assert part in ran.err.splitlines()[-1]


def test_rm(project: Path, run: Any, filled: list[bytes]) -> None:
    run("cache", "rm", "ff").failed(2, "'ff'", "cache ls")
    run("cache", "rm", "0").failed(2, "2 actions start with '0'")
    assert json.loads(run("cache", "rm", "0101", "--json").out) == {"removed": [filled[0].hex()]}
    assert run("cache", "rm", filled[1].hex()).out == "dropped 1 actions\n"
    assert json.loads(run("cache", "ls", "--json").out) == []


def test_clear_and_compact(project: Path, run: Any, filled: list[bytes]) -> None:
    assert run("cache", "compact").code == 0
    assert json.loads(run("cache", "ls", "--json").out) != []
    assert run("cache", "clear").code == 0
    assert json.loads(run("cache", "ls", "--json").out) == []


def test_clear_without_a_cache(project: Path, run: Any) -> None:
    assert json.loads(run("cache", "clear", "--json").out) == {"disk_before": 0, "disk_after": 0}
    assert not (project / "cache").exists()


def test_verify(project: Path, run: Any, filled: list[bytes]) -> None:
    assert run("cache", "verify").code == 0
    (data,) = (project / "cache" / "segments").glob("*/data.mdb")
    content = bytearray(data.read_bytes())
    at = content.index(b"\x01" * SIZE)
    content[at + 100] ^= 0xFF
    data.write_bytes(content)
    ran = run("cache", "verify", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["damaged_keys"]) == (1, [filled[0].hex()])
    assert run("cache", "verify", "--repair").code == 0
    assert run("cache", "verify").code == 0
    assert [row["key"] for row in json.loads(run("cache", "ls", "--json").out)] == [filled[1].hex()]


def test_without_a_subcommand(run: Any) -> None:
    ran = run("cache")
    assert (ran.code, ran.out) == (2, "")
    assert "prune" in ran.err


def test_plain_values() -> None:
    record = BuildRecord("t", (b"\x01\x02",), "00", 1.5)
    assert plain({"p": Path("x"), "r": record, "s": {3}}) == {
        "p": "x",
        "r": {"target": "t", "keys": ["0102"], "artifact_id": "00", "time": 1.5, "out": "", "files": [], "extra": {}},
        "s": [3],
    }
