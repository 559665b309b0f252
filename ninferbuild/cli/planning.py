"""Planning targets and showing the plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ninferbuild.cli.output import Output
from ninferbuild.target import Target
from ninferbuild.units import format_size

if TYPE_CHECKING:
    from ninferbuild.preview import BuildPlan

_STATES = {"cached": "cached", "run": "to run", "unknown": "unknown until the source is hashed (see plan --hash)"}


def plan_targets(
    output: Output,
    targets: Sequence[Target],
    *,
    device: str | None = None,
    hash_sources: bool = False,
    rehash: bool = False,
    explain: bool = False,
) -> None:
    """Plan ``targets`` and print each plan: text, or JSON on one line."""
    from ninferbuild.preview import plan

    for index, target in enumerate(targets):
        result = plan(target, hash_sources=hash_sources, device=device, rehash=rehash, explain=explain)
        for line in result.notes:
            output.note(line)
        if output.as_json:
            output.json_line(result.to_json())
            continue
        if index:
            output.text()
        _show(output, target, result)


def _show(output: Output, target: Target, plan: BuildPlan) -> None:
    output.text(f"{target.name} → {target.out}")
    if plan.actions and not output.quiet:
        rows = [
            (action.state, action.name, action.format, list(action.shape), action.method, format_size(action.bytes))
            for action in plan.actions
        ]
        output.table(rows, header=("state", "parent", "format", "shape", "method", "size"), right=(5,))
        output.text()
    if plan.explanations is not None:
        from ninferbuild.history import text_lines

        lines = text_lines(plan.explanations) or ["no action would run: every payload is cached"]
        for line in lines:
            output.text(line)
        output.text()
    if plan.formats:
        rows_by_format = [(name, count, f"{size} B", format_size(size)) for name, (count, size) in plan.formats.items()]
        output.table(rows_by_format, header=("format", "objects", "bytes", ""), right=(1, 2, 3))
        output.text()
    for use in plan.importance:
        output.text(
            f"importance: {use.file.path} has vectors for {len(use.matched)} of {len(use.parameters)} parameters"
        )
    counts = Counter[str](action.state for action in plan.actions)
    states = ", ".join(f"{counts[state]} {text}" for state, text in _STATES.items() if counts[state])
    output.text(f"actions: {len(plan.actions)}{f' ({states})' if states else ''}")
    output.text(f"payload: {plan.payload_bytes} B ({format_size(plan.payload_bytes)})")
    output.text(f"files: {plan.file_bytes} B ({format_size(plan.file_bytes)})")
