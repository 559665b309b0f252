"""Arguments, order and report of the check."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
import os
from pathlib import Path
import shutil
import subprocess
import sys

from llama import checks, importance
from llama.checkpoint import Checkpoint, write
from llama.package import LlamaCpp, Missing, provide
from llama.reference import PLAIN, Reference
from llama.writing import MIXTURES, PASSED_OVER, PLAIN_KINDS, PURE, Kind, Writer, write_importance

SHOWN = 10
"""Differences that are printed for one file."""

DEFAULT_WORK = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ninferbuild-llama.cpp"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check: 0 nothing differs, 1 something does, 2 something that it needs is not there."""
    parser = argparse.ArgumentParser(prog="ci/real_gguf", description="Check ninferbuild on files of llama.cpp.")
    parser.add_argument("--source", type=Path, help="source package of llama-cpp-python, or its directory")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help=f"kept between runs (default {DEFAULT_WORK})")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="files to compile at a time")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        llama_cpp = provide(work, options.source, options.jobs)
    except Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(error.cmd[:3])} failed with exit code {error.returncode}", file=sys.stderr)
        return 2
    print(llama_cpp.version)
    files = work / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    os.environ["NINFERBUILD_CACHE"] = str(files / "cache")
    run = Run(llama_cpp, files)
    run.exports()
    run.quantised()
    run.measured()
    print(f"{run.same} files the same, {run.failed} different")
    return 1 if run.failed else 0


class Run:
    """One pass over everything, a line for each file.

    Attributes:
        same, failed: files so far.
    """

    def __init__(self, llama_cpp: LlamaCpp, files: Path):
        self.same = self.failed = 0
        self._llama_cpp = llama_cpp
        self._files = files
        self._writer = Writer(llama_cpp, files)
        self._saved: Checkpoint = write(files / "model")
        self._model = self._writer.export(self._saved.directory)
        self._mmproj = self._writer.export(self._saved.directory, vision=True)

    def exports(self) -> None:
        """What the exporter wrote."""
        for label, path in (("export", self._model), ("mmproj", self._mmproj)):
            reference = Reference(self._llama_cpp, path)
            found = [*checks.reader(path, reference), *checks.exported(path, self._saved)]
            if path == self._model:
                found += checks.aliases(path, reference, self._saved)
            self._report(label, reference, found)

    def quantised(self) -> None:
        """What the quantiser makes of it, for every kind of file that it knows."""
        columns = {name: entry.shape[-1] for name, entry in Reference(self._llama_cpp, self._model).tensors.items()}
        weights = write_importance(self._files / "importance.gguf", columns)
        known = self._writer.file_types()
        for kind in (*PLAIN_KINDS, *PURE, *MIXTURES):
            if kind.file_type in known:
                self._quantised(kind, weights)
            else:
                print(f"{kind.label:12} passed over: this llama-quantize does not write it")
        for name in sorted(known & PASSED_OVER.keys()):
            print(f"{name:12} passed over: {PASSED_OVER[name]}")

    def _quantised(self, kind: Kind, weights: Path) -> None:
        path = self._writer.quantise(self._model, kind, weights)
        reference = Reference(self._llama_cpp, path)
        found = [*checks.reader(path, reference), *checks.aliases(path, reference, self._saved)]
        if kind.blocks is not None:
            kinds = {entry.type for entry in reference.tensors.values() if entry.type != "F32"}
            if kinds - {kind.blocks}:
                found.append(f"llama-quantize wrote {', '.join(sorted(kinds))}")
        if kind not in PLAIN_KINDS:
            found += checks.artifact(path, self._mmproj, reference, self._saved, self._files)
        self._report(kind.label, reference, found)
        path.unlink()

    def measured(self) -> None:
        """Importance matrices that were measured, in both forms."""
        paths = [self._writer.measure(self._model, form) for form in ("gguf", "dat")]
        measured = Reference(self._llama_cpp, paths[0])
        for path in paths:
            found = list(importance.differences(path, measured, self._saved))
            self._print(f"imatrix {path.suffix[1:]}", f"{len(measured.tensors) // 2} importance vectors", found)

    def _report(self, label: str, reference: Reference, found: Iterable[str]) -> None:
        blocks = [entry for entry in reference.tensors.values() if entry.type not in PLAIN]
        stored = sum(entry.size for entry in blocks)
        kinds = sorted({entry.type for entry in reference.tensors.values()})
        what = f"{len(reference.tensors)} tensors, {len(blocks)} of blocks ({stored} bytes), {' '.join(kinds)}"
        self._print(label, what, list(found))

    def _print(self, label: str, what: str, found: list[str]) -> None:
        self.same += not found
        self.failed += bool(found)
        print(f"{label:12} {'DIFFERENT' if found else 'same'}: {what}", flush=True)
        for line in found[:SHOWN]:
            print(f"  {line}")
        if len(found) > SHOWN:
            print(f"  and {len(found) - SHOWN} more")
