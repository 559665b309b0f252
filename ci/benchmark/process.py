"""Running a child process with a clock and an eye on its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
import json
import os
from pathlib import Path
import subprocess
import sys
import threading
import time

CHILD = Path(__file__).with_name("child.py")
SAMPLE_SECONDS = 0.01


class ChildFailed(Exception):
    """A measured command failed; the message is what it printed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process took.

    Attributes:
        seconds: from before the process was started until it was gone.
        stages: stage of the engine → seconds.
        torch: whether torch was imported.
        peak_rss: largest resident size, bytes, mapped pages included.
        peak_anonymous: largest anonymous memory that a sample found, bytes.
        peak_gpu: most memory that torch took on one GPU, bytes.
        output: what it printed to standard output.
    """

    seconds: float
    stages: Mapping[str, float]
    torch: bool
    peak_rss: int
    peak_anonymous: int
    peak_gpu: int
    gpu: str | None
    output: str


def run(kind: str, arguments: Sequence[str], *, scratch: Path, environment: Mapping[str, str]) -> Usage:
    """Run ``child.py`` and wait for it. It is killed if that is interrupted.

    Raises:
        ChildFailed: its exit code was not 0.
    """
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    argv = [sys.executable, str(CHILD), str(report), kind, *arguments]
    with (scratch / "stdout").open("w+") as out, (scratch / "stderr").open("w+") as err:
        began = time.perf_counter()
        process = subprocess.Popen(argv, stdout=out, stderr=err, env={**os.environ, **environment})
        sampler = _AnonymousSampler(process.pid)
        try:
            code = process.wait()
            seconds = time.perf_counter() - began
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            sampler.stop()
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    if code:
        raise ChildFailed(f"{kind} ({' '.join(arguments)}) ended with code {code}:\n{errors.strip()}")
    found = json.loads(report.read_text())
    return Usage(
        seconds=seconds,
        stages=found["stages"],
        torch=found["torch"],
        peak_rss=found["peak_rss"],
        peak_anonymous=sampler.peak,
        peak_gpu=found["peak_gpu"],
        gpu=found["gpu"],
        output=output,
    )


class _AnonymousSampler:
    """A thread that watches the anonymous memory of a process."""

    def __init__(self, pid: int):
        self.peak = 0
        self._path = Path(f"/proc/{pid}/status")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            try:
                status = self._path.read_text()
            except OSError:
                return
            _, found, rest = status.partition("RssAnon:")
            if found:
                self.peak = max(self.peak, int(rest.split(maxsplit=1)[0]) * 1024)
