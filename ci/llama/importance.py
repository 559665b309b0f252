"""Comparing what ``ninferbuild imatrix`` makes of a measured importance matrix with what the file says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fixtures import gguf_export
import numpy as np

from llama import checkpoint
from llama.checkpoint import Checkpoint
from llama.command import ninferbuild
from llama.reference import Reference, Values, equal, nearly_equal

_ATTENTION = {"query": "attn_q", "gate": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
_DELTA_NET = {"query": "attn_qkv", "key": "attn_qkv", "value": "attn_qkv", "z": "attn_gate", "output": "ssm_out"}
_MLP = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def differences(path: Path, measured: Reference, saved: Checkpoint) -> Iterator[str]:
    """Import ``path``; a line for each vector that is not the one of the GGUF form, ``measured``.

    The older form holds averages in place of sums, so that its vectors may differ in the last places.
    """
    from safetensors.numpy import load_file

    exact, out = path.suffix == ".gguf", path.with_name("imatrix.safetensors")
    config = saved.directory / "config.json"
    failed = ninferbuild("imatrix", f"--{path.suffix[1:]}", str(path), "--config", str(config), "--out", str(out), "-q")
    if failed is not None:
        yield failed
        return
    found, expected = load_file(out), dict(_expected(measured))
    if found.keys() != expected.keys():
        yield f"parameters: {', '.join(sorted(found.keys() ^ expected.keys()))}"
    for name in sorted(found.keys() & expected.keys()):
        values = found[name]
        if name.endswith("gdn/output"):
            projection = f"model.language_model.layers.{name.split('/')[2]}.linear_attn.out_proj.weight"
            values = gguf_export.text_tensor(projection, values[None], checkpoint.TEXT)[1][0]
        if not (equal if exact else nearly_equal)(values, expected[name]):
            yield f"{name}: importance"


def _expected(measured: Reference) -> Iterator[tuple[str, Values]]:
    """Parameter → mean squared activation of the input channels, in the order of the file."""
    for layer, kind in enumerate(checkpoint.TEXT["layer_types"]):
        mixer = ("attention", _ATTENTION) if kind == "full_attention" else ("gdn", _DELTA_NET)
        for prefix, matrices in (mixer, ("mlp", _MLP)):
            for name, matrix in matrices.items():
                sums, counts = (
                    measured.values(f"blk.{layer}.{matrix}.weight.{part}").reshape(-1) for part in ("in_sum2", "counts")
                )
                yield f"text/layers/{layer}/{prefix}/{name}", (sums / counts[0]).astype(np.float32)
