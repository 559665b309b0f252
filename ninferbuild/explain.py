"""Why an action runs again, in words: the difference between two manifests as lines for a person.

Everything here is text in, text out. Which manifest belongs to the last build is found by
:mod:`ninferbuild.history`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import re

from ninferbuild.manifest import difference

NAMES_SHOWN = 4
"""Parameters that one line names before it says how many more there are."""

VALUE_SHOWN = 60
"""Characters up to which two values are shown side by side; longer ones have merely changed."""

_DIGEST = re.compile(r"[0-9a-f]{32,}")
_DESCRIBED = re.compile(r"(?P<dtype>\S+) (?P<shape>\[.*\]) (?P<decoder>\S+ v\d+)")
_NUMBERED = re.compile(r"(?P<group>.+)\.\d{4}")
_METHOD = re.compile(r"(?P<name>.+) v(?P<version>\d+)")

Fact = tuple[str, str | None, str | None]
"""(name, old value, new value) of a fact that differs; None where one side lacks it."""

USERS_FUNCTION = "a function of the recipe"

NOT_HASHED = "source not hashed yet"
"""How the line begins that names inputs whose bytes are not known."""


def changes(old: str, new: str, names: Sequence[str]) -> list[str]:
    """What changed from the manifest ``old`` to the manifest ``new``, one line a change.

    Args:
        new: may lack digests, ``16384 bytes`` in place of ``16384 bytes 0f3c…``: the lines say what is not known.
        names: parameters of the inputs, in order.

    Returns:
        no line exactly when the texts are equal, but for what makes an uncacheable action unlike itself.
    """
    facts = [fact for fact in difference(old, new) if fact[0] != "uncacheable"]
    own = [fact for fact in facts if not fact[0].startswith("input.") and not _is_code(fact[0])]
    inputs = [fact for fact in facts if fact[0].startswith("input.") and not _is_code(fact[0])]
    lines: list[str] = []
    method = next((fact for fact in own if fact[0] == "method"), None)
    handed_over = method is not None and None in method[1:]
    if method is not None:
        lines.append(_method(*method[1:]))
    lines += _of_target(own)
    lines += _of_parameters(own)
    lines += _of_inputs(inputs, names, users=not handed_over)
    if not handed_over:  # everything about one of the two functions would be new
        lines += _of_surroundings(own)
        lines += code_changes(_code_lines(old), _code_lines(new))
    return lines


def listed(names: Iterable[str]) -> str:
    """Names separated by commas; after some of them only how many more."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - NAMES_SHOWN} more" if len(every) > NAMES_SHOWN else ""
    return ", ".join(every[:NAMES_SHOWN]) + more


def change(name: str, old: str | None, new: str | None) -> str:
    """One changed value: ``name: old → new`` where both are short enough to be read."""
    if old is not None and new is not None and not (_readable(old) and _readable(new)):
        return f"{name} changed"
    return f"{name}: {_shown(old)} → {_shown(new)}"


def _readable(value: str) -> bool:
    return len(value) <= VALUE_SHOWN and not _DIGEST.search(value)


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    return value if _readable(value) else "…"


# The action as a whole


def _method(old: str | None, new: str | None) -> str:
    before, after = (_METHOD.fullmatch(value) if value is not None else None for value in (old, new))
    if before and after and before["name"] == after["name"]:
        return f"{after['name']} v{before['version']} → v{after['version']}"
    return change("method", *(match["name"] if match else USERS_FUNCTION for match in (before, after)))


def _of_target(facts: Sequence[Fact]) -> Iterator[str]:
    changed = {name: (old, new) for name, old, new in facts}
    for name in ("format", "layout", "shape", "divisors"):
        if name in changed:
            yield change(name, *changed[name])
    if "codec" in changed and "layout" not in changed:
        yield change("layout codec", *changed["codec"])
    if "manifest" in changed:
        yield change("manifest", *changed["manifest"])


def _of_parameters(facts: Sequence[Fact]) -> Iterator[str]:
    for name, old, new in facts:
        if name.startswith("parameter."):
            yield change(f"parameter {name.removeprefix('parameter.')}", old, new)
    # A fact of a rule names itself; its number in the manifest only keeps several apart.
    before = dict(old.partition(": ")[::2] for name, old, _ in facts if name.startswith("fact.") and old is not None)
    after = dict(new.partition(": ")[::2] for name, _, new in facts if name.startswith("fact.") and new is not None)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield change(name, before.get(name), after.get(name))


def _of_surroundings(facts: Sequence[Fact]) -> Iterator[str]:
    for name, old, new in facts:
        if name in ("python", "torch", "numpy", "device", "rows per chunk"):
            yield change(name, old, new)


# Inputs


