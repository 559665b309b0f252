"""What the benchmark ran on."""

from __future__ import annotations

from importlib.metadata import version
import os
from pathlib import Path
import platform
from typing import Any

from benchmark.disk import file_system


def describe(directory: Path, gpu: str | None) -> dict[str, Any]:
    """Processor, memory, GPU, versions, and the file system of ``directory``."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{pages / 2**30:.0f} GiB",
        "gpu": gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "file system": file_system(directory),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
