"""``ninferbuild graph``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from ninferbuild.cli.options import change_options, file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.errors import UsageError

if TYPE_CHECKING:
    from ninferbuild.graph_export import Format


@subcommand(
    "graph",
    examples=(
        "graph qwen3.6-27b --out qwen.dot && dot -Tsvg qwen.dot > qwen.svg",
        "graph qwen3.6-27b --format mermaid",
        "graph qwen3.6-27b --format json | jq '[.nodes[] | select(.state == \"run\")]'",
    ),
)
@click.argument("target", required=False)
@file_option
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("dot", "mermaid", "graphml", "json")),
    help="Default: dot, or json with --json.",
)
@click.option("--out", metavar="FILE", help="Write there instead of to standard output.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is no graph of this command.")
@change_options
def command(
    output: Output,
    target: str | None,
    file: str | None,
    format_name: str | None,
    out: str | None,
    overwrite: bool,
    sets: tuple[str, ...],
    assigns: tuple[str, ...],
) -> None:
    """Print the graph of a target's actions: what is read, encoded, stored and linked.

    Each encode node has its state: cached, run, or unknown until its source is hashed. Nothing is encoded.
    """
    from ninferbuild.graph_export import export, is_export
    from ninferbuild.preview import graph
    from ninferbuild.publish import behind_link, replace_file
    from ninferbuild.standing import refuse_other
    from ninferbuild.target import load_target

    if output.as_json and format_name not in (None, "json"):
        raise UsageError(f"--json prints JSON; leave it out for --format {format_name}")
    chosen = load_target(target, file, sets=sets, assigns=assigns)
    form = cast("Format", format_name or ("json" if output.as_json else "dot"))
    text = export(graph(chosen, out=None if out is None else Path(out)), form)
    if out is None:
        (output.document if form in ("json", "graphml") else output.text)(text.rstrip("\n"))
    else:
        refuse_other(Path(out), "a graph that this command wrote", is_export, overwrite=overwrite)
        replace_file(behind_link(Path(out)), text.encode("utf-8"))
        output.report(f"wrote {out}")
