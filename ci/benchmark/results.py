"""Measurements and what follows from them: rates, ratios, fractions of the floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmark.disk import Rate
from benchmark.process import Usage

VOID_BELOW = {"cpu": 0.12e9, "cuda": 0.6e9}
"""Source bytes a second that the baseline must reach; a slower one makes every ratio meaningless."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One scenario, the best of its repetitions.

    Attributes:
        seconds: the whole command, from before its process was started until it was gone.
        source_bytes: bytes of source that the scenario has to read.
        written_bytes: bytes that it has to write once, to the artifact.
        source_bytes_read: bytes of source that it did read; None where nothing counts them.
        read_rate: bytes a second that reading can reach here, the floor of reading.
        usage: the process; None for what the benchmark does itself.
    """

    name: str
    seconds: float
    source_bytes: int = 0
    written_bytes: int = 0
    source_bytes_read: int | None = None
    read_rate: float | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class StartUp:
    """A process that only initialises torch on the device.

    Attributes:
        anonymous: its peak anonymous memory, bytes.
    """

    seconds: float
    anonymous: int


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement seen beside the baseline and the limits of the machine; None where that has no meaning.

    Attributes:
        net_seconds: less the time in which it imported torch and used the device for the first time.
        rate: source bytes a second.
        ratio, net_ratio: how many times faster than the baseline, whole commands and net of start-up.
        floor_seconds: reading what must be read or writing what must be written, whichever takes longer.
        floor_fraction: ``floor_seconds`` as a part of ``net_seconds``.
        anonymous: peak anonymous memory above a process that only initialises torch.
    """

    name: str
    seconds: float
    net_seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)
    rate: float | None = None
    ratio: float | None = None
    net_ratio: float | None = None
    floor_seconds: float | None = None
    floor_fraction: float | None = None
    source_bytes: int = 0
    source_bytes_read: int | None = None
    torch: bool | None = None
    peak_rss: int | None = None
    anonymous: int | None = None
    peak_gpu: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def net_seconds(measurement: Measurement) -> float:
    """The seconds of a command less those in which it imported torch and used the device for the first time."""
    usage = measurement.usage
    return measurement.seconds - (usage.stages.get("initialise", 0.0) if usage is not None else 0.0)


def floor_seconds(measurement: Measurement, write_rate: float | None) -> float | None:
    """Seconds below which the disk cannot get: bytes read ÷ read rate or bytes written ÷ write rate, the larger."""
    parts = []
    if measurement.source_bytes and measurement.read_rate:
        parts.append(measurement.source_bytes / measurement.read_rate)
    if measurement.written_bytes and write_rate:
        parts.append(measurement.written_bytes / write_rate)
    return max(parts) if parts else None


def row(measurement: Measurement, baseline: Measurement | None, start_up: StartUp, write_rate: float | None) -> Row:
    """The measurement with its ratios."""
    net = net_seconds(measurement)
    floor = floor_seconds(measurement, write_rate)
    usage = measurement.usage
    compared = baseline is not None and measurement.source_bytes > 0
    return Row(
        name=measurement.name,
        seconds=measurement.seconds,
        net_seconds=net,
        stages=usage.stages if usage is not None else {},
        rate=measurement.source_bytes / measurement.seconds if measurement.source_bytes else None,
        ratio=baseline.seconds / measurement.seconds if compared and baseline else None,
        net_ratio=net_seconds(baseline) / net if compared and baseline else None,
        floor_seconds=floor,
        floor_fraction=floor / net if floor is not None else None,
        source_bytes=measurement.source_bytes,
        source_bytes_read=measurement.source_bytes_read,
        torch=usage.torch if usage is not None else None,
        peak_rss=usage.peak_rss if usage is not None else None,
        anonymous=max(0, usage.peak_anonymous - (start_up.anonymous if usage.torch else 0)) if usage else None,
        peak_gpu=usage.peak_gpu if usage is not None else None,
    )


def void_reason(baseline: Measurement, device: str) -> str | None:
    """Why the run says nothing: the baseline was slower than a fair one can be. None when it was not."""
    needed = VOID_BELOW["cuda" if device.startswith("cuda") else "cpu"]
    reached = baseline.source_bytes / net_seconds(baseline)
    if reached >= needed:
        return None
    return f"the baseline reached {reached / 1e9:.3f} GB/s, a fair one reaches {needed / 1e9} GB/s"


@dataclass(slots=True)
class Results:
    """Everything one run found."""

    machine: dict[str, Any]
    options: dict[str, Any]
    start_up: StartUp
    measurements: dict[str, Measurement] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    searches: list[dict[str, Any]] = field(default_factory=list)
    layers: int = 0

    @property
    def baseline(self) -> Measurement | None:
        return self.measurements.get("baseline")

    def void(self) -> str | None:
        if self.baseline is None:
            return None
        return void_reason(self.baseline, self.options["device"])

    def rows(self) -> list[Row]:
        write = self.rates.get("write")
        rate = write.bytes_per_second if write is not None else None
        return [row(item, self.baseline, self.start_up, rate) for item in self.measurements.values()]

    def comparisons(self) -> list[str]:
        """Sentences about pairs of scenarios."""
        rows = {item.name: item for item in self.rows()}
        lines = []
        for name in ("cold", "warm"):
            if name in rows and rows[name].source_bytes_read is not None and rows[name].source_bytes:
                times = (rows[name].source_bytes_read or 0) / rows[name].source_bytes
                lines.append(f"{name}: {times:.3f} × the source bytes that the recipe needs were read")
        copy = rows.get("copy")
        if copy is not None and "link" in rows and rows["link"].stages.get("link"):
            fraction = copy.seconds / rows["link"].stages["link"]
            lines.append(f"link: the link part runs at {fraction:.0%} of the rate of a plain copy")
        for name in ("method", "format"):
            if name not in rows:
                continue
            if "cold" in rows and rows[name].stages.get("encode"):
                share = rows["cold"].stages["encode"] / rows[name].stages["encode"]
                lines.append(
                    f"{name}: the encode part is 1/{share:.1f} of that of a cold build of {self.layers} layers"
                )
            if copy is not None:
                times = rows[name].seconds / copy.seconds
                lines.append(f"{name}: the whole command takes {times:.2f} × a plain copy of the artifact")
        lines += [
            f"search {item['format']} ({item['way']}): {item['rate'] / 1e6:.2f} million weights/s, "
            f"{item['ratio']:.2f} × the plain search, {item['floor_fraction']:.0%} of the floor of "
            f"{item['floor'] / 1e6:.1f}"
            for item in self.searches
        ]
        lines += [f"{item.name}: torch was imported" for item in rows.values() if item.torch and _torch_free(item.name)]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "options": self.options,
            "void": self.void(),
            "start_up": asdict(self.start_up),
            "rates": {
                name: {"bytes_per_second": rate.bytes_per_second, "threads": rate.threads, "all": rate.all}
                for name, rate in self.rates.items()
            },
            "layers": self.layers,
            "scenarios": {item.name: item.to_json() for item in self.rows()},
            "searches": self.searches,
            "comparisons": self.comparisons(),
            "notes": self.notes,
        }


def _torch_free(scenario: str) -> bool:
    return scenario == "noop" or scenario.startswith("plan-")
