"""``ninferbuild reproduce``."""

from __future__ import annotations

from pathlib import Path

import click

from ninferbuild.cli.differing import show_differences
from ninferbuild.cli.options import file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.target import load_target


@subcommand(
    "reproduce",
    examples=(
        "reproduce qwen3.6-27b",
        "reproduce qwen3.6-27b --device cpu --rows-per-chunk 64 -j 1",
        "reproduce qwen3.6-27b --against downloaded/qwen3.6-27b.ninfer --json",
        "reproduce qwen3.6-27b --against release.lock --keep",
    ),
)
@click.argument("name", metavar="TARGET")
@file_option
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="ARTIFACT|LOCK",
    help="What has to come out; default: the target's lock if it is in there, else its output.",
)
@click.option(
    "--device", metavar="DEVICE", help="cpu, cuda (every GPU) or cuda:0,1; default: the target's, else CUDA if any."
)
@click.option("--rows-per-chunk", type=click.IntRange(min=1), metavar="N", help="Rows of a processing block.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Actions that run at a time.")
@click.option("--keep", is_flag=True, help="Keep the temporary directory, and say where it is.")
def command(
    output: Output,
    name: str,
    file: str | None,
    against: Path | None,
    device: str | None,
    rows_per_chunk: int | None,
    jobs: int | None,
    keep: bool,
) -> int:
    """Build a target again from nothing, and compare every object and every byte.

    The build neither reads nor changes your cache and outputs: it has a temporary directory, below $TMPDIR, for a
    cache of its own and the artifact. The exit code is 3 if something differs.
    """
    from ninferbuild.reproduce import reference, reproduce

    target = load_target(name, file)
    wanted = reference(target, against)
    progress = output.progress()
    try:
        done = reproduce(
            target,
            wanted,
            device=device,
            rows_per_chunk=rows_per_chunk,
            jobs=jobs,
            keep=keep,
            progress=progress,
        )
    finally:
        progress.close()
    if output.as_json:
        output.json_document(done.to_json())
    else:
        show_differences(output, done.differences)
    if done.kept is not None:
        output.note(f"kept in {done.kept}")
    if done.reproduced:
        output.report(
            f"{name} reproduced: {done.objects} objects and {len(done.files)} files as in {done.against}, "
            f"{done.seconds:.1f}s"
        )
        return 0
    count = len(done.differences)
    click.echo(f"error: {name} differs from {done.against}: {count} difference{'s' if count > 1 else ''}", err=True)
    return 3
