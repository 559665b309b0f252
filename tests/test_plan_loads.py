"""What a plan loads and keeps: it is run often, and mostly before anything is cached."""

from __future__ import annotations

from pathlib import Path
import subprocess
import sys
import weakref

import pytest

from ninferbuild import ending

PLAN = """
import sys

from ninferbuild.cli import main

code = main(sys.argv[1:])
sys.stdout.flush()
needless = {"lmdb", "ninferbuild.cache.api", "ninferbuild.cloning", "ninferbuild.payload", "concurrent.futures"}
if code or needless & sys.modules.keys():
    sys.exit(f"exit code {code}, loaded {sorted(needless & sys.modules.keys())}")
"""


def test_a_plan_where_nothing_is_cached_loads_no_cache(settled: Path, tmp_path: Path) -> None:
    arguments = ["plan", "-q", "--model", str(settled / "dense"), "--recipe", "qwen3_6_27b", "--out", "x.ninfer"]
    done = subprocess.run(
        [sys.executable, "-c", PLAN, *arguments],
        cwd=tmp_path,
        env={"NINFERBUILD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "to run" in done.stdout


class Work:
    pass


def kept(works: int) -> list[bool]:
    references = []
    for _ in range(works):
        work = Work()
        references.append(weakref.ref(work))
        ending.keep_to_the_end(work)
        del work
    return [reference() is not None for reference in references]


def test_work_is_kept_only_where_the_process_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_ends_at_once", False)
    monkeypatch.setattr(ending, "_kept", [])
    assert kept(2) == [False, False]
    ending.process_ends_at_once()
    assert kept(2) == [False, True]
