"""Why the result of a user's function cannot be kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that cannot be seen through.

    Attributes:
        name: the object, as the user knows it: ``recipe.scale (closure of recipe.clipped)``.
        why: a clause about the object.
        fix: what to do about it, in the imperative.
    """

    name: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}; {self.fix}"
