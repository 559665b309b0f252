"""``ninferbuild lock``."""

from __future__ import annotations

import click

from ninferbuild.cli.options import file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.target import load_targets


@subcommand(
    "lock",
    examples=(
        "lock qwen3.6-27b              # then commit ninferbuild.lock",
        "build --locked qwen3.6-27b    # exits with 3 when the bytes would be others",
        "lock -f release.toml --json   # writes release.lock",
    ),
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@file_option
@click.option("--device", metavar="DEVICE", help="Where to encode what is not cached; no effect on the lock.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Actions that run at a time.")
def command(output: Output, targets: tuple[str, ...], file: str | None, device: str | None, jobs: int | None) -> None:
    """Write down what targets give, in ninferbuild.lock beside ninferbuild.toml.

    A target that is not up to date is built first. The lock holds the artifact id, sizes and SHA-256 of the files,
    digests of the sources and of every object's payload, one line a fact. Targets that are not named keep their
    lines; a damaged lock is written anew. OUT.sha256, beside each artifact, is for `sha256sum -c`.
    """
    from ninferbuild.locking import lock

    for target in load_targets(targets, file):
        progress = output.progress()
        try:
            done = lock(target, device=device, jobs=jobs, progress=progress)
        finally:
            progress.close()
        if done.lost:
            output.note(f"{done.path} was damaged and is written anew; lock other targets that it held again")
        if output.as_json:
            output.json_line(done.to_json())
            continue
        state = "locked" if done.changed else "is locked already"
        output.report(
            f"{target.name} {state} in {done.path}: artifact {done.content.artifact_id}, "
            f"{len(done.content.objects)} objects, {len(done.content.files)} files"
        )
