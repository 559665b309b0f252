"""Print what an artifact holds: ``python -m ninferbuild.artifact.inspect PATH [--objects] [--bindings] [--json]``.

Only the entry is opened and no object is decoded, so formats that nobody knows are listed like any other.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
import json
import sys
from typing import Any

from ninferbuild.artifact.objects import ArtifactObject, TensorObject
from ninferbuild.artifact.primitives import ArtifactError
from ninferbuild.artifact.reader import Artifact
from ninferbuild.printable import printable, printable_lines


def artifact_summary(artifact: Artifact) -> dict[str, Any]:
    """The facts about an artifact as a whole, as JSON values, in print order."""
    directory = artifact.directory
    tensors = [item for item in artifact.objects if isinstance(item, TensorObject)]
    return {
        "path": str(artifact.path),
        "version": 3,
        "artifact_id": artifact.artifact_id.hex(),
        "name": directory.metadata.get("name"),
        "components": directory.components,
        "file_bytes": artifact.file_bytes,
        "payload_bytes": artifact.payload_bytes,
        "files": len(directory.files),
        "objects": len(artifact.objects),
        "tensors": len(tensors),
        "resources": len(artifact.objects) - len(tensors),
        "bindings": len(directory.bindings),
        "uses": len(directory.uses),
        "formats": dict(sorted(Counter(item.format for item in tensors).items())),
        "layouts": dict(sorted(Counter(item.layout for item in tensors).items())),
    }


def artifact_report(artifact: Artifact, *, objects: bool = False, bindings: bool = False) -> dict[str, Any]:
    """The summary, with object records and with bindings and uses when asked for."""
    report = artifact_summary(artifact)
    if objects:
        report["object_records"] = [item.to_json() for item in artifact.objects]
    if bindings:
        report["binding_records"] = artifact.directory.bindings
        report["use_records"] = artifact.directory.uses
    return report


def text_lines(artifact: Artifact, *, objects: bool = False, bindings: bool = False) -> Iterator[str]:
    """The report as the reference inspector prints it, line by line."""
    for key, value in artifact_summary(artifact).items():
        yield printable(f"{key}: {value}")
    yield from record_lines(artifact, objects=objects, bindings=bindings)


def record_lines(artifact: Artifact, *, objects: bool, bindings: bool) -> Iterator[str]:
    """One line an object, then bindings and uses as JSON, of these what is asked for."""
    if objects:
        yield from (printable(object_line(item)) for item in artifact.objects)
    if bindings:
        yield json_text({"bindings": artifact.directory.bindings, "uses": artifact.directory.uses})


def summary_lines(artifact: Artifact) -> Iterator[str]:
    """The summary for people who look for no more than what is there: names of components, counts of formats."""
    for key, value in artifact_summary(artifact).items():
        if key == "components":
            value = ", ".join(value) or "(none)"
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {count}" for name, count in value.items()) or "(none)"
        elif value is None:
            value = "(none)"
        yield printable(f"{key}: {value}")


def object_line(item: ArtifactObject) -> str:
    """One line about an object: offset, bytes, kind, storage, id."""
    if isinstance(item, TensorObject):
        stack = f" {item.divisors} divisors" if item.divisors > 1 else ""
        storage = f"{item.format}/{item.layout} {list(item.shape)}{stack}"
    else:
        storage = item.encoding
    return f"{item.offset:>14} {item.bytes:>14} {item.kind:<8} {storage:<42} {item.id}"


def json_text(value: Any) -> str:
    """Indented JSON, non-ASCII raw."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ninferbuild.artifact.inspect", description="Print what an artifact holds.")
    parser.add_argument("path", metavar="PATH", help="the entry of an artifact")
    parser.add_argument("--objects", action="store_true", help="list the objects")
    parser.add_argument("--bindings", action="store_true", help="list bindings and uses")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args(argv)
    try:
        with Artifact(options.path) as artifact:
            wanted = {"objects": options.objects, "bindings": options.bindings}
            if options.json:
                print(json_text(artifact_report(artifact, **wanted)))
            else:
                for line in text_lines(artifact, **wanted):
                    print(printable_lines(line))
    except (ArtifactError, OSError, RecursionError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
