"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import compileall
from contextlib import contextmanager, suppress
import json
import os
from pathlib import Path
import shutil
import signal
import sys
import tempfile
from types import FrameType

from benchmark.process import ChildFailed
from benchmark.scenarios import CHOICES, SPARSE, Bench, Options, PayloadsDiffer
from benchmark.table import render
import ninferbuild

ENDING = (signal.SIGTERM, signal.SIGHUP)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ci/bench",
        description="Measure ninferbuild on checkpoints of the real 27B geometry, beside a plain baseline and the "
        "limits of the disk. docs/performance.md says what the columns mean. All that it writes is removed at the end.",
    )
    made.add_argument("--gigabytes", type=float, default=2.0, metavar="N", help="checkpoint to build (default: 2)")
    made.add_argument("--sparse", action="store_true", help="build the whole 27B geometry from sparse files instead")
    made.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:1 (default: cpu)")
    made.add_argument("--dir", type=Path, metavar="DIR", help="disk or RAM disk to work on (default: that of TMPDIR)")
    made.add_argument("--recipe", default="qwen3_6_27b", help="what is built (default: qwen3_6_27b)")
    made.add_argument("--only", nargs="+", choices=CHOICES, metavar="SCENARIO", help=f"of {', '.join(CHOICES)}")
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="best of N (default: 1)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    made.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if given.gigabytes <= 0 or given.repeat < 1 or given.scale < 1:
        parser().error("--gigabytes and --repeat must be positive")
    options = Options(
        device=given.device,
        gigabytes=given.gigabytes,
        recipe=given.recipe,
        scenarios=tuple(given.only or (SPARSE if given.sparse else CHOICES)),
        repeat=given.repeat,
        sparse=given.sparse,
        scale=given.scale,
    )
    for number in ENDING:
        signal.signal(number, _interrupt)
    try:
        with _working_directory(given.dir if given.dir is not None else Path(tempfile.gettempdir())) as work:
            # Modules that are compiled at their first import would count against whichever scenario comes first.
            compileall.compile_dir(Path(ninferbuild.__file__).parent, quiet=2)
            results = Bench(work, options, _say).measure()
        print(render(results))
        if given.json is not None:
            given.json.write_text(json.dumps(results.to_json(), indent=2) + "\n")
    except (ChildFailed, PayloadsDiffer, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _working_directory(base: Path) -> Iterator[Path]:
    """A new directory below ``base``. At the end it is removed, and so is what had to be made above it."""
    base = base.absolute()
    missing = [directory for directory in (base, *base.parents) if not directory.exists()]
    work = base / f"ninferbuild-bench-{os.getpid()}"
    try:
        work.mkdir(parents=True)
        yield work
    finally:
        for number in (signal.SIGINT, *ENDING):  # a second interrupt must not leave gigabytes behind
            signal.signal(number, signal.SIG_IGN)
        shutil.rmtree(work, ignore_errors=True)
        for directory in missing:
            with suppress(OSError):  # somebody else uses it by now
                directory.rmdir()
