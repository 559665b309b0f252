"""``ninferbuild inspect``."""

from __future__ import annotations

import click

from ninferbuild.cli.options import subcommand
from ninferbuild.cli.output import Output


@subcommand(
    "inspect",
    examples=(
        "inspect qwen3.6-27b.ninfer",
        "inspect qwen3.6-27b.ninfer --objects | sort -k2 -n | tail",
        "inspect qwen3.6-27b.ninfer --bindings --json",
    ),
)
@click.argument("artifact")
@click.option("--objects", is_flag=True, help="List the objects: offset, bytes, kind, storage, id.")
@click.option("--bindings", is_flag=True, help="List bindings and uses.")
def command(output: Output, artifact: str, objects: bool, bindings: bool) -> None:
    """Show what an artifact holds, from its entry file ARTIFACT alone.

    Nothing is decoded; parts are not opened. --json has the configuration of the components too.
    """
    from ninferbuild.artifact.inspect import artifact_report, record_lines, summary_lines
    from ninferbuild.artifact.reader import Artifact

    with Artifact(artifact) as opened:
        if output.as_json:
            output.json_document(artifact_report(opened, objects=objects, bindings=bindings))
        else:
            for line in (*summary_lines(opened), *record_lines(opened, objects=objects, bindings=bindings)):
                output.text(line)
