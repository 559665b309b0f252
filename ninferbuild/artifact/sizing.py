"""How a directory and its payload are divided into files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from typing import Any

from ninferbuild.artifact.directory import Directory, parse_directory
from ninferbuild.artifact.framing import HEADER, PAYLOAD_ALIGNMENT, part_name
from ninferbuild.artifact.json_text import encode_json
from ninferbuild.artifact.layouts import align_up
from ninferbuild.artifact.primitives import ArtifactError, check_id, check_positive

_MEMBERS = ("components", "objects", "bindings", "uses", "metadata", "provenance")
_SCALARS = frozenset({str, int, float, bool, type(None)})
_DEFAULTS: dict[str, Any] = {"uses": [], "metadata": {}, "provenance": {}}


def layout_directory(
    entry_name: str,
    description: Mapping[str, Any],
    payload_bytes: int,
    *,
    max_file_bytes: int | None = None,
) -> tuple[Directory, bytes, int]:
    """Size the JSON region and the payload segments, and check the finished directory.

    Args:
        entry_name: file name of the entry, from which part names are made.
        description: JSON values of ``components``, ``objects``, ``bindings`` and, optionally, ``uses``, ``metadata``
            and ``provenance``. They are copied.
        payload_bytes: length of the logical payload.
        max_file_bytes: the most bytes of one file, framing included; None for a single file of any size.

    Returns:
        the directory; its text, padded with spaces to the length of the JSON region; the offset of the payload in the
        entry.

    Raises:
        ArtifactError: the limit is too small, or the description is invalid or not serialisable.
    """
    check_id(entry_name, "entry name")
    check_positive(payload_bytes, "payload bytes")
    if max_file_bytes is not None:
        check_positive(max_file_bytes, "maximum file bytes")
    extra = description.keys() - set(_MEMBERS)
    if extra:
        raise ArtifactError(f"directory: unknown member {min(extra, key=str)!a}")
    given = {**_DEFAULTS, **description}
    try:
        root = {name: _snapshot(given[name]) for name in _MEMBERS if name in given}
    except RecursionError as error:
        raise ArtifactError("directory: the description is nested too deeply or contains itself") from error

    files, text, start = divide(entry_name, [encode_json(root)[:-1]], payload_bytes, max_file_bytes)
    directory = parse_directory({**root, "files": files}, entry_name=entry_name)
    return directory, text, start


def divide(
    entry_name: str, head: Sequence[bytes], payload_bytes: int, max_file_bytes: int | None
) -> tuple[list[dict[str, Any]], bytes, int]:
    """Divide a payload into files, given the JSON text of a directory up to ``files``.

    Args:
        head: pieces of the text, which may be many megabytes and are copied once.

    Returns:
        the records of ``files``; the whole directory's text, padded to the length of the JSON region; the offset of
        the payload in the entry.

    Raises:
        ArtifactError: the limit is too small.
    """
    size = sum(map(len, head))

    def tail(files: list[dict[str, Any]]) -> bytes:
        return b',"files":%s}' % encode_json(files)

    reserve = _reserve(size + len(tail([{"path": None, "payload_bytes": payload_bytes}])))
    while True:
        start = HEADER.size + reserve
        files = _segments(entry_name, payload_bytes, start, max_file_bytes)
        end = tail(files)
        if size + len(end) <= reserve:
            return files, b"".join([*head, end.ljust(reserve - size)]), start
        reserve = _reserve(size + len(end))


def _reserve(text_bytes: int) -> int:
    return align_up(HEADER.size + text_bytes, PAYLOAD_ALIGNMENT) - HEADER.size


def _segments(entry_name: str, payload_bytes: int, start: int, limit: int | None) -> list[dict[str, Any]]:
    if limit is not None and start >= limit:
        raise ArtifactError(
            f"maximum file bytes {limit} cannot hold the directory and payload: the directory takes {start}; "
            "allow larger files"
        )
    if limit is None or start + payload_bytes <= limit:
        return [{"path": None, "payload_bytes": payload_bytes}]
    entry_capacity, part_capacity = (
        (limit - used) // PAYLOAD_ALIGNMENT * PAYLOAD_ALIGNMENT for used in (start, PAYLOAD_ALIGNMENT)
    )
    if entry_capacity <= 0 or part_capacity <= 0:
        raise ArtifactError(f"maximum file bytes {limit} cannot hold one aligned segment after {start} of framing")
    files: list[dict[str, Any]] = [{"path": None, "payload_bytes": entry_capacity}]
    remaining = payload_bytes - entry_capacity
    while remaining:
        size = min(remaining, part_capacity)
        files.append({"path": part_name(entry_name, len(files)), "payload_bytes": size})
        remaining -= size
    return files


def _snapshot(value: Any) -> Any:
    """A copy that shares no container with ``value``; member names become what JSON makes of them.

    Raises:
        ArtifactError: two members of one object have the same name in JSON, or a name that JSON cannot have.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, dict):
        copy = {name if isinstance(name, str) else _name(name): _snapshot(item) for name, item in value.items()}
        if len(copy) != len(value):
            raise ArtifactError("directory: two members of one object have the same name in JSON")
        return copy
    if isinstance(value, list):
        return [_snapshot(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_snapshot(item) for item in value)
    return value


def _name(key: Any) -> str:
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise ArtifactError(f"directory: {key!a} cannot be a member name")
