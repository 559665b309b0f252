"""What every rule refuses before it reads, and that it needs neither torch nor payloads for that."""

from __future__ import annotations

from pathlib import Path
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from safetensors.numpy import save
import torch

from ninferbuild.rules import METHODS, cast_direct, fp8_row_maxabs, grouped_absmax, grouped_search
from ninferbuild.sources.logical import LogicalSource

WITHOUT_PARAMETERS = [(cast_direct, "bf16"), (grouped_absmax, "q4_g64_fp16"), (fp8_row_maxabs, "fp8_e4m3fn_row_bf16")]
OF_VALUES = [*WITHOUT_PARAMETERS, (grouped_search, "q4_g64_fp16")]
each = pytest.mark.parametrize(("rule", "format"), OF_VALUES)


@pytest.mark.parametrize(("rule", "format"), WITHOUT_PARAMETERS)
def test_refuses_parameters(harness, rule, format) -> None:
    with pytest.raises(ValueError, match=rf"{rule.name} accepts no numerical parameters.*'a'"):
        rule(harness.request(torch.ones(2, 128), format, parameters={"a": 1}))


@each
def test_refuses_other_counts(harness, rule, format) -> None:
    with pytest.raises(ValueError, match="source counts differ"):
        rule(harness.request(torch.ones(2, 128), format, shape=(3, 128)))


@each
@pytest.mark.parametrize("rows", [0, -1, 1.5, True, None])
def test_refuses_other_chunks(harness, rule, format, rows) -> None:
    with pytest.raises(ValueError, match="rows_per_chunk must be positive"):
        rule(harness.request(torch.ones(2, 128), format, rows_per_chunk=rows))


@each
def test_reads_the_first_element_of_an_opaque_source(harness, rule, format) -> None:
    read = []

    def values(begin: int, end: int) -> torch.Tensor:
        read.append((begin, end))
        return torch.ones(end - begin)

    rule(harness.request(LogicalSource((2, 128), "mine", values), format))
    assert read == [(0, 1)]

    def missing(begin: int, end: int) -> torch.Tensor:
        raise KeyError("no such tensor")

    with pytest.raises(KeyError, match="no such tensor"):
        rule(harness.request(LogicalSource((2, 128), "mine", missing), format))


def test_names() -> None:
    assert {name: method.__name__ for name, method in METHODS.items()} == {
        name: name
        for name in (
            "cast_direct",
            "grouped_absmax",
            "grouped_search",
            "fp8_row_maxabs",
            "import_encoded",
            "nvfp4_maxabs",
        )
    }


def test_checks_of_stored_sources_do_not_import_torch(tmp_path: Path) -> None:
    program = """
        from pathlib import Path
        import sys
        import numpy as np
        from ninferbuild.artifact.schema import TensorSpec
        from ninferbuild.method import MethodInput, PrepareRequest
        from ninferbuild.rules import METHODS
        from ninferbuild.sources.logical import array_source

        source = array_source(np.ones((2, 128), np.float32), "w")
        item = MethodInput("w", source, ())
        Path("vectors").write_bytes(VECTORS)
        for method, format, layout, parameters in (
            ("cast_direct", "bf16", "contiguous_le_v1", {}),
            ("grouped_absmax", "q4_g64_fp16", "row_split_k128_v1", {}),
            ("grouped_search", "q4_g64_fp16", "row_split_k128_v1", {"imatrix": "vectors"}),
            ("fp8_row_maxabs", "fp8_e4m3fn_row_bf16", "row_scale_v1", {}),
        ):
            target = TensorSpec("weight/000000", (2, 128), format, layout)
            METHODS[method](PrepareRequest(target, (item,), {}, parameters, "cpu", 512, {}))
        assert "torch" not in sys.modules
    """
    vectors = save({"w": np.ones(128, np.float32)})
    program = textwrap.dedent(program).replace("VECTORS", repr(vectors))
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path)
