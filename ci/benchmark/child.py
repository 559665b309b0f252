"""Runs in a process of its own what is measured, and reports what only that process can know.

``child.py REPORT ninferbuild DEVICE ARGUMENT...`` runs the command line, with clocks on the stages of a build.
``child.py REPORT baseline DEVICE FILE TARGET OUT`` runs the baseline.
``child.py REPORT search DEVICE REPEAT SCALE`` measures the search of scales and prints the figures as JSON.
``child.py REPORT initialise DEVICE`` does nothing but import torch and put one number on the device.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import gc
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

stages: dict[str, float] = {}
"""Stage → seconds."""


def timed(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
    """``function``, adding the seconds it takes to those of ``stage``."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            stages[stage] = stages.get(stage, 0.0) + time.perf_counter() - began

    return run


def initialised(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """``function``, which imports torch, and the first use of the device, which every process has to pay for."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        initialise([device])
        return result

    return run


def command(arguments: list[str]) -> int:
    device, *arguments = arguments
    if arguments[0] == "build":
        from ninferbuild.job import Job

        Job._new_executor = timed(initialised(Job._new_executor, device), "initialise")  # type: ignore[method-assign]
        Job.execute = timed(Job.execute, "encode")  # type: ignore[method-assign]
        Job.link = timed(Job.link, "link")  # type: ignore[method-assign]
    from ninferbuild.cli import main

    code = main(arguments)
    if "encode" in stages:
        stages["encode"] -= stages.get("initialise", 0.0)
    return code


def baseline(arguments: list[str]) -> int:
    timed(initialise, "initialise")([arguments[0]])
    from benchmark.baseline import convert
    from ninferbuild.target import load_targets

    device, file, name, out = arguments
    (target,) = load_targets((name,), file)
    timed(convert, "encode")(target, Path(out), device)
    return 0


def initialise(arguments: list[str]) -> int:
    import torch

    (device,) = arguments
    torch.zeros(1, device=device.partition(",")[0])
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return 0


def search(arguments: list[str]) -> int:
    from benchmark.search import measure

    device, repeat, scale = arguments
    print(json.dumps([item.to_json() for item in measure(device.partition(",")[0], int(repeat), int(scale))]))
    return 0


COMMANDS = {"ninferbuild": command, "baseline": baseline, "initialise": initialise, "search": search}


def gpu() -> tuple[int, str | None]:
    """Peak of the memory that torch has taken on any GPU, bytes, and the name of the first one in use."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, None
    devices = range(torch.cuda.device_count())
    return max(map(torch.cuda.max_memory_reserved, devices)), torch.cuda.get_device_name(0)


def report(path: Path) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    with_torch = "torch._C" in sys.modules
    peak_gpu, name = gpu() if with_torch else (0, None)
    found = {
        "stages": stages,
        "torch": with_torch,
        "peak_rss": int(status["VmHWM"].split()[0]) * 1024,
        "peak_gpu": peak_gpu,
        "gpu": name,
    }
    path.write_text(json.dumps(found))


def main() -> int:
    sys.path[0:1] = [str(ROOT), str(ROOT / "ci")]
    path, kind, *arguments = sys.argv[1:]
    from ninferbuild.ending import process_ends_at_once

    gc.disable()  # as the `ninferbuild` program does
    process_ends_at_once()
    code = COMMANDS[kind](arguments)
    report(Path(path))
    return code


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # as the `ninferbuild` program does
