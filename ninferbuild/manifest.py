"""The manifest of an action: the canonical text of everything its bytes depend on.

One function writes it, its hash is the key, and the text is kept beside the result: the difference between two
manifests is the exact answer to "why did this run again?". Lines are ``name: value``, sorted, one fact a line.

A *template* is a manifest in which the digests of the inputs are still open. Filled with digests it is the manifest;
filled with byte counts it is the stem of the probe, by which a build recognises without reading much that a cached
result cannot exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import msgspec
import xxhash

from ninferbuild.artifact.layouts import CODEC_VERSIONS
from ninferbuild.canonical import canonical
from ninferbuild.sources.description import DECODER_VERSIONS, Description
from ninferbuild.sources.steps import STEP_VERSIONS

if TYPE_CHECKING:
    from ninferbuild.plan import Parent
    from ninferbuild.sources.logical import LogicalSource

MANIFEST_VERSION = 1
"""Part of every manifest; changes when the text changes for unchanged inputs."""


class Slot(msgspec.Struct, frozen=True):
    """An open digest of a template: the line's name and how much will be digested (``16384 bytes``)."""

    line: str
    amount: str


class Template(msgspec.Struct, frozen=True):
    """A manifest whose digests are open.

    Attributes:
        lines: the settled lines, ``name: value``.
        slots: one for each region, in the order in which regions are consumed.
    """

    lines: tuple[str, ...]
    slots: tuple[Slot, ...]

    def fill(self, digests: Sequence[bytes]) -> str:
        """The manifest text."""
        if len(digests) != len(self.slots):
            raise ValueError(f"{len(self.slots)} digests expected, {len(digests)} given")
        filled = (f"{slot.line}: {slot.amount} {d.hex()}" for slot, d in zip(self.slots, digests, strict=True))
        return _text((*self.lines, *filled))

    def fill_known(self, digests: Sequence[bytes | None]) -> str:
        """The text with the digests that are known, and byte counts alone in place of the others."""
        filled = (
            f"{slot.line}: {slot.amount}" + (f" {digest.hex()}" if digest is not None else "")
            for slot, digest in zip(self.slots, digests, strict=True)
        )
        return _text((*self.lines, *filled))

    def stem(self) -> str:
        """The text with byte counts in place of digests."""
        return _text((*self.lines, *(f"{slot.line}: {slot.amount}" for slot in self.slots)))


def _text(lines: Iterable[str]) -> str:
    return "\n".join(sorted(lines)) + "\n"


def key_of(manifest: str) -> bytes:
    """The key of an action: ``xxh3_128`` of its manifest, 16 bytes."""
    return xxhash.xxh3_128_digest(manifest.encode())


def template(parent: Parent, extra: Iterable[str] = ()) -> Template:
    """The template of one parent.

    ``extra`` are the lines of a user's function (see :mod:`ninferbuild.user_actions`); a built-in method has none, and
    nothing in its lines depends on names, paths, policies, devices or versions of other software.
    """
    request = parent.request
    target = request.target
    lines = [
        f"manifest: v{MANIFEST_VERSION}",
        f"codec: {target.layout} v{CODEC_VERSIONS[target.layout]}",
        f"format: {target.format}",
        f"layout: {target.layout}",
        f"shape: {_shape(target.shape)}",
        f"divisors: {target.divisors}",
    ]
    if parent.rule is not None:
        lines.append(f"method: {parent.rule.name} v{parent.rule.version}")
        if parent.checked is not None:
            lines += [f"fact.{index:03}: {fact}" for index, fact in enumerate(parent.checked.facts)]
    if request.parameters:
        # What a rule looks up by name enters through its facts; its parameters may hold paths.
        shown = parent.rule.keyed_parameters(request.parameters) if parent.rule is not None else request.parameters
        lines += [f"parameter{_parameter(name)}: {canonical(value)}" for name, value in shown.items()]
    slots: list[Slot] = []
    for index, item in enumerate(request.inputs):
        described = item.source.description
        if described is not None and parent.rule is not None and described.is_one_region:
            part, decoder = described.parts[0], described.decoder
            version, length = DECODER_VERSIONS[decoder], part.region.length
            line, slot = _stored(index, described.dtype, described.shape, decoder, version, part.role, length)
            lines.append(line)
            slots.append(slot)
            continue
        name = f"input.{index:05}"
        if described is None:
            lines.append(f"{name}: {_shape(item.source.shape)} read by a function")
            if not declares_content(item.source):
                slots.append(Slot(f"{name}.values", f"{prod(item.source.shape)} values"))
        else:
            _described(name, described, lines, slots)
        if parent.rule is None:
            # A rule turns divisors into auxiliaries, which are never cached; a user's function may do anything.
            lines.append(f"{name}.weight divisor: {_scalar(item.source.weight_divisor)}")
            lines.append(f"{name}.input divisor: {_scalar(item.source.input_divisor)}")
    lines += extra
    return Template(tuple(lines), tuple(slots))


def _parameter(name: object) -> str:
    """A parameter's name in its line; names that are no plain text (1, "a\\nb") are told apart from those that are."""
    return f".{name}" if isinstance(name, str) and name.isprintable() else f" ({canonical(name)})"


def _scalar(accessor: Callable[[], bytes] | None) -> str:
    try:
        return accessor().hex() if accessor is not None else "none"
    except (ValueError, OSError) as error:  # the source offers none; the function would be told so
        return f"none: {type(error).__name__}"


def declares_content(source: LogicalSource) -> bool:
    """Whether a source with a reader of its own says what stands for its values when keys are made."""
    return source.fingerprint is not None or source.files is not None


@lru_cache(maxsize=1 << 14)
def _stored(
    index: int, dtype: str, shape: tuple[int, ...], decoder: str, version: int, role: str, length: int
) -> tuple[str, Slot]:
    """The line and the slot of an input that is one region and nothing more, as those of every layer's experts are."""
    name = f"input.{index:05}"
    return f"{name}: {dtype} {_shape(shape)} {decoder} v{version}", Slot(f"{name}.{role}", f"{length} bytes")


def _described(name: str, described: Description, lines: list[str], slots: list[Slot]) -> None:
    version = DECODER_VERSIONS[described.decoder]
    lines.append(f"{name}: {described.dtype} {_shape(described.shape)} {described.decoder} v{version}")
    for number, step in enumerate(described.steps):
        version = STEP_VERSIONS[step[0]]
        later = f" v{version}" if version > 1 else ""  # a first version was never written, and lines stay as they were
        lines.append(f"{name}.step.{number}: {canonical(step)}{later}")
    if described.steps:
        lines.append(f"{name}.stored: {_shape(described.stored_shape)}")
    if described.positions:
        lines.append(f"{name}.positions: {canonical(described.positions)}")
    lines += [f"{name}.{word}: {data.hex()}" for word, data in described.words]
    slots += [Slot(f"{name}.{part.role}", f"{part.region.length} bytes") for part in described.parts]


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def parse(manifest: str) -> dict[str, str]:
    """A manifest's facts by name; several facts of one name are one, separated by semicolons."""
    facts: dict[str, str] = {}
    for line in manifest.rstrip("\n").split("\n"):
        name, _, value = line.partition(": ")
        facts[name] = f"{facts[name]}; {value}" if name in facts else value
    return facts


def difference(old: str, new: str) -> list[tuple[str, str | None, str | None]]:
    """The facts in which two manifests differ, as (name, old value, new value); None where one lacks the fact."""
    before: Mapping[str, str] = parse(old)
    after: Mapping[str, str] = parse(new)
    names = sorted(before.keys() | after.keys())
    return [(name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)]
