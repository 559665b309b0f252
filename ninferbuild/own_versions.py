"""How this project's own helpers enter a fingerprint: by the versions of the bits they produce, not by their text.

Reformatting a module of this project must not make every user function run again; a rule, codec or decoder whose output
changes raises its version. Modules that produce no bits of a payload belong to configuring, not into a method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING

from ninferbuild.digest import digest_of
from ninferbuild.hazards import Hazard
from ninferbuild.origins import COMPATIBILITY_PACKAGES, is_within
from ninferbuild.sources.regions import RegionReader

if TYPE_CHECKING:
    from ninferbuild.sources.logical import LogicalSource

CAPTURED = Hazard(
    "it is an object of the build, and what it holds cannot be seen through",
    "take the numbers, names or arrays that the function needs out of it while configuring",
)

WRAPPED = Hazard(
    "it is read from the checkpoint, and its values do not enter the key of the function that wraps it",
    "write a method that transforms request.values(begin, end), and leave the parameter its own source",
)

_VALUES = ("AuxiliaryValue", "EncodedRows")
"""Classes outside of the artifact package whose instances are nothing but their fields."""

_RULES_BEHIND = {
    "ninferbuild.rules.groupwise": ("grouped_absmax",),
    "ninferbuild.rules.fp8_words": ("fp8_row_maxabs", "nvfp4_maxabs"),
    "ninferbuild.rules.nvfp4_words": ("nvfp4_maxabs",),
}
"""Helper module → names of the rules whose arithmetic it is."""

_INTERFACES = ("ninferbuild.method", "ninferbuild.rules.rule", *COMPATIBILITY_PACKAGES)
"""Modules that only carry values between a method and the build."""


@cache
def version_lines(module: str) -> tuple[str, ...] | None:
    """The facts about a module of this project; None when functions are not meant to use it while they run."""
    if any(is_within(module, name) for name in _INTERFACES):
        return ()
    if is_within(module, "ninferbuild.rules"):
        from ninferbuild.rules import BUILT_IN

        versions = {rule.name: rule.version for rule in BUILT_IN}
        names = _RULES_BEHIND.get(module, tuple(sorted(versions)))
        return tuple(f"rule {name} {versions[name]}" for name in names)
    if is_within(module, "ninferbuild.artifact"):
        from ninferbuild.artifact.layouts import CODEC_VERSIONS

        return tuple(f"codec {layout} {version}" for layout, version in sorted(CODEC_VERSIONS.items()))
    if is_within(module, "ninferbuild.sources"):
        from ninferbuild.sources.description import DECODER_VERSIONS
        from ninferbuild.sources.steps import STEP_VERSIONS

        decoders = tuple(f"decoder {name} {version}" for name, version in sorted(DECODER_VERSIONS.items()))
        return (*decoders, *(f"step {name} {version}" for name, version in sorted(STEP_VERSIONS.items())))
    return None


def instance_text(value: object, text: Callable[[object], str]) -> str | Hazard:
    """The text of an instance of one of this project's classes, or why a function must not capture it.

    Args:
        text: writes a part of the value.
    """
    from ninferbuild.rules.rule import Rule
    from ninferbuild.sources.logical import LogicalSource

    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Rule):
        return f"rule {value.name} {value.version}"
    if isinstance(value, LogicalSource):
        return _source_text(value, text)
    carries_values = is_within(kind.__module__, "ninferbuild.artifact") or kind.__qualname__ in _VALUES
    if carries_values and is_dataclass(value):
        parts = ", ".join(f"{item.name}: {text(getattr(value, item.name))}" for item in fields(value))
        return f"{name} ({parts})"
    return CAPTURED


def _source_text(source: LogicalSource, text: Callable[[object], str]) -> str | Hazard:
    """A source in memory by its bytes, a user's by its functions; a checkpoint's would have to be read."""
    try:
        description = source.description
    except (ValueError, OSError):
        return WRAPPED
    head = f"source {source.shape} {text(source.label)}"
    if description is None:
        readers = (source.read_values, source.read_encoded, source.weight_divisor, source.input_divisor)
        return f"{head} {text(readers)} {text(source.files)} {text(source.fingerprint)}"
    digests = []
    for part in description.parts:
        if any(span.file.path is not None for span in part.region.spans):
            return WRAPPED
        data = bytearray(part.region.length)
        RegionReader(part.region).read_into(memoryview(data))
        digests.append(f"{part.role} {part.row_bytes} {digest_of(data).hex()}")
    return (
        f"{head} {description.dtype} {description.decoder} {', '.join(digests)} {text(description.words)} "
        f"{text(description.steps)} {description.encoding} {description.stored_shape}"
    )
