"""What a plan takes from files of importance vectors: one version of each, and how many parameters found a vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ninferbuild.errors import SourceChangedError
from ninferbuild.rules.grouped_search import SearchState

if TYPE_CHECKING:
    from ninferbuild.plan import Parent
    from ninferbuild.rules.importance import ImportanceFile


@dataclass(frozen=True, slots=True)
class ImportanceUse:
    """One file of importance vectors.

    Attributes:
        parameters: those that look for a vector in it.
        matched: those of them that have one.
    """

    file: ImportanceFile
    parameters: dict[str, None] = field(default_factory=dict)
    matched: dict[str, None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The use as JSON values."""
        return {"path": self.file.path, "parameters": len(self.parameters), "matched": len(self.matched)}


def importance_uses(parents: Iterable[Parent]) -> tuple[ImportanceUse, ...]:
    """The files that ``parents`` take vectors from, in order of first use.

    Raises:
        SourceChangedError: a file was replaced while parents were planned, or has been since.
    """
    uses: dict[str, ImportanceUse] = {}
    for parent in parents:
        state = parent.checked.state if parent.checked is not None else None
        if not isinstance(state, SearchState) or state.file is None:
            continue
        use = uses.setdefault(state.file.path, ImportanceUse(state.file))
        if state.file is not use.file and state.file.identity != use.file.identity:
            raise SourceChangedError(f"{use.file.path}: the importance matrix changed while it was in use; build again")
        for name in parent.names:
            use.parameters[name] = None
            if use.file.has(name):
                use.matched[name] = None
    for use in uses.values():
        use.file.require_unchanged()
    return tuple(uses.values())


def unmatched(uses: Iterable[ImportanceUse]) -> Iterator[str]:
    """A line for each file that weighs nothing, because no parameter has a vector in it."""
    for use in uses:
        if not use.matched:
            names = use.file.names
            held = f"its vectors have names like {names[0]!r}" if names else "it holds no vector"
            yield (
                f"{use.file.path}: no parameter has a vector in this importance matrix, so all columns weigh alike: "
                f"{held}, parameters like {next(iter(use.parameters))!r} (see `ninferbuild params`); "
                "import it with `ninferbuild imatrix` and the config.json of this model"
            )
