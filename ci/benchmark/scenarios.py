"""The scenarios, each a fresh run of ``ninferbuild`` on a checkpoint that the benchmark made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import compileall
from dataclasses import dataclass, replace
import json
import os
from pathlib import Path
import shutil
from typing import Any

from benchmark import changes, disk
from benchmark.checkpoint import BLOCK_WORDS, SMALL_BLOCK_WORDS, random_block, write_random, write_sparse
from benchmark.geometry import DENSE, EXPERTS, MANY, Geometry
from benchmark.machine import describe
from benchmark.process import Usage, run
from benchmark.results import Measurement, Results, StartUp
import ninferbuild
from ninferbuild.artifact.reader import Artifact

CHANGES = Path(changes.__file__)
PACKAGE = Path(ninferbuild.__file__).parent
RATE_BYTES = 1 << 30
"""Bytes of one measurement of a rate, at most."""

ARTIFACT_SHARE = 0.4
"""Bytes of an artifact, at most, as a part of those of its checkpoint: 6.25 bits instead of 16."""

TARGET = "bench"


class PayloadsDiffer(Exception):
    """The baseline and the build disagree about the bytes of the artifact."""


Scenario = Callable[[], Measurement]

BUILDS = ("baseline", "cold", "warm", "noop", "copy", "link", "method", "format")
PLANS: dict[str, Geometry] = {"plan-dense": DENSE, "plan-experts": EXPERTS, "plan-75k": MANY}
SCENARIOS = (*BUILDS, *PLANS)
SEARCH = "search"
"""The arithmetic of ``grouped_search`` alone: no command, and no row of the table."""

CHOICES = (*SCENARIOS, SEARCH)
SPARSE = ("cold", "noop", "copy", "link", "method", "format")
"""What ``--sparse`` runs when nothing is chosen: its files hold nothing whose conversion could be compared."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for; ``scale`` divides every size, for tests."""

    device: str
    gigabytes: float
    recipe: str
    scenarios: tuple[str, ...]
    repeat: int
    sparse: bool
    scale: int


