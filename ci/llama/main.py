"""Arguments, order and report of the check."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
import os
from pathlib import Path
import shutil
import sys

from llama import checks, importance
from llama.checkpoint import write
from llama.package import LlamaCpp, Missing, ToolFailed, provide
from llama.reference import PLAIN, Reference
from llama.writing import MIXTURES, OF_EXPERTS, PLAIN_KINDS, PURE, REFUSED, Kind, Writer, write_importance

SHOWN = 10
"""Differences that are printed for one file."""

DEFAULT_WORK = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ninferbuild-llama.cpp"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check: 0 nothing differs, 1 something does, 2 it could not be made."""
    parser = argparse.ArgumentParser(prog="ci/real_gguf", description="Check ninferbuild on files of llama.cpp.")
    parser.add_argument("--source", type=Path, help="source package of llama-cpp-python, or its directory")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help=f"kept between runs (default {DEFAULT_WORK})")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="files to compile at a time")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        return check(provide(work, options.source, options.jobs), work / "files")
    except (Missing, ToolFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def check(llama_cpp: LlamaCpp, files: Path) -> int:
    """Write all files below ``files`` and look at each: 0 if nothing differs, else 1.

    Raises:
        ToolFailed: a tool of llama.cpp did.
    """
    print(llama_cpp.version)
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    os.environ["NINFERBUILD_CACHE"] = str(files / "cache")
    report = Report()
    dense = Family(llama_cpp, files / "dense", report)
    dense.exports()
    dense.quantised((*PLAIN_KINDS, *PURE, *MIXTURES, *REFUSED))
    dense.measured()
    mixture = Family(llama_cpp, files / "experts", report, mixture=True)
    mixture.exports()
    mixture.quantised(OF_EXPERTS)
    print(f"{report.same} files the same, {report.failed} different")
    return 1 if report.failed else 0


class Report:
    """A line for each file.

    Attributes:
        same, failed: files so far.
    """

    def __init__(self) -> None:
        self.same = self.failed = 0

    def file(self, label: str, reference: Reference, found: Iterable[str]) -> None:
        """Print what a GGUF file holds, and its differences."""
        blocks = [entry for entry in reference.tensors.values() if entry.type not in PLAIN]
        stored = sum(entry.size for entry in blocks)
        kinds = sorted({entry.type for entry in reference.tensors.values()})
        what = f"{len(reference.tensors)} tensors, {len(blocks)} of blocks ({stored} bytes), {' '.join(kinds)}"
        self.line(label, what, list(found))

    def line(self, label: str, what: str, found: list[str]) -> None:
        """Print what was looked at, and its differences."""
        self.same += not found
        self.failed += bool(found)
        print(f"{label:20} {'DIFFERENT' if found else 'same'}: {what}", flush=True)
        for line in found[:SHOWN]:
            print(f"  {line}")
        if len(found) > SHOWN:
            print(f"  and {len(found) - SHOWN} more")


class Family:
    """One checkpoint, dense or a mixture of experts, and all files that are made of it below ``directory``."""

    def __init__(self, llama_cpp: LlamaCpp, directory: Path, report: Report, *, mixture: bool = False):
        directory.mkdir()
        self._llama_cpp = llama_cpp
        self._directory = directory
        self._report = report
        self._prefix = "experts " if mixture else ""
        self._writer = Writer(llama_cpp, directory)
        self._saved = write(directory / "model", mixture=mixture)
        self._model = self._writer.export(self._saved.directory)
        self._mmproj = self._writer.export(self._saved.directory, vision=True)

    def exports(self) -> None:
        """What the exporter wrote."""
        for label, path in (("export", self._model), ("mmproj", self._mmproj)):
            reference = Reference(self._llama_cpp, path)
            found = [*checks.reader(path, reference), *checks.exported(path, self._saved)]
            if path == self._model:
                found += checks.aliases(path, reference, self._saved)
            self._report.file(self._prefix + label, reference, found)
        path = self._writer.export(self._saved.directory, "q8_0")
        reference = Reference(self._llama_cpp, path)
        found = [*checks.reader(path, reference), *checks.aliases(path, reference, self._saved)]
        found += checks.artifact(path, self._mmproj, reference, self._saved)
        self._report.file(self._prefix + "export Q8_0", reference, found)

    def quantised(self, kinds: Iterable[Kind]) -> None:
        """What the quantiser makes of it, as far as it writes these kinds of files."""
        exported = Reference(self._llama_cpp, self._model)
        shapes = {name: entry.shape for name, entry in exported.tensors.items()}
        weights = write_importance(self._directory / "importance.gguf", shapes)
        known = self._writer.file_types()
        for kind in kinds:
            if kind.file_type in known:
                self._quantised(kind, weights)
            else:
                print(f"{self._prefix + kind.label:20} passed over: this llama-quantize does not write it")

    def _quantised(self, kind: Kind, weights: Path) -> None:
        path = self._writer.quantise(self._model, kind, weights)
        reference = Reference(self._llama_cpp, path)
        kinds = {entry.type for entry in reference.tensors.values() if entry.type != "F32"}
        found = []
        if kind.blocks is not None and kinds != {kind.blocks} - {"F32"}:
            found.append(f"llama-quantize wrote {', '.join(sorted(kinds))}")
        if kind in REFUSED:
            found += checks.refused(path, self._mmproj, reference, self._saved)
        else:
            found += [*checks.reader(path, reference), *checks.aliases(path, reference, self._saved)]
            if kind not in PLAIN_KINDS:
                found += checks.artifact(path, self._mmproj, reference, self._saved)
        self._report.file(self._prefix + kind.label, reference, found)
        path.unlink()

    def measured(self) -> None:
        """Importance matrices that were measured, in both forms."""
        paths = [self._writer.measure(self._model, form) for form in ("gguf", "dat")]
        measured = Reference(self._llama_cpp, paths[0])
        for path in paths:
            found = list(importance.differences(path, measured, self._saved))
            self._report.line(f"imatrix {path.suffix[1:]}", f"{len(measured.tensors) // 2} importance vectors", found)
