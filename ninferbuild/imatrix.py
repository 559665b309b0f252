"""Importance matrices of llama.cpp, imported as the vectors that ``grouped_search`` weighs columns with.

``llama-imatrix`` keeps sums of squared activations for every matrix that it saw, under the names of GGUF tensors. What
is written here is the mean squared activation of each input channel, under the names of a Qwen3.5 text model's
parameters: one Safetensors file of float32 vectors ``[K]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninferbuild.publish import replace_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

MeanSquares = Callable[[str], "Vector | None"]
"""Name of a matrix (``blk.0.attn_q.weight``) → mean squared activation of its input channels; None where unknown."""

_ATTENTION = {
    "attention/query": "attn_q",
    "attention/gate": "attn_q",
    "attention/key": "attn_k",
    "attention/value": "attn_v",
    "attention/output": "attn_output",
}
_DELTA_NET = {
    "gdn/query": "attn_qkv",
    "gdn/key": "attn_qkv",
    "gdn/value": "attn_qkv",
    "gdn/z": "attn_gate",
    "gdn/output": "ssm_out",
}
_MLP = {"mlp/gate": "ffn_gate", "mlp/up": "ffn_up", "mlp/down": "ffn_down"}

TILED = "gdn/output"
"""The parameter whose input channels an exporter reorders: value heads of one key head no longer follow each other."""


@dataclass(frozen=True, slots=True)
class TextGeometry:
    """What the mapping needs of a text model's configuration.

    Attributes:
        layer_types: kind of each layer.
        key_heads, value_heads: of a delta net.
        value_dim: channels of one value head.
        hidden, attention, intermediate: channels of the residual stream, of the attention's output before its
            projection, and of the feed-forward; None where the configuration does not say.
    """

    layer_types: tuple[str, ...]
    key_heads: int
    value_heads: int
    value_dim: int
    hidden: int | None = None
    attention: int | None = None
    intermediate: int | None = None

    @classmethod
    def read(cls, path: Path) -> TextGeometry:
        """The geometry of a checkpoint's ``config.json``, or of its ``text_config`` where there is one.

        Raises:
            ValueError: not JSON, or a key is missing or has another type.
            OSError: the file cannot be read.
        """
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
        text = config.get("text_config", config) if isinstance(config, dict) else None
        if not isinstance(text, dict):
            raise ValueError(f"{path}: not the configuration of a model: it is no JSON object")
        kinds = _layer_types(path, text)
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise ValueError(f"{path}: layer_types must be a list with one string for each layer")
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
        key_heads, value_heads, value_dim = (_positive(path, text, name) for name in names)
        if value_heads % key_heads:
            raise ValueError(f"{path}: {value_heads} value heads are not shared evenly by {key_heads} key heads")
        hidden, intermediate, heads, head_dim = (
            _positive(path, text, name) if text.get(name) is not None else None
            for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        )
        attention = heads * head_dim if heads is not None and head_dim is not None else None
        return cls(tuple(kinds), key_heads, value_heads, value_dim, hidden, attention, intermediate)

    def parameters(self) -> Iterator[tuple[str, str, bool]]:
        """(parameter, matrix of the exporter, whether its channels are tiled) of every layer."""
        for layer, kind in enumerate(self.layer_types):
            for role, matrix in {**(_ATTENTION if kind == "full_attention" else _DELTA_NET), **_MLP}.items():
                yield f"text/layers/{layer}/{role}", f"blk.{layer}.{matrix}.weight", role == TILED

    def channels(self, parameter: str) -> int | None:
        """Input channels of a parameter; None where the configuration does not say."""
        role = "/".join(parameter.rsplit("/", 2)[-2:])
        known = {TILED: self.value_heads * self.value_dim, "attention/output": self.attention}
        return {**known, "mlp/down": self.intermediate}.get(role, self.hidden)

    def require_length(self, parameter: str, vector: Vector) -> None:
        """Raises ``ValueError`` when the vector has another length than the parameter has input channels."""
        channels = self.channels(parameter)
        if channels is not None and vector.shape != (channels,):
            raise ValueError(f"{len(vector)} values, and {parameter} has {channels} input channels")

    def untiled(self, vector: Vector) -> Vector:
        """Channels of a delta net's output in the order of the model: the value heads of one key head together.

        llama.cpp keeps them tiled: the first value head of each key head, then the second of each, and so on.

        Raises:
            ValueError: the vector has another length.
        """
        channels = self.value_heads * self.value_dim
        if vector.shape != (channels,):
            raise ValueError(
                f"cannot reorder {len(vector)} input channels as {self.value_heads} value heads of {self.value_dim}"
            )
        shared = self.value_heads // self.key_heads
        return vector.reshape(shared, self.key_heads, self.value_dim).swapaxes(0, 1).reshape(-1)


def _layer_types(path: Path, text: Mapping[str, Any]) -> Any:
    """``layer_types``; a configuration without it gives the number of layers instead, as a build reads it."""
    if "num_hidden_layers" not in text or text.get("layer_types") is not None:
        return _member(path, text, "layer_types")
    from ninferbuild.models.fields import positive
    from ninferbuild.models.qwen3_5.config import text_layer_types

    try:
        return text_layer_types(text, positive(text["num_hidden_layers"], "num_hidden_layers"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _member(path: Path, text: Mapping[str, Any], name: str) -> Any:
    if name not in text:
        raise ValueError(f"{path}: {name} is missing; give the config.json of the checkpoint")
    return text[name]


def _positive(path: Path, text: Mapping[str, Any], name: str) -> int:
    number = _member(path, text, name)
    if type(number) is not int or number <= 0:
        raise ValueError(f"{path}: {name} must be a positive integer, not {number!r}")
    return number


def import_matrix(source: Path, mean_squares: MeanSquares, config: Path, out: Path) -> int:
    """Write the vectors of a text model to ``out``, replacing what is there in one step.

    Args:
        source: the imported file; its name, without directories, becomes the ``source`` of the metadata.
        mean_squares: reads one matrix of it; see :mod:`ninferbuild.sources.llama_imatrix`.
        config: the checkpoint's ``config.json``.

    Returns:
        the number of parameters that were written.

    Raises:
        ValueError: nothing matches the model, or something that does is damaged or has another length. Nothing is
            written then.
        OSError: a file cannot be read or written.
    """
    geometry = TextGeometry.read(config)
    vectors: dict[str, Vector] = {}
    for parameter, matrix, tiled in geometry.parameters():
        vector = mean_squares(matrix)
        if vector is None:
            continue
        try:
            vectors[parameter] = geometry.untiled(vector) if tiled else vector
            geometry.require_length(parameter, vector)
        except ValueError as error:
            raise ValueError(f"{source}: {matrix}: {error}; is {config} the model's?") from error
    if not vectors:
        raise ValueError(f"{source}: no text-layer importance vectors matched; is {config} the model's?")
    replace_file(out, _safetensors(vectors, {"source": source.name}))
    return len(vectors)


def _safetensors(vectors: Mapping[str, Vector], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    pieces, end = [], 0
    for name, vector in vectors.items():
        pieces.append(vector.astype("<f4").tobytes())
        begin, end = end, end + len(pieces[-1])
        header[name] = {"dtype": "F32", "shape": [len(vector)], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def is_imported(path: Path) -> bool:
    """Whether the file at ``path`` is one that :func:`import_matrix` wrote, by its Safetensors header.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return False
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__")
            return list(metadata) == ["source"] and all(
                name.startswith("text/layers/") and item["dtype"] == "F32" and len(item["shape"]) == 1
                for name, item in header.items()
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False


def load(path: str | Path) -> dict[str, Any]:
    """All vectors of a file of importance vectors: parameter → float32 tensor ``[K]`` (torch).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or holds something else.
    """
    import torch

    from ninferbuild.rules.importance import ImportanceFile

    file = ImportanceFile(str(path))
    try:
        vectors = {name: file.vector(name) for name in file.names}
    finally:
        file.close()
    return {name: torch.from_numpy(vector) for name, vector in vectors.items()}
