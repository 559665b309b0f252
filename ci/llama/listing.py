"""Run by a Python of its own: what the package gguf that comes with llama.cpp reads in a file, as JSON.

Usage: listing.py LLAMA_CPP FILE. Prints ``{"kv": {key: value}, "tensors": [[name, row-major shape, type, first byte in
the file, bytes], …]}``.
"""

from __future__ import annotations

import json
from pathlib import Path
import sys


def main(llama_cpp: Path, path: Path) -> None:
    sys.path[0] = str(llama_cpp / "gguf-py")
    from gguf import GGUFReader

    reader = GGUFReader(path)
    kv = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = [
        (
            tensor.name,
            [int(extent) for extent in reversed(tensor.shape)],
            tensor.tensor_type.name,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    ]
    json.dump({"kv": kv, "tensors": tensors}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
