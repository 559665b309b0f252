"""``--set`` and ``--assign``: settings of a target that hold for one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import tomllib
from typing import Any

from ninferbuild.target_schema import CACHE_KEYS, LIST_KEYS, TARGET_KEYS, Assign, OptionError, Origin, read_table


def parse_assign(text: str) -> Assign:
    """``SELECTOR=FORMAT[:METHOD]``; an empty format leaves the format as it is.

    Raises:
        UsageError: anything else.
    """
    selector, equals, choice = text.rpartition("=")
    format_name, colon, method = choice.partition(":")
    if not equals or not selector or not (format_name or method) or (colon and not method):
        raise OptionError(f"--assign {text!r}: write SELECTOR=FORMAT or SELECTOR=FORMAT:METHOD")
    return Assign((selector,), format=format_name or None, method=method or None, origin=f"--assign {text}")


def read_sets(sets: Sequence[str], origin: Origin) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``--set`` changes of the target and of ``[cache]``, checked."""
    changes: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"--set {text!r}: write KEY=VALUE")
        path = _key_path(key.strip(), origin)
        tree: Any = _set_value(value.strip(), path[0])
        for part in reversed(path):
            tree = {part: tree}
        changes = merge(changes, tree)
    cache = changes.pop("cache", {})
    if not isinstance(cache, Mapping):
        raise (origin / "cache").error("must be a table; set one of its keys, such as cache.max_size")
    read_table(changes, TARGET_KEYS, origin)
    read_table(cache, CACHE_KEYS, origin / "cache")
    return changes, dict(cache)


def _key_path(key: str, origin: Origin) -> list[str]:
    """Parts of a dotted key. A role or source name is one part, dots and all: ``resources.chat_template.jinja``."""
    head, dot, rest = key.partition(".")
    if dot and head in ("resources", "sources", "grafts") and rest[:1] not in ("'", '"'):
        return [head, rest]
    try:
        tree: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise (origin / key).error("not a key") from None
    path = []
    while isinstance(tree, dict):
        part, tree = next(iter(tree.items()))
        path.append(part)
    return path


def _set_value(text: str, key: str) -> object:
    """``text`` as a TOML value, or else as the string it is."""
    try:
        content = tomllib.loads(f"value = {text}")
        value = content["value"] if len(content) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    if not isinstance(value, bool | int | float | str | list | dict):  # a date: no key takes one
        value = text
    return value.split(",") if isinstance(value, str) and key in LIST_KEYS else value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``: tables merge, anything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
