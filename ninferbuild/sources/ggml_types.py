"""The tensor types of GGUF files: how many values a block holds and in how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ninferbuild.artifact.formats import GGUF_FORMATS


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type: ``id`` is its number in the file; ``format`` the format that keeps its blocks, if there is one."""

    id: int
    name: str
    block_values: int
    block_bytes: int
    format: str | None = None


F32 = GgmlType(0, "F32", 1, 4)
F16 = GgmlType(1, "F16", 1, 2)
BF16 = GgmlType(30, "BF16", 1, 2)
PQ2_0 = GgmlType(142, "PQ2_0", 128, 34)
PTQ1_0 = GgmlType(143, "PTQ1_0", 128, 28)

DIRECT_TYPES: dict[int, GgmlType] = {t.id: t for t in (F32, F16, BF16)}
"""Types whose blocks are single values."""

GGML_TYPES: dict[int, GgmlType] = {
    **DIRECT_TYPES,
    **{
        f.ggml_type: GgmlType(
            f.ggml_type, f.name.removeprefix("gguf_").upper(), f.block_elements, f.block_bytes, f.name
        )
        for f in GGUF_FORMATS.values()
    },
    **{t.id: t for t in (PQ2_0, PTQ1_0)},
}
"""Number in the file → type, for every type that can be read."""

_NAMES_ONLY = {
    3: "Q4_1",
    7: "Q5_1",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


def ggml_name(type_id: int) -> str:
    """ggml's name of a type, also of one that cannot be read; the number as text where it is unknown."""
    found = GGML_TYPES.get(type_id)
    return _NAMES_ONLY.get(type_id, str(type_id)) if found is None else found.name


OTHER_TYPES = {
    3: "Q4_1",
    7: "Q5_1",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Number in the file → what ggml calls it, for types that nothing here reads: messages say which they met."""


def type_label(type_id: int) -> str:
    """What messages call a type: ``ggml type 3 (Q4_1)``, without a name where it has none."""
    known = GGML_TYPES.get(type_id)
    name = OTHER_TYPES.get(type_id) if known is None else known.name
    return f"ggml type {type_id}" if name is None else f"ggml type {type_id} ({name})"
