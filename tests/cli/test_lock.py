"""``lock``, ``build --locked`` and ``reproduce``: what is printed, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
import shutil
from typing import Any

from fixtures import fx
import pytest

from ninferbuild.target import load_target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the locked target ``a``, to be copied."""
    from ninferbuild.locking import lock

    root = tmp_path_factory.mktemp("built")
    fx.write_dense(root / "model")
    (root / "ninferbuild.toml").write_text(
        'default = ["a"]\n[cache]\ndir = "cache"\n[defaults]\nmodel = "model"\nrecipe = "qwen3_6_27b"\n'
        'components = ["text"]\ndevice = "cpu"\n[targets.a]\n[targets.b]\nname = "b"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NINFERBUILD_CACHE", raising=False)
        lock(load_target("a", root))
    return root


@pytest.fixture
def here(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NINFERBUILD_CACHE", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shutil.copytree(built, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_lock(here: Path, run: Any) -> None:
    ran = run("lock", "-q")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    ran = run("lock", "a", "b", "--json")
    assert ran.code == 0, ran
    a, b = map(json.loads, ran.out.splitlines())
    assert list(a) == ["target", "lock", "artifact_id", "files", "objects", "sums", "changed"]
    assert (a["target"], a["changed"], b["target"], b["changed"]) == ("a", False, "b", True)
    assert b["lock"] == str(here / "ninferbuild.lock")
    assert b["files"] == [
        {
            "path": str(here / "b.ninfer"),
            "bytes": (here / "b.ninfer").stat().st_size,
            "sha256": (here / "b.ninfer.sha256").read_text().partition(" ")[0],
        }
    ]
    ran = run("lock", "b")
    assert ran.out.splitlines()[-1].startswith(f"b is locked already in {here / 'ninferbuild.lock'}: artifact ")


def test_a_damaged_lock_is_replaced(here: Path, run: Any) -> None:
    before = (here / "ninferbuild.lock").read_bytes()
    (here / "ninferbuild.lock").write_bytes(b"\x00garbage")
    ran = run("lock", "a")
    assert ran.code == 0, ran
    assert "ninferbuild.lock was damaged and is written anew; lock other targets that it held again\n" in ran.err
    assert (here / "ninferbuild.lock").read_bytes() == before


def test_a_foreign_lock_is_kept_and_nothing_built(here: Path, run: Any) -> None:
    (here / "ninferbuild.toml").rename(here / "poetry.toml")
    (here / "poetry.lock").write_text("[[package]]\n")
    (here / "a.ninfer").unlink()
    run("lock", "-f", "poetry.toml", "a").failed(2, "poetry.lock: not a lock", "remove it")
    assert not (here / "a.ninfer").exists()


def test_lock_of_another_file(here: Path, run: Any) -> None:
    (here / "ninferbuild.toml").rename(here / "release.toml")
    (here / "ninferbuild.lock").rename(here / "release.lock")
    assert run("build", "-f", "release.toml", "--locked", "-q").code == 0
    run("build", "-f", "release.toml", "b", "--locked").failed(
        2, "release.lock", "'b' is not locked", "ninferbuild lock b"
    )


def test_locked(here: Path, run: Any) -> None:
    assert run("build", "--locked", "-q").code == 0
    before = (here / "a.ninfer").read_bytes()
    assign = ("--assign", "text/layers/1/mlp/down=q6_g64_fp16")
    ran = run("build", "--locked", "-q", *assign)
    assert ran.code == 3
    assert ran.out.splitlines()[0] == "text/layers/1/mlp/down: format q5_g64_fp16 → q6_g64_fp16"
    assert ran.err == (f"error: a would differ from {here / 'ninferbuild.lock'}: 2 differences; nothing was encoded\n")
    ran = run("build", "--locked", "--json", *assign)
    assert ran.code == 3
    (line,) = ran.out.splitlines()
    assert [item["fact"] for item in json.loads(line)["differences"]] == ["format", "bytes"]
    assert (here / "a.ninfer").read_bytes() == before


def test_many_differences_are_cut(here: Path, run: Any) -> None:
    ran = run("build", "--locked", "-q", "--assign", "*=bf16:cast_direct")
    assert ran.code == 3, ran
    assert ran.out.splitlines()[-1].endswith("more; -v shows all, --json too")
    assert len([line for line in ran.out.splitlines() if not line.startswith(" ")]) == 21
    assert len(run("build", "--locked", "-v", "-q", "--assign", "*=bf16:cast_direct").out) > len(ran.out)


def test_locked_requests_that_cannot_be(here: Path, run: Any) -> None:
    run("build", "--locked", "--dry-run").failed(2, "--locked", "--dry-run")
    run("build", "--locked", "a", "b").failed(2, "'b' is not locked")
    (here / "ninferbuild.lock").write_text("version = 1\n[")
    run("build", "--locked").failed(2, "ninferbuild.lock: not a lock")
    (here / "ninferbuild.lock").unlink()
    run("build", "--locked").failed(2, "no lock; write it with 'ninferbuild lock a'")


def test_keep_going_takes_the_others(here: Path, run: Any) -> None:
    assert run("lock", "b", "-q").code == 0
    text = (here / "ninferbuild.toml").read_text()
    (here / "ninferbuild.toml").write_text(text.replace("[targets.a]\n", '[targets.a]\nname = "x"\n'))
    (here / "b.ninfer").unlink()
    ran = run("build", "--locked", "-k", "-q", "a", "b")
    assert ran.code == 3, ran
    assert (here / "b.ninfer").exists()


def test_reproduce(here: Path, run: Any) -> None:
    ran = run("reproduce", "a", "-j", "2", "--rows-per-chunk", "5")
    assert ran.code == 0, ran
    assert ran.out.splitlines()[-1].startswith("a reproduced: ")
    assert f"as in {here / 'ninferbuild.lock'}" in ran.out


def test_reproduce_something_else(here: Path, run: Any) -> None:
    ran = run("reproduce", "b", "--against", "a.ninfer", "--json", "-q")
    assert ran.code == 3, ran
    found = json.loads(ran.out)
    assert (found["target"], found["against"], found["reproduced"], found["kept"]) == ("b", "a.ninfer", False, None)
    assert [(item["subject"], item["fact"]) for item in found["differences"]] == [
        ("directory", "metadata"),
        ("file b.ninfer", "SHA-256"),
        ("artifact", "id"),
    ]
    assert ran.err.startswith("error: b differs from a.ninfer: 3 differences\n")


def test_reproduce_what_is_not_there(here: Path, run: Any) -> None:
    run("reproduce", "b").failed(2, "b is neither locked nor built")
    run("reproduce", "a", "--against", "none.ninfer").failed(1, "none.ninfer")
    run("reproduce", "c").failed(2, "unknown target 'c'")
