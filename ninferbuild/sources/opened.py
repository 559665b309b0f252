"""The ``sources`` of a recipe: named checkpoints, opened when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from ninferbuild.sources.regions import SourceFile
from ninferbuild.sources.safetensors import SafetensorsSource

Opener = Callable[[str, Path], Any]
"""``(name of the source, path)`` → opened store."""


def _open_safetensors(name: str, path: Path) -> SafetensorsSource:
    return SafetensorsSource(path)


def _open_gguf(name: str, path: Path) -> Any:
    """Names that recipes read blocks from give those, every other name values."""
    if name in GGUF_BLOCK_SOURCES:
        from ninferbuild.sources.gguf import GGUFFile

        return GGUFFile(path)
    values = import_module("ninferbuild.sources.gguf_source")  # needs more than most builds

    return values.GGUFSource(path)


def _open_artifact(name: str, path: Path) -> Any:
    """Components are taken from an artifact whole."""
    from ninferbuild.sources.artifact import ArtifactSource

    return ArtifactSource(path)


GGUF_BLOCK_SOURCES = frozenset(("gguf", "ternary", "ngram"))
"""Names of sources whose GGUF files are read block by block."""

OPENERS: dict[str, Opener] = {".gguf": _open_gguf, ".ninfer": _open_artifact}
"""Path suffix, case-sensitive → opener. Everything else is a Safetensors checkpoint."""


def open_source(name: str, path: str | Path) -> Any:
    """Open one checkpoint by the rule of its suffix.

    Raises:
        ValueError, OSError: what the opener raises; the path holds a NUL.
    """
    path = Path(path)
    if "\0" in str(path):
        raise ValueError(f"source {name!r}: {str(path)!r} is not a path: it holds a NUL")
    return OPENERS.get(path.suffix, _open_safetensors)(name, path)


class Sources(Mapping[str, Any]):
    """Read-only mapping of source names to opened stores; a context manager that closes them.

    ``base`` is opened at once, a named source on first use and then kept. Iteration gives the opened names in order
    of opening, then the others in the order given. Unlike the reference, ``name in sources`` is False for a missing
    name instead of raising.

    Args:
        base: path of the base checkpoint, or a store that is open already.
        named: further names and their paths; a path need not exist while its name is unused.
        artifacts: more of them, which are artifacts whatever their files are called.

    Raises:
        ValueError: ``named`` contains ``base``.
    """

    def __init__(
        self,
        base: Any,
        named: Mapping[str, str | Path] | None = None,
        artifacts: Mapping[str, str | Path] | None = None,
    ):
        self._artifacts = dict(artifacts or {})
        self._paths = {**(named or {}), **self._artifacts}
        if "base" in self._paths:
            raise ValueError("source 'base' is the checkpoint given with --model; choose another name")
        self._opened: dict[str, Any] = {}
        self._opened["base"] = open_source("base", base) if isinstance(base, str | Path) else base

    @property
    def opened(self) -> tuple[str, ...]:
        """Names of the opened sources, in order of opening."""
        return tuple(self._opened)

    def __getitem__(self, name: str) -> Any:
        store = self._opened.get(name)
        if store is None:
            if name not in self._paths:
                raise ValueError(f"the selected recipe requires source {name!r}; provide --source {name}=PATH")
            opener = _open_artifact if name in self._artifacts else open_source
            store = self._opened[name] = opener(name, Path(self._paths[name]))
        return store

    def __contains__(self, name: object) -> bool:
        return name in self._opened or name in self._paths

    def __iter__(self) -> Iterator[str]:
        yield from tuple(self._opened)
        yield from (name for name in self._paths if name not in self._opened)

    def __len__(self) -> int:
        return len(self._opened.keys() | self._paths.keys())

    def name_of(self, file: SourceFile) -> str | None:
        """The opened source that ``file`` belongs to; None for bytes in memory and foreign files."""
        for name, store in self._opened.items():
            if hasattr(store, "owns") and store.owns(file):
                return name
        return None

    def close(self) -> None:
        """Close every opened source."""
        for store in self._opened.values():
            store.close()

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