def _of_inputs(facts: Sequence[Fact], names: Sequence[str], *, users: bool) -> list[str]:
    """Lines about inputs: equal changes of several parameters are one line.

    Args:
        users: say also what only one of the manifests holds, as is the case with everything that only a user's
            function sees.
    """
    found: dict[str, list[str]] = {}
    roles: dict[int, dict[str, bool]] = {}
    for fact, old, new in facts:
        _, number, *rest = fact.split(".")
        index = int(number)
        name = names[index] if index < len(names) else f"input {index}"
        if rest and rest[0] in _SLOTS:
            roles.setdefault(index, {})[rest[0]] = _is_known(old, new)
            continue
        for aspect in _aspects(rest, old, new, users):
            found.setdefault(aspect, []).append(name)
    for index, slots in roles.items():
        name = names[index] if index < len(names) else f"input {index}"
        known = [role for role, is_known in slots.items() if is_known]
        if known:
            only = f" ({known[0]})" if len(known) == 1 and known != ["values"] else ""
            found.setdefault(f"source bytes changed{only}", []).append(name)
        else:
            found.setdefault(NOT_HASHED, []).append(name)
    return [f"{aspect}: {listed(parameters)}" for aspect, parameters in found.items()]


_SLOTS = ("values", "codes", "scales")


def _is_known(old: str | None, new: str | None) -> bool:
    """Whether two values of a slot, ``AMOUNT UNIT [DIGEST]``, certainly belong to different bytes."""
    if old is None or new is None:
        return True
    before, after = old.split(" "), new.split(" ")
    return before[:2] != after[:2] or len(before) == len(after) == 3


def _aspects(rest: Sequence[str], old: str | None, new: str | None, users: bool) -> Iterator[str]:
    if not rest:
        yield from _description_changes(old, new)
    elif rest[0] in ("step", "stored"):
        yield "transformation of the source changed"
    elif users or (old is not None and new is not None):
        yield change(_WORDS_OF_USERS.get(rest[0], ".".join(rest).replace("_", " ")), old, new)


_WORDS_OF_USERS = {
    "parameter": "parameter name",
    "label": "label of the source",
    "use": "use",
    "override": "auxiliary override",
    "fingerprint": "fingerprint= of the source",
    "file": "file of the source",
}


def _description_changes(old: str | None, new: str | None) -> Iterator[str]:
    before, after = (_DESCRIBED.fullmatch(value) if value is not None else None for value in (old, new))
    if before is None or after is None:
        if before is None and after is None:
            yield change("source", old, new)
        else:
            yield "source now read by a function" if after is None else "source no longer read by a function"
        return
    for part, word in (("dtype", "source type"), ("shape", "source shape"), ("decoder", "decoder")):
        if before[part] != after[part]:
            yield change(word, before[part], after[part])


# Code of users


def _is_code(name: str) -> bool:
    numbered = _NUMBERED.fullmatch(name)
    return numbered is not None and numbered["group"].rpartition(".")[2] in ("code", "read_values", "read_encoded")


def _code_lines(manifest: str) -> set[str]:
    facts = (line.partition(": ") for line in manifest.split("\n"))
    return {value for name, _, value in facts if _is_code(name)}


def code_changes(old: Iterable[str], new: Iterable[str]) -> list[str]:
    """What changed between the lines of two fingerprints.

    Where the code of a function changed, what it reaches for the first time or no longer is part of that change and
    gets no line.
    """
    before, after = (dict(map(_code_fact, lines)) for lines in (old, new))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        ours, theirs = before.get(name), after.get(name)
        if ours == theirs or name in _CONSEQUENCES:
            continue
        lines.append((ours is None or theirs is None, _code_change(name, ours, theirs)))
    edits = [line for one_sided, line in lines if not one_sided]
    return edits or [line for _, line in lines]


_CONSEQUENCES = frozenset({"subject"})


def _code_fact(line: str) -> tuple[str, str]:
    """A line of a fingerprint as (what it is about, what it says)."""
    name, equals, value = line.partition(" = ")
    if equals:
        return name, value
    kind, _, rest = line.partition(" ")
    if kind in ("package", "own"):
        thing, _, version = rest.partition(" ")
        return f"{kind} {thing}", version
    return kind, rest


def _code_change(name: str, old: str | None, new: str | None) -> str:
    for pattern, spell in _CODE_WORDING:
        if match := pattern.fullmatch(name):
            return spell(match, old, new)
    return _reached(name, old, new)


def _reached(name: str, old: str | None, new: str | None) -> str:
    if old is None:
        return f"now depends on {name}"
    if new is None:
        return f"no longer depends on {name}"
    return change(name, old, new)


def _of_code(match: re.Match[str], old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return _reached(match[1], old, new)
    return f"code of {match[1]} changed"


def _of_part(match: re.Match[str], old: str | None, new: str | None) -> str:
    words = {"default": "default of", "closure": "closure variable", "attribute": "attribute"}
    return change(f"{words.get(match[2], match[2])} {match[3]} in {match[1]}", old, new)


def _of_package(match: re.Match[str], old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return _reached(match[0], old, new)
    before, after = old.partition(" ")[0], new.partition(" ")[0]
    return f"files of {match[0]} {after} changed" if before == after else change(match[0], before, after)


_Wording = Callable[[re.Match[str], str | None, str | None], str]

_CODE_WORDING: tuple[tuple[re.Pattern[str], _Wording], ...] = (
    (re.compile(r"(\S+) code"), _of_code),
    (re.compile(r"(\S+) (default|closure|attribute|annotation) (\S+)"), _of_part),
    (re.compile(r"global (\S+)"), lambda match, old, new: _reached(match[1], old, new)),
    (re.compile(r"package (\S+)"), _of_package),
)