class Bench:
    """One run in a working directory of its own."""

    def __init__(self, work: Path, options: Options, say: Callable[[str], None]):
        self._work = work
        self._options = options
        self._say = say
        self._environment = {"NINFERBUILD_CACHE": str(work / "cache")}
        self._out = work / f"{TARGET}.ninfer"
        self._payload = work / "baseline.payload"
        self._copy = work / "copy.ninfer"
        self._needed = 0
        self._written = 0
        self._changed = 0
        self._built = False
        self._results: Results

    def measure(self) -> Results:
        """Make the checkpoints, measure, and return what was found.

        Raises:
            ChildFailed: a command failed.
            PayloadsDiffer: the baseline and the build made different bytes.
        """
        options = self._options
        for directory in (PACKAGE, *filter(Path.is_symlink, PACKAGE.iterdir())):
            compileall.compile_dir(directory, quiet=2)  # as an installer does; a checkout may be new
        start_up, gpu = self._start_up()
        self._results = Results(
            machine=describe(self._work, gpu),
            options={
                "device": options.device,
                "gigabytes": options.gigabytes,
                "recipe": options.recipe,
                "repeat": options.repeat,
                "sparse": options.sparse,
                "scale": options.scale,
            },
            start_up=start_up,
        )
        if any(name in BUILDS for name in options.scenarios):
            self._prepare_builds()
            for _ in range(options.repeat):
                self._forget()
                for name, scenario in self._builds().items():
                    if name in options.scenarios:
                        self._run(name, scenario)
            shutil.rmtree(self._model("dense"))
            self._forget()
        for name, geometry in PLANS.items():
            if name in options.scenarios:
                self._plan(name, geometry)
        if SEARCH in options.scenarios:
            found = self._child("search", str(options.repeat), str(options.scale)).output
            self._results.searches = json.loads(found)
        order = {name: index for index, name in enumerate(SCENARIOS)}
        found = self._results.measurements
        self._results.measurements = dict(sorted(found.items(), key=lambda item: order[item[0]]))
        return self._results

    def _run(self, name: str, scenario: Scenario) -> None:
        """Run a scenario and keep the best of its repetitions."""
        measurement = scenario()
        self._say(f"{name}: {measurement.seconds:.2f} s")
        best = self._results.measurements.get(name)
        if best is None or measurement.seconds < best.seconds:
            self._results.measurements[name] = measurement

    # Preparation

    def _start_up(self) -> tuple[StartUp, str | None]:
        usage = self._child("initialise")
        return StartUp(usage.seconds, usage.peak_anonymous), usage.gpu

    def _prepare_builds(self) -> None:
        options = self._options
        model = self._model("dense")
        if options.sparse:
            geometry = DENSE.scaled(options.scale)
            self._require_space(geometry, source=0.0)
            size = write_sparse(model, geometry, marked=True)
            block = random_block(disk.PIECE)
        else:
            geometry = DENSE.scaled(options.scale).fitted(int(options.gigabytes * 1e9))
            self._require_space(geometry, source=1.0)
            block = random_block(BLOCK_WORDS if options.scale == 1 else SMALL_BLOCK_WORDS)
            size = write_random(model, geometry, block)
        self._results.layers = geometry.layers
        kinds = "sparse" if options.sparse else "random"
        self._say(
            f"checkpoint: {size / 1e9:.2f} GB, {kinds}, {geometry.layers} layers, vocabulary {geometry.vocabulary}"
        )
        self._write_target(model)
        planned = json.loads(self._child("ninferbuild", "plan", TARGET, "--json", *self._file()).output)
        self._needed = sum(action["source_bytes"] for action in planned["actions"])
        self._changed = sum(action["source_bytes"] for action in planned["actions"] if _of_changed_layer(action))
        self._written = planned["file_bytes"]
        files = self._sources()
        limit = min(size, RATE_BYTES)
        rates = self._results.rates
        # Of a file of holes there is nothing to read from the disk.
        reason = "sparse files hold almost nothing" if options.sparse else disk.drop_pages(files)
        if reason is None:
            rates["read cold"] = disk.read_rate(files, limit, cold=True)
        else:
            self._results.notes.append(f"cold builds did not read their source from a disk: {reason}")
        rates["read warm"] = disk.read_rate(files, limit, cold=False)
        data = block.data.cast("B")
        rates["write"] = disk.write_rate(self._work / "rate", min(self._written, RATE_BYTES), data)

    def _require_space(self, geometry: Geometry, *, source: float) -> None:
        """Raises ``OSError`` where the checkpoint (``source`` of its bytes) and three of its artifacts do not fit."""
        size = sum(tensor.bytes for tensor in geometry.tensors())
        needed = int(size * (source + 3 * ARTIFACT_SHARE))
        free = shutil.disk_usage(self._work).free
        if free < needed:
            raise OSError(
                f"{self._work.parent}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; "
                "choose another --dir or fewer --gigabytes"
            )

    def _write_target(self, model: Path) -> None:
        lines = [
            f"[targets.{TARGET}]",
            f"model = {json.dumps(str(model))}",
            f"recipe = {json.dumps(self._options.recipe)}",
            'components = ["text"]',
            f"device = {json.dumps(self._options.device)}",
        ]
        (self._work / "ninferbuild.toml").write_text("\n".join(lines) + "\n")

    def _forget(self) -> None:
        """Back to nothing built and nothing cached."""
        shutil.rmtree(self._work / "cache", ignore_errors=True)
        for path in (self._out, self._out.with_name(f"{self._out.name}.conversion.json"), self._copy, self._payload):
            path.unlink(missing_ok=True)
        self._built = False

    # Builds

    def _builds(self) -> dict[str, Scenario]:
        """In an order in which each finds what it needs; one that does not is preceded by a build that is not timed."""
        return {
            "baseline": self._run_baseline,
            "cold": self._run_cold,
            "warm": self._run_warm,
            "noop": self._run_noop,
            "copy": self._run_copy,
            "link": self._run_link,
            "method": lambda: self._run_change("method"),
            "format": lambda: self._run_change("format"),
        }

    def _run_baseline(self) -> Measurement:
        disk.drop_pages(self._sources())
        os.sync()
        file = str(self._work / "ninferbuild.toml")
        usage = self._child("baseline", file, TARGET, str(self._payload))
        return self._measurement("baseline", usage, cold=True)

    def _run_cold(self) -> Measurement:
        self._clean()
        disk.drop_pages(self._sources())
        return self._full_build("cold", cold=True)

    def _run_warm(self) -> Measurement:
        self._clean()
        disk.warm_pages(self._sources())
        return self._full_build("warm", cold=False)

    def _clean(self) -> None:
        shutil.rmtree(self._work / "cache", ignore_errors=True)
        self._out.unlink(missing_ok=True)
        self._built = False

    def _full_build(self, name: str, *, cold: bool) -> Measurement:
        usage, read = self._build()
        self._finish_first_build()
        return self._measurement(name, usage, cold=cold, read=read)

    def _run_noop(self) -> Measurement:
        self._require_built()
        usage, read = self._build()
        return Measurement("noop", usage.seconds, source_bytes_read=read, usage=usage)

    def _run_copy(self) -> Measurement:
        self._require_built()
        os.sync()
        seconds = disk.copy(self._out, self._copy)
        self._copy.unlink()
        return Measurement("copy", seconds, written_bytes=self._written)

    def _run_link(self) -> Measurement:
        self._require_built()
        self._out.unlink()
        usage, read = self._build()
        return Measurement("link", usage.seconds, written_bytes=self._written, source_bytes_read=read, usage=usage)

    def _run_change(self, change: str) -> Measurement:
        self._require_built()
        usage, read = self._build("--set", f"overrides=[{json.dumps(f'{CHANGES}:{change}')}]")
        return replace(self._measurement(change, usage, cold=False, read=read), source_bytes=self._changed)

    def _require_built(self) -> None:
        if not self._built:
            self._build()
            self._finish_first_build()

    def _build(self, *more: str) -> tuple[Usage, int]:
        os.sync()
        usage = self._child("ninferbuild", "build", TARGET, "--json", "-q", *self._file(), *more)
        return usage, json.loads(usage.output)["source_bytes_read"]

    def _measurement(self, name: str, usage: Usage, *, cold: bool, read: int | None = None) -> Measurement:
        rates = self._results.rates
        rate = rates["read cold"] if cold and "read cold" in rates else rates["read warm"]
        return Measurement(
            name,
            usage.seconds,
            source_bytes=self._needed,
            written_bytes=self._written,
            source_bytes_read=read,
            read_rate=rate.bytes_per_second,
            usage=usage,
        )

    def _finish_first_build(self) -> None:
        """Compare the artifact with what the baseline wrote: a baseline is fair only if it does the same work.

        Raises:
            PayloadsDiffer: they differ.
        """
        self._built = True
        if not self._payload.exists():
            return
        with Artifact(self._out) as artifact:
            offset = artifact.payload_offset
        if not disk.same_from(self._out, offset, self._payload, 0):
            raise PayloadsDiffer("the baseline and the build made different payloads of one target")
        self._payload.unlink()

    # Plans

    def _plan(self, name: str, geometry: Geometry) -> None:
        geometry = geometry.scaled(self._options.scale)
        model = self._model(name)
        write_sparse(model, geometry, marked=False)
        recipe = "qwen3_6_35b_a3b" if geometry.experts else "qwen3_6_27b"
        arguments = ["--model", str(model), "--recipe", recipe, "--components", "text", "--out", str(self._out)]
        for _ in range(self._options.repeat):
            self._run(name, lambda: self._one_plan(name, arguments))
        shutil.rmtree(model)

    def _one_plan(self, name: str, arguments: Sequence[str]) -> Measurement:
        shutil.rmtree(self._work / "cache", ignore_errors=True)
        usage = self._child("ninferbuild", "plan", "-q", *arguments)
        return Measurement(name, usage.seconds, usage=usage)

    # Helpers

    def _model(self, name: str) -> Path:
        return self._work / "models" / name

    def _sources(self) -> list[Path]:
        return sorted(self._model("dense").glob("*.safetensors"))

    def _file(self) -> tuple[str, str]:
        return "--file", str(self._work / "ninferbuild.toml")

    def _child(self, kind: str, *arguments: str) -> Usage:
        return run(kind, [self._options.device, *arguments], scratch=self._work, environment=self._environment)


def _of_changed_layer(action: Mapping[str, Any]) -> bool:
    """Whether the changes of ``changes.py`` make a planned action run again."""
    quantized = action["format"] not in changes.DIRECT
    return quantized and any(name.startswith(changes.LAYER) for name in action["parameters"])
