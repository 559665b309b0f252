"""``ninferbuild graft``."""

from __future__ import annotations

from pathlib import Path

import click

from ninferbuild.cli.byte_bar import byte_bar
from ninferbuild.cli.options import subcommand
from ninferbuild.cli.output import Output


@subcommand(
    "graft",
    examples=(
        "graft qwen.ninfer --component dflash2 --from reference.ninfer --out qwen-dflash2.ninfer",
        "graft qwen.ninfer --component mtp --component dflash2 --from reference.ninfer --out both.ninfer --json",
    ),
)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--component",
    "components",
    multiple=True,
    required=True,
    metavar="NAME",
    help="A component that ARTIFACT lacks: vision, mtp, dflash, dflash2. Repeatable.",
)
@click.option(
    "--from",
    "donor",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The artifact that has it.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="PATH", help="Entry file to write.")
@click.option("--name", metavar="NAME", help="Stored as metadata.name, in place of that of ARTIFACT.")
@click.option("--max-file-bytes", metavar="SIZE", help="Bound on each file: bytes or 32G; default: one file.")
@click.option("--overwrite", is_flag=True, help="Replace an output that ninferbuild did not make.")
def command(
    output: Output,
    artifact: Path,
    components: tuple[str, ...],
    donor: Path,
    out: Path,
    name: str | None,
    max_file_bytes: str | None,
    overwrite: bool,
) -> None:
    """Write ARTIFACT with a component of another artifact, byte for byte.

    Neither artifact is changed, and no checkpoint is needed. To graft while building, give --graft to 'convert' or
    'grafts' to a target.
    """
    from ninferbuild.graft_artifact import graft_artifact
    from ninferbuild.target_schema import Origin, read_out, read_size, read_text

    origin = Origin(None, None)
    limit = None if max_file_bytes is None else read_size(max_file_bytes, origin / "max_file_bytes")
    read_out(str(out), origin / "out")
    if name is not None:
        read_text(name, origin / "name")
    with byte_bar(output) as observe:
        result = graft_artifact(
            artifact,
            components,
            donor,
            out,
            name=name,
            max_file_bytes=limit,
            overwrite=overwrite,
            observe=observe,
        )
    if output.as_json:
        output.json_line(result.to_json())
        return
    for component, (count, size) in result.grafted.items():
        output.report(f"{component}: {count} objects, {size} bytes of {donor}")
    output.report(f"wrote {out}: {result.objects} objects, {len(result.files)} files, {result.seconds:.1f}s")
