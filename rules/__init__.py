"""Encode rules: the built-in methods that turn a parent's inputs into the bytes of its planes.

Recipes reach them by name through :data:`METHODS` or import them from here. A method is built in by identity, not by
name: :func:`rule_of`.
"""

from __future__ import annotations

if __name__ != "ninferbuild.rules":
    raise ImportError(f"this package is ninferbuild.rules; it cannot be imported as {__name__!r}")

from ninferbuild.rules.cast_direct import cast_direct
from ninferbuild.rules.fp8_row_maxabs import fp8_row_maxabs
from ninferbuild.rules.grouped_absmax import grouped_absmax
from ninferbuild.rules.grouped_search import grouped_search
from ninferbuild.rules.import_encoded import import_encoded
from ninferbuild.rules.nvfp4_maxabs import nvfp4_maxabs
from ninferbuild.rules.registry import MethodTable
from ninferbuild.rules.rule import ErrorFlags, Rule, RuleCheck

__all__ = [
    "BUILT_IN",
    "METHODS",
    "ErrorFlags",
    "Rule",
    "RuleCheck",
    "cast_direct",
    "fp8_row_maxabs",
    "grouped_absmax",
    "grouped_search",
    "import_encoded",
    "nvfp4_maxabs",
    "rule_of",
]

BUILT_IN: tuple[Rule, ...] = (
    cast_direct,
    grouped_absmax,
    grouped_search,
    fp8_row_maxabs,
    import_encoded,
    nvfp4_maxabs,
)

METHODS = MethodTable(BUILT_IN)
"""Method name → method."""


def rule_of(method: object) -> Rule | None:
    """``method`` if it is one of ninferbuild's own rules, else None: then it is a user's function.

    Methods that other distributions register are a user's functions in this sense: their code, not a promise of
    equal bits on every machine, is what their results depend on.
    """
    return next((rule for rule in BUILT_IN if rule is method), None)
