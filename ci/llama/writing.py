"""GGUF files that llama.cpp writes: exports of a checkpoint, an importance matrix, and quantised copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
import re
import subprocess
import sys

import numpy as np

from llama.package import LlamaCpp, run_tool

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        label: what it is called here.
        file_type: what ``llama-quantize`` is asked for.
        blocks: the one type of all its matrices; None for a mixture.
    """

    label: str
    file_type: str
    blocks: str | None


PURE = (
    *(Kind(name, name, name) for name in ("Q2_0", "Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")),
    *(Kind(name, name, name) for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")),
    Kind("IQ2_S", "IQ2_M", "IQ2_S"),  # the file type IQ2_S is mostly IQ2_XS
    *(Kind(name, name, name) for name in ("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")),
)
"""Every type of blocks that an artifact keeps."""

MIXTURES = tuple(Kind(f"{name} mix", name, None) for name in ("Q3_K_L", "Q4_K_M", "IQ2_M", "IQ3_XXS"))

PLAIN_KINDS = tuple(Kind(name, name, name) for name in ("F32", "F16", "BF16"))
"""Values, which are read but not kept as blocks."""

OF_EXPERTS = tuple(
    kind for kind in (*PURE, *MIXTURES) if kind.label in ("Q2_0", "Q8_0", "Q4_K", "IQ2_XXS", "Q4_K_M mix")
)
"""What is made of a mixture of experts, whose matrices are read like any others."""

REFUSED = (
    *(Kind(name, name, name) for name in ("Q1_0", "Q4_1", "Q5_1", "TQ1_0", "TQ2_0")),
    Kind("MXFP4", "MXFP4_MOE", "MXFP4"),
)
"""Files with types of blocks that no artifact keeps."""


class Writer:
    """Writes files below a directory with the tools of one llama.cpp."""

    def __init__(self, llama_cpp: LlamaCpp, directory: Path):
        self._llama_cpp = llama_cpp
        self._directory = directory

    def export(self, model: Path, kind: str = "f32", *, vision: bool = False) -> Path:
        """An export of a checkpoint, f32 or q8_0: its text and MTP, or its vision tower."""
        path = self._directory / f"{'mmproj' if vision else 'model'}-{kind}.gguf"
        options = ["--outtype", kind, "--outfile", str(path), *(["--mmproj"] if vision else []), str(model)]
        run_tool([sys.executable, str(HERE / "converting.py"), str(self._llama_cpp.source), *options])
        return path

    def file_types(self) -> set[str]:
        """What this ``llama-quantize`` can be asked for."""
        shown = subprocess.run([self._quantizer, "--help"], check=False, capture_output=True, text=True).stdout
        return set(re.findall(r"^ *\d+ +or +(\w+)", shown, flags=re.MULTILINE))

    def quantise(self, model: Path, kind: Kind, importance: Path) -> Path:
        """A copy of an F32 export with its matrices in the types of ``kind``."""
        path = self._directory / f"{kind.label.replace(' ', '-')}.gguf"
        pure = [] if kind.blocks is None else ["--pure"]
        run_tool([self._quantizer, *pure, "--imatrix", str(importance), str(model), str(path), kind.file_type, "1"])
        return path

    def measure(self, model: Path, form: str) -> Path:
        """What ``llama-imatrix`` makes of a text, in the ``form`` gguf or dat."""
        text, path = self._directory / "text.txt", self._directory / f"measured.{form}"
        text.write_text("".join(f"line {number} of a text to measure with\n" for number in range(200)))
        command = [str(self._llama_cpp.tool("llama-imatrix")), "-m", str(model), "-f", str(text), "-o", str(path)]
        run_tool([*command, "--output-format", form, "-c", "64", "-t", "1", "--chunks", "4"])
        return path

    @property
    def _quantizer(self) -> str:
        return str(self._llama_cpp.tool("llama-quantize"))


def write_importance(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """An importance matrix for tensors of these shapes; one that was measured leaves out the MTP block."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "imatrix")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["noise"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        matrices = shape[0] if len(shape) == 3 else 1
        writer.add_tensor(f"{name}.in_sum2", random.chisquare(1, (matrices, shape[-1])).astype(np.float32))
        writer.add_tensor(f"{name}.counts", np.ones((matrices, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
