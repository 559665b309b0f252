"""Building, deriving and describing sources neither imports torch nor reads payloads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

SCRIPT = """
import sys
import numpy as np
from ninferbuild.sources.compressed_tensors import compressed_matrix_source, matrix_source
from ninferbuild.sources.logical import array_source, gather_source, leading_rows, select_rows, transpose_source
from ninferbuild.sources.opened import Sources
from ninferbuild.sources.safetensors import tensor_source

sources = Sources(sys.argv[1])
store = sources["base"]
matrix = matrix_source(store, "m.weight", (32, 32))
nvfp4 = matrix_source(store, "q.weight", (4, 32))
derived = [
    matrix,
    nvfp4,
    compressed_matrix_source(store, "q", (4, 32), "nvfp4"),
    select_rows(nvfp4, ((2, 3), (0, 1))),
    gather_source(matrix, np.array([3, 1, 2])),
    leading_rows(tensor_source(store, "m.weight", (2, 16, 16, 2), source_shape=(32, 32)), 1, 2),
    transpose_source(select_rows(matrix, ((1, 3),)), (1, 0), (32, 2)),
    array_source(np.arange(6).reshape(2, 3), "ids"),
]
for source in derived:
    assert source.description is not None, source.label
    assert sources.name_of(source.description.parts[0].region.spans[0].file) in ("base", None)
assert nvfp4.weight_divisor() == b"\\0\\0\\0\\x40"
assert store.bytes_read <= 16, store.bytes_read
assert "torch" not in sys.modules
"""


def test_describing_imports_no_torch(tmp_path, checkpoints):
    directory = checkpoints.write_directory(
        tmp_path / "c",
        {
            "m.weight": checkpoints.bf16(np.zeros((32, 32))),
            "q.weight_packed": checkpoints.stored("U8", np.zeros((4, 16), np.uint8)),
            "q.weight_scale": checkpoints.stored("F8_E4M3", np.zeros((4, 2), np.uint8)),
            "q.weight_global_scale": checkpoints.stored("F32", np.float32(2)),
        },
    )
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(directory)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
