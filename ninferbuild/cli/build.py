"""``ninferbuild build``."""

from __future__ import annotations

from typing import Any

import click

from ninferbuild.cli.building import build_targets
from ninferbuild.cli.options import build_options, change_options, file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.target import load_targets


@subcommand(
    "build",
    examples=(
        "build                                   # the default targets of ninferbuild.toml",
        "build qwen3.6-27b --device cpu",
        "build qwen3.6-27b --assign 'text/layers/3/mlp/*=q6_g64_fp16'",
        "build --dry-run qwen3.6-27b",
        "build --locked qwen3.6-27b              # exits with 3 unless the bytes are those of ninferbuild.lock",
        "build qwen3.6-27b --explain             # what changed since the last build, on standard error",
    ),
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@file_option
@click.option(
    "--device", metavar="DEVICE", help="cpu, cuda (every GPU) or cuda:0,1; default: the target's, else CUDA if any."
)
@click.option(
    "--locked",
    is_flag=True,
    help="Hold the build to ninferbuild.lock: say what differs, publish nothing that does, and exit with 3.",
)
@build_options
@change_options
def command(
    output: Output,
    targets: tuple[str, ...],
    file: str | None,
    sets: tuple[str, ...],
    assigns: tuple[str, ...],
    **options: Any,
) -> int:
    """Build targets of ninferbuild.toml: encode what is not cached, link what is not up to date.

    Without TARGET, the targets that `default` in the file names, else its only target.
    """
    return build_targets(output, load_targets(targets, file, sets=sets, assigns=assigns), **options)
