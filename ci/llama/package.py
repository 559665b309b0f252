"""The source package of llama-cpp-python: where it comes from, and the tools that are compiled from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
import shutil
import subprocess
import sys
import tarfile

NAME = "llama-cpp-python"

TARGETS = ("llama-quantize", "llama-imatrix")

OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    # The blocks are quantised and decoded by C, whose products must be rounded before they are added, as numpy's are.
    "CMAKE_C_FLAGS_RELEASE": "-O2 -ffp-contract=off",
    "CMAKE_CXX_FLAGS_RELEASE": "-O0",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "GGML_LLAMAFILE": "OFF",
    "GGML_CPU_REPACK": "OFF",
    "GGML_CCACHE": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
}


class Missing(Exception):
    """Something that the check needs is not there; the message says what to do."""


class ToolFailed(Exception):
    """A tool ended with an error; the message is its command and what it said."""


def run_tool(command: list[str]) -> None:
    """Run a tool; what it says is shown if it fails.

    Raises:
        ToolFailed: it failed.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ToolFailed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


@dataclass(frozen=True)
class LlamaCpp:
    """A compiled llama.cpp.

    Attributes:
        version: name and version of the package that it came in.
        source: the directory of llama.cpp in it.
        build: where it was compiled.
    """

    version: str
    source: Path
    build: Path

    def tool(self, name: str) -> Path:
        """The executable ``name``."""
        return self.build / "bin" / name

    @property
    def ggml(self) -> Path:
        """The library that quantises and decodes blocks."""
        found = [self.build / "bin" / f"libggml-base.{suffix}" for suffix in ("so", "dylib")]
        return next((path for path in found if path.exists()), found[0])


def provide(work: Path, source: Path | None, jobs: int) -> LlamaCpp:
    """llama.cpp, compiled below ``work`` unless it was before.

    Args:
        source: the source package, or the directory that it was unpacked to; None downloads it.

    Raises:
        Missing: no compiler or CMake, no package, or one that does not hold llama.cpp.
        ToolFailed: compiling failed.
    """
    unpacked = source if source is not None and source.is_dir() else _unpack(source or _download(work), work)
    llama_cpp = unpacked / "vendor/llama.cpp"
    if not (llama_cpp / "convert_hf_to_gguf.py").exists():
        raise Missing(f"{unpacked} does not hold vendor/llama.cpp with convert_hf_to_gguf.py; give another --source")
    found = LlamaCpp(unpacked.name, llama_cpp, work / "build" / unpacked.name)
    if shutil.which("cmake") is None:
        raise Missing("cmake is not there; install it with `pip install cmake`")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    run_tool(["cmake", "-S", str(llama_cpp), "-B", str(found.build), *generator, *options])
    run_tool(["cmake", "--build", str(found.build), "-j", str(jobs), "--target", *TARGETS])
    return found


def _download(work: Path) -> Path:
    target = work / "download"
    if not (found := sorted(target.glob("llama_cpp_python-*.tar.gz"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run([*command, "--dest", str(target), NAME], check=False)
        found = sorted(target.glob("llama_cpp_python-*.tar.gz"))
        if done.returncode or not found:
            raise Missing(f"{NAME} could not be downloaded; give its source package with --source")
    return found[-1]


def _unpack(package: Path, work: Path) -> Path:
    target = work / "source"
    unpacked = target / package.name.removesuffix(".tar.gz")
    if not unpacked.exists():
        if not package.exists():
            raise Missing(f"{package} does not exist; --source takes the source package or its directory")
        partial = work / "unpacking"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(package) as archive:
            archive.extractall(partial, filter="data")
        target.mkdir(parents=True, exist_ok=True)
        (partial / unpacked.name).rename(unpacked)
        shutil.rmtree(partial)
    return unpacked
