"""``ninferbuild plan``."""

from __future__ import annotations

from typing import Any

import click

from ninferbuild.cli.options import change_options, chosen_targets, convert_options, file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.cli.planning import plan_targets


@subcommand(
    "plan",
    examples=(
        "plan qwen3.6-27b",
        "plan qwen3.6-27b --hash --assign 'text/layers/*/mlp/down=q6_g64_fp16'",
        "plan qwen3.6-27b --explain              # why an action would run",
        "plan --model Qwen3.6-27B --recipe qwen3_6_27b --json",
    ),
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@file_option
@click.option("--hash", "hash_sources", is_flag=True, help="Hash sources where that decides whether an action runs.")
@click.option("--rehash", is_flag=True, help="With --hash: read every source, whatever is remembered about it.")
@click.option("--explain", is_flag=True, help="Say of each action that would run what changed since the last build.")
@convert_options(required=False)
@change_options
def command(
    output: Output,
    targets: tuple[str, ...],
    file: str | None,
    hash_sources: bool,
    rehash: bool,
    explain: bool,
    sets: tuple[str, ...],
    assigns: tuple[str, ...],
    **options: Any,
) -> None:
    """Show what a build would do and write, from headers alone.

    Each action is `cached`, `run`, or `unknown` until its source is hashed. The targets are those of ninferbuild.toml,
    or the one that convert's options describe.
    """
    chosen = chosen_targets(targets, file, options, sets=sets, assigns=assigns)
    plan_targets(output, chosen, hash_sources=hash_sources, rehash=rehash, explain=explain)
