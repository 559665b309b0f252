"""Where the Vision parameters of a GGUF recipe come from: an mmproj file, or a Safetensors checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MMPROJ = {"general.architecture": "clip", "clip.projector_type": "qwen3vl_merger"}
"""Keys of the header that, where a file has them, must have these values."""


def vision_store(source: Any, config: Mapping[str, Any]) -> Any:
    """``source`` under the tensor names of the checkpoint.

    Args:
        source: what ``--source vision`` opened.
        config: of the vision component.

    Raises:
        ValueError: a GGUF file is none of this vision encoder.
    """
    from ninferbuild.sources.gguf_source import GGUFSource, HFAliasSource, qwen35_vision_name_map

    if not isinstance(source, GGUFSource):
        return source
    header = source.metadata()
    for key, expected in _MMPROJ.items():
        if header.get(key, expected) != expected:
            raise ValueError(
                f"{source.path}: {key} = {header[key]!r}, expected {expected!r}; --source vision takes the mmproj "
                "file of the model, or a Safetensors checkpoint"
            )
    names, transforms, shapes, composites = qwen35_vision_name_map(
        config["depth"],
        hidden_size=config["hidden_size"],
        temporal_patch_size=config["temporal_patch_size"],
        patch_size=config["patch_size"],
    )
    return HFAliasSource(source, names, transforms=transforms, shapes=shapes, composites=composites)
