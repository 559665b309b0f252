"""The JSON header of a Safetensors file."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: ``data_offsets`` are relative to the data section."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _Member(msgspec.Struct, gc=False):
    """Any member of the header: ``__metadata__`` has none of these, a tensor all."""

    dtype: str | None = None
    shape: tuple[Count, ...] | None = None
    data_offsets: tuple[Count, Count] | None = None


def parse_header(raw: bytes, data_bytes: int, path: str) -> dict[str, Entry]:
    """Tensor name → entry, in file order; ``__metadata__`` is dropped.

    Args:
        raw: the JSON text.
        data_bytes: size of the data section.
        path: names the file in messages.

    Raises:
        ValueError: not a JSON object of tensors, a name that occurs twice, or ranges outside the data section
            or over each other.
    """
    members = _decode(raw, path)
    if raw.count(b'"data_offsets"') != sum(member.data_offsets is not None for member in members.values()):
        _require_unique(raw, path)
    entries = {}
    for name, member in members.items():
        if name == "__metadata__":
            continue
        if member.dtype is None or member.shape is None or member.data_offsets is None:
            raise ValueError(f"{path}: corrupt Safetensors header: {name!r} lacks dtype, shape or data_offsets")
        entries[name] = Entry(member.dtype, member.shape, member.data_offsets)
    _require_disjoint(entries, data_bytes, path)
    return entries


def _decode(raw: bytes, path: str) -> dict[str, _Member]:
    try:
        try:
            return msgspec.json.decode(raw, type=dict[str, _Member])
        except msgspec.ValidationError:  # perhaps only metadata with a key like "shape"
            members = msgspec.json.decode(raw)
            if isinstance(members, dict):
                members.pop("__metadata__", None)
            return msgspec.convert(members, type=dict[str, _Member])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: corrupt Safetensors header: {error}") from error


def _require_unique(raw: bytes, path: str) -> None:
    """The decoder keeps the last of two members with one name; here that is an error."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: corrupt Safetensors header: duplicate name {twice!r}")
        return members

    json.loads(raw, object_pairs_hook=unique)


def _require_disjoint(entries: dict[str, Entry], data_bytes: int, path: str) -> None:
    previous, reached = "", 0
    for begin, end, name in sorted((*entry.data_offsets, name) for name, entry in entries.items()):
        if begin > end or end > data_bytes:
            raise ValueError(
                f"{path}: invalid source range [{begin}, {end}) of {name!r} in {data_bytes} data bytes; "
                "the file is truncated or corrupt"
            )
        if begin < reached and begin < end:
            raise ValueError(f"{path}: corrupt Safetensors header: {name!r} and {previous!r} are overlapping")
        if end > reached:
            previous, reached = name, end
