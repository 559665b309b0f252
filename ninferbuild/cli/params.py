"""``ninferbuild params``."""

from __future__ import annotations

from typing import Any

import click

from ninferbuild.cli.options import change_options, chosen_targets, convert_options, file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.errors import UsageError


@subcommand(
    "params",
    examples=(
        "params qwen3.6-27b",
        "params qwen3.6-27b 'text/layers/3/*'",
        "params 'vision/*' --model Qwen3.6-27B --recipe qwen3_6_27b --components text,vision",
    ),
)
@click.argument("words", nargs=-1, metavar="[TARGET] [PATTERN]")
@file_option
@convert_options(required=False)
@change_options
def command(
    output: Output,
    words: tuple[str, ...],
    file: str | None,
    sets: tuple[str, ...],
    assigns: tuple[str, ...],
    **options: Any,
) -> None:
    """List the logical parameters of a target: shape, inputs, chosen format and method, parent, auxiliaries.

    PATTERN is a selector as in recipes: an exact name, or one with *, ? and [...]. With convert's options instead of a
    target, the only argument is PATTERN.
    """
    from ninferbuild.preview import parameters

    by_options = any(options[key] for key in ("model", "recipe"))
    names, pattern = ((), words) if by_options else (words[:1], words[1:])
    if len(pattern) > 1:
        raise UsageError(f"one pattern at most, not {' '.join(pattern)}")
    chosen = chosen_targets(names, file, options, sets=sets, assigns=assigns)
    if len(chosen) != 1:
        raise UsageError(f"several default targets: {', '.join(target.name for target in chosen)}; name one")
    rows = parameters(chosen[0], pattern[0] if pattern else None)
    if output.as_json:
        output.json_document(rows)
        return
    columns = ["name", "shape", "inputs", "format", "method", "parent"]
    if any(row["auxiliaries"] for row in rows):
        columns.append("auxiliaries")
    output.table([[_cell(row[column]) for column in columns] for row in rows], header=columns)


def _cell(value: object) -> str:
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], int):
            return " × ".join(map(str, value))
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
