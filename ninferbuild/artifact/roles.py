"""What the auxiliary tensors of uses must hold, by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninferbuild.artifact.directory import binding_parts
from ninferbuild.artifact.findings import Finding, Findings
from ninferbuild.artifact.formats import DirectFormat, get_format, valid_positive_fp32_word
from ninferbuild.artifact.layouts import HADAMARD_BLOCK
from ninferbuild.artifact.objects import TensorObject
from ninferbuild.artifact.primitives import ArtifactError
from ninferbuild.artifact.reader import Artifact


@dataclass(frozen=True, slots=True)
class Role:
    """What a role's tensor is.

    Attributes:
        format: of every element.
        scalar: one element; otherwise a vector with an element for each column of the parameter's matrix.
        dtype: of the words as numpy reads them.
        problem: what is wrong with the words, or None.
    """

    format: str
    scalar: bool
    dtype: str
    problem: Callable[[NDArray[Any]], str | None]


def _divisor(words: NDArray[Any]) -> str | None:
    word = int(words[0])
    return None if valid_positive_fp32_word(word) else f"word {word:#010x} is not finite and positive"


def _signs(words: NDArray[Any]) -> str | None:
    if len(words) % HADAMARD_BLOCK:
        return f"{len(words)} elements are not a multiple of {HADAMARD_BLOCK}"
    bad = np.flatnonzero((words != 0x3F80) & (words != 0xBF80))
    return f"element {bad[0]} (word {int(words[bad[0]]):#06x}) is neither +1 nor -1" if len(bad) else None


def _permutation(words: NDArray[Any]) -> str | None:
    outside = np.flatnonzero((words < 0) | (words >= len(words)))
    if len(outside):
        return f"element {outside[0]} ({int(words[outside[0]])}) is not in 0..{len(words) - 1}"
    absent = np.flatnonzero(np.bincount(words, minlength=len(words)) == 0)
    return f"no permutation: column {absent[0]} is missing" if len(absent) else None


ROLES: dict[str, Role] = {
    "activation_input_divisor": Role("fp32", True, "<u4", _divisor),
    "hadamard_signs": Role("bf16", False, "<u2", _signs),
    "input_columns": Role("int32", False, "<i4", _permutation),
}
"""Roles with a known content. A tensor of another role may hold anything."""


def check_auxiliaries(artifact: Artifact, findings: Findings, readable: Callable[[int, int], bool]) -> None:
    """Check the auxiliary tensors of all uses; one that several uses share is read once.

    Args:
        readable: whether the files that hold payload bytes ``[begin, end)`` can be read.
    """
    seen = set()
    for use in artifact.directory.uses:
        for name, binding in use.get("auxiliaries", {}).items():
            role = ROLES.get(name)
            if role is None:
                continue
            parts = binding_parts(binding, artifact.by_id)
            columns = _columns(artifact, use["parameter"])
            key = (name, parts, "object" in binding, columns)
            if key in seen:
                continue
            seen.add(key)
            problem = _problem(artifact, role, binding, columns, readable)
            if problem:
                label = f"{name} of {use['parameter']} × {use['input']}: {problem}"
                findings.add(Finding(label, object=parts[0][0]))


def _columns(artifact: Artifact, parameter: str) -> int | None:
    """Columns of the matrices a parameter is bound to; None if it is bound to something else."""
    parts = binding_parts(artifact.directory.bindings[parameter], artifact.by_id)
    shapes = {_tensor(artifact, identifier).shape for identifier in {part[0] for part in parts}}
    columns = {shape[-1] if len(shape) > 1 else None for shape in shapes}
    return columns.pop() if len(columns) == 1 else None


def _tensor(artifact: Artifact, identifier: str) -> TensorObject:
    item = artifact.by_id[identifier]
    assert isinstance(item, TensorObject)
    return item


def _problem(
    artifact: Artifact,
    role: Role,
    binding: Mapping[str, Any],
    columns: int | None,
    readable: Callable[[int, int], bool],
) -> str | None:
    parts = binding_parts(binding, artifact.by_id)
    count = sum(end - begin for _, begin, end in parts)
    shape = _tensor(artifact, parts[0][0]).shape if "object" in binding else (count,)
    formats = {_tensor(artifact, identifier).format for identifier, _, _ in parts}
    if formats != {role.format}:
        return f"must be {role.format}, not {', '.join(sorted(formats))}"
    if role.scalar:
        if count != 1:
            return f"must be one element, not shape {list(shape)}"
    elif shape != (columns,):
        wanted = "belongs to a matrix" if columns is None else f"must have shape [{columns}]"
        return f"{wanted}; its shape is {list(shape)}"
    words = _words(artifact, parts, readable)
    return None if words is None else role.problem(np.frombuffer(words, role.dtype))


def _words(
    artifact: Artifact, parts: tuple[tuple[str, int, int], ...], readable: Callable[[int, int], bool]
) -> bytes | None:
    """The stored words of the parts; None when a file or an object's encoding, reported elsewhere, is unusable."""
    data = []
    for identifier, begin, end in parts:
        item = _tensor(artifact, identifier)
        record = get_format(item.format)
        assert isinstance(record, DirectFormat)
        first, last = item.offset + begin * record.word_bytes, item.offset + end * record.word_bytes
        try:
            artifact.object(identifier)
            if not readable(first, last):
                return None
            data.append(artifact.read_range(first, last - first))
        except ArtifactError:
            return None
    return b"".join(data)
