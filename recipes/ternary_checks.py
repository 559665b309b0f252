"""Is a GGUF file the ternary export of a rotated Qwen3.5 hybrid? Everything is asked before anything is encoded."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.layouts import HADAMARD_BLOCK
from ninferbuild.method import AuxiliaryValue
from ninferbuild.recipes.gguf_checks import header_of, require_header, require_negative, require_tensors
from ninferbuild.recipes.gguf_tensors import Kind, block_prefix, text_tensors
from ninferbuild.sources.ggml_types import BF16, F32, PQ2_0

if TYPE_CHECKING:
    from ninferbuild.recipes.gguf_geometry import Geometry
    from ninferbuild.sources.gguf import GGUFFile

TOKEN_TABLE = "token_embd.weight"

_ROTATION = "prism.hadamard."
_TRANSFORM: dict[str, Any] = {
    "version": 1,
    "block_size": HADAMARD_BLOCK,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
    "gdn_v_grouped": True,
}
"""Which rotation the runtime undoes: the input columns of the delta net's output matrix are in grouped order before it,
all other matrices as exporters write them."""

_LISTED = 8
"""Elements of the longest array that a message shows."""

_TYPES = {Kind.MATRIX: (PQ2_0.id,), Kind.VECTOR: (F32.id,), Kind.CONTROL: (BF16.id,)}


def sign_widths(geometry: Geometry) -> tuple[int, ...]:
    """Input widths of the rotated matrices, in the order in which the file holds their signs."""
    assert isinstance(geometry.feed_forward, int)
    return tuple(dict.fromkeys((geometry.hidden, geometry.value_dim, geometry.query_rows, geometry.feed_forward)))


def check_export(gguf: GGUFFile, geometry: Geometry) -> dict[int, AuxiliaryValue]:
    """Hold the file to the geometry, the rotation, and the names, shapes and types of its tensors.

    Returns:
        input width → signs of the rotated matrices of this width.

    Raises:
        ValueError: the file is not the whole ternary export of such a model; the message begins with its path.
    """
    require_header(gguf, _header(geometry))
    signs = _signs(gguf, sign_widths(geometry))
    tensors = text_tensors(geometry)
    rotated = {name for name, (_, kind) in tensors.items() if kind is Kind.MATRIX} - {TOKEN_TABLE}
    _require_rotated(gguf, rotated)
    require_tensors(gguf, tensors, _TYPES)
    for layer in range(geometry.layers):
        if not geometry.full_attention(layer):
            require_negative(gguf, f"{block_prefix(layer)}ssm_a")
    return signs


def _header(geometry: Geometry) -> dict[str, Any]:
    expected = header_of(geometry)
    architecture = expected.pop("general.architecture")
    first = {"general.architecture": architecture, f"{architecture}.block_count": geometry.layers}
    return first | expected | {_ROTATION + key: value for key, value in _TRANSFORM.items()}


def _signs(gguf: GGUFFile, widths: tuple[int, ...]) -> dict[int, AuxiliaryValue]:
    found = gguf.kv.get(_ROTATION + "sign_widths")
    if not isinstance(found, list) or tuple(found) != widths:
        raise ValueError(f"{gguf.path}: sign widths {_shown(found)}, expected {widths}")
    values = gguf.kv.get(_ROTATION + "sign_values")
    required = f"{gguf.path}: sign values must be {sum(widths)} entries of +-1"
    if not isinstance(values, list) or len(values) != sum(widths):
        raise ValueError(f"{required}, not {_shown(values)}")
    wrong = next((index for index, value in enumerate(values) if value not in (1, -1)), None)
    if wrong is not None:
        raise ValueError(f"{required}; entry {wrong} is {values[wrong]!r}")
    ends = accumulate(widths)
    return {
        width: AuxiliaryValue.hadamard_signs(values[end - width : end]) for width, end in zip(widths, ends, strict=True)
    }


def _require_rotated(gguf: GGUFFile, expected: set[str]) -> None:
    rotated, restored = (gguf.kv.get(f"{_ROTATION}{key}_names") for key in ("weight", "inverse_weight"))
    found = {name for name in rotated if isinstance(name, str)} if isinstance(rotated, list) else set()
    if found != expected:
        example = min(found ^ expected)
        state = "is not listed" if example in expected else "is listed"
        raise ValueError(
            f"{gguf.path}: the rotated tensor set differs from the registered one: {example} {state} in "
            f"{_ROTATION}weight_names"
        )
    if restored != [TOKEN_TABLE]:
        raise ValueError(
            f"{gguf.path}: only {TOKEN_TABLE} may be stored inverse-rotated, but {_ROTATION}inverse_weight_names is "
            f"{_shown(restored)}"
        )


def _shown(value: Any) -> str:
    """A value of the header for a message."""
    if not isinstance(value, list):
        return repr(value)
    return repr(tuple(value)) if len(value) <= _LISTED else f"an array of {len(value)}"
