"""The table of methods: built-in rules, and what other distributions register."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ninferbuild.rules.rule import Rule

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ninferbuild.method import Method

GROUP = "ninferbuild.rules"
"""Entry point group. An entry's name is the method's name, its value a :class:`Rule` instance or a plain method."""


class MethodTable(Mapping[str, "Method"]):
    """Method name → method.

    Built-in rules are there at once. The entry points of other distributions are looked up when a name is not built
    in, because finding them reads the metadata of everything that is installed; one is imported when it is used.
    """

    def __init__(self, built_in: Sequence[Rule]):
        self._methods: dict[str, Method] = {rule.name: rule for rule in built_in}
        self._built_in = tuple(self._methods)
        self._found: dict[str, tuple[EntryPoint, str]] | None = None  # name -> (entry point, its distribution)

    def __getitem__(self, name: str) -> Method:
        if name not in self._methods:
            self._methods[name] = self._load(name)
        return self._methods[name]

    def __contains__(self, name: object) -> bool:
        return name in self._methods or name in self._entry_points()

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from sorted(self._entry_points())

    def __len__(self) -> int:
        return len(self._built_in) + len(self._entry_points())

    def _load(self, name: str) -> Method:
        entry, provider = self._entry_points()[name]
        try:
            method: Method = entry.load()
        except Exception as error:
            raise ValueError(f"method {name!r} of {provider} cannot be loaded: {error}") from error
        if not callable(method) or (isinstance(method, Rule) and method.name != name):
            raise ValueError(f"method {name!r} of {provider} is not a method of that name: {method!r}")
        return method

    def _entry_points(self) -> dict[str, tuple[EntryPoint, str]]:
        if self._found is None:
            from importlib.metadata import entry_points

            found: dict[str, tuple[EntryPoint, str]] = {}
            for entry in entry_points(group=GROUP):
                provider = f"{entry.dist.name}=={entry.dist.version}" if entry.dist is not None else "unknown"
                if entry.name in self._built_in or entry.name in found:
                    taken = found[entry.name][1] if entry.name in found else "ninferbuild"
                    raise ValueError(f"{provider} registers the method {entry.name!r}, which {taken} provides")
                found[entry.name] = (entry, provider)
            self._found = found
        return self._found
