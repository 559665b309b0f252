"""Showing what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ninferbuild.cli.output import Output

if TYPE_CHECKING:
    from ninferbuild.differences import Difference

SHOWN = 20
"""Differences that are shown without ``-v``."""


def show_differences(output: Output, differences: Sequence[Difference]) -> None:
    """Print differences with what explains them; only the first of many unless ``-v`` was given."""
    shown = differences if output.verbose else differences[:SHOWN]
    for difference in shown:
        for line in difference.lines():
            output.text(line)
    if len(shown) < len(differences):
        output.text(f"and {len(differences) - len(shown)} more; -v shows all, --json too")
