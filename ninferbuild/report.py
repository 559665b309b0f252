"""``<out>.conversion.json``: how an artifact was made.

The members of the reference converter's report in its order, then what only a build system knows. Paths, times and
versions stand here and not in the artifact, which would otherwise differ from machine to machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
import json
import os
from pathlib import Path
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ninferbuild.version import VERSION

if TYPE_CHECKING:
    from ninferbuild.cache import ActionRecord
    from ninferbuild.configure import Configured
    from ninferbuild.link import Layout
    from ninferbuild.plan import Parent

CONVERTER = "ninferbuild"
"""``provenance.converter`` of artifacts made here and of their reports."""


def report_path(entry: Path) -> Path:
    """Where the report of the artifact ``entry`` lies."""
    return entry.with_name(entry.name + ".conversion.json")


class _Provenance(msgspec.Struct):
    converter: str


class _Report(msgspec.Struct):
    """What tells a report of ours; other members are skipped."""

    provenance: _Provenance
    artifact_id: str = ""
    output: str = ""
    files: list[Any] = []


def is_report(path: Path, *, artifact_id: str | None = None) -> bool:
    """Whether the file at ``path`` is a report that ninferbuild wrote; of this artifact, if one is given."""
    report = _read(path)
    return report is not None and artifact_id in (None, report.artifact_id)


def reported_set(entry: Path) -> tuple[str, int] | None:
    """(artifact id, number of files) of the set that the report beside ``entry`` says was written there; None without
    such a report."""
    report = _read(report_path(entry))
    if report is None or not report.files or os.path.realpath(report.output) != os.path.realpath(entry):
        return None
    return report.artifact_id, len(report.files)


def _read(path: Path) -> _Report | None:
    """The report at ``path`` if ninferbuild wrote it."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report)
    except (OSError, msgspec.MsgspecError):
        return None
    return report if report.provenance.converter == CONVERTER else None


def make_report(
    configured: Configured,
    parents: Sequence[Parent],
    records: Sequence[ActionRecord],
    executed: Sequence[bool],
    layout: Layout,
    *,
    uses: int,
    device: str | None,
    preparation_seconds: float,
    seconds: float,
) -> dict[str, Any]:
    """The report as JSON values.

    Args:
        records: of the parents, in order.
        executed: for each parent, whether its action ran in this build.
        device: what encoded; None when nothing had to be encoded.
        preparation_seconds: from the start to the first action.
    """
    from importlib.metadata import version  # slow to load, and a build that finds all up to date writes no report

    target = configured.target
    directory = layout.directory
    return {
        "components": directory.components,
        "name": target.artifact_name,
        "output": str(target.out),
        "device": device,
        "torch_version": version("torch"),
        "cuda_version": _cuda_version(),
        "rows_per_chunk": target.rows_per_chunk,
        "provenance": invocation(configured),
        "preparation_seconds": preparation_seconds,
        "parameters": len(directory.bindings),
        "uses": uses,
        "objects": len(directory.objects),
        "formats": dict(Counter(parent.target.format for parent in parents)),
        "methods": [
            {
                "object": parent.target.id,
                "parameters": list(parent.names),
                "sources": list(parent.labels),
                "method": parent.method_name,
                "method_parameters": dict(parent.request.parameters),
                "format": parent.target.format,
                "layout": parent.target.layout,
                "shape": list(parent.target.shape),
                "key": record.key.hex(),
                "payload_bytes": record.length,
                "digest": record.digest.hex(),
                "state": "executed" if ran else "cached",
                "seconds": record.seconds,
            }
            for parent, record, ran in zip(parents, records, executed, strict=True)
        ],
        "artifact_id": layout.artifact_id.hex(),
        "files": [
            {"path": str(path), "payload_bytes": item.payload_bytes}
            for path, item in zip(layout.paths(target.out), directory.files, strict=True)
        ],
        "payload_bytes": directory.payload_bytes,
        "seconds": seconds,
        "ninferbuild": VERSION,
        "target": target.settings(),
    }


def invocation(configured: Configured) -> dict[str, Any]:
    """What was converted, with the paths as they were given."""
    target, sources = configured.target, configured.sources
    paths = {"base": target.model, **target.sources, **target.grafts}
    made: dict[str, Any] = {
        "converter": CONVERTER,
        "recipe": target.recipe,
        "sources": {name: {"path": str(paths[name])} for name in sources.opened},
    }
    if len(target.overrides) == 1:
        made["override"] = target.overrides[0]
    elif target.overrides:
        made["override"] = list(target.overrides)
    if configured.recipe.grafts:
        made["grafts"] = {
            taken.component.name: {"path": str(taken.source.path), "artifact_id": taken.source.artifact_id}
            for taken in configured.recipe.grafts
        }
    if configured.ranking is not None:
        made["ranking"] = str(configured.ranking)
    return made


def _cuda_version() -> str | None:
    # Only a build that encoded has torch; a build from the cache alone does not import it to say this.
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "version", None), "cuda", None) if torch is not None else None


def encode_report(report: dict[str, Any]) -> bytes:
    """The report's text: UTF-8, two-space indent, final newline.

    Raises:
        ValueError: a value is NaN or infinite.
        TypeError: a value is none that JSON has.
    """

    def plain(value: object) -> str:
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"the conversion report cannot serialize {value!r} ({type(value).__name__})")

    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False, default=plain)
    return (text + "\n").encode("utf-8", "surrogatepass")
