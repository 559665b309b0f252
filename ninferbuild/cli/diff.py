"""``ninferbuild diff``."""

from __future__ import annotations

from contextlib import ExitStack
import os
from typing import TYPE_CHECKING

import click

from ninferbuild.cli.options import file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.errors import DiffersError, UsageError
from ninferbuild.target_schema import MissingFileError

if TYPE_CHECKING:
    from ninferbuild.diff import Comparison
    from ninferbuild.sides import Side


@subcommand(
    "diff",
    examples=(
        "diff qwen3.6-27b qwen3.6-27b-small            # two targets: what their actions would do differently",
        "diff qwen3.6-27b dist/qwen3.6-27b.ninfer      # what a build would change",
        "diff old.ninfer new.ninfer --no-payload       # two artifacts, from their directories alone",
    ),
)
@click.argument("a")
@click.argument("b")
@file_option
@click.option("--hash", "hash_sources", is_flag=True, help="Of targets, hash sources that decide what would be built.")
@click.option(
    "--no-payload", "payload", is_flag=True, default=True, flag_value=False, help="Compare directories alone."
)
def command(output: Output, a: str, b: str, file: str | None, hash_sources: bool, payload: bool) -> int:
    """Compare A and B object by object; each is a target or an artifact.

    A word that names a target of ninferbuild.toml is that target; ./WORD is always a file. Objects are matched by the
    parameters bound to them. Where an artifact came from and how it is split into files are no differences. A payload
    that is not built yet is not known to be equal. Exit code 0: equal, 3: not.
    """
    from ninferbuild.diff import compare

    with ExitStack() as stack:
        sides = [_side(word, file, hash_sources, stack) for word in (a, b)]
        found = compare(*sides, payloads=payload)
        if output.as_json:
            output.json_document(found.to_json())
        else:
            _show(output, found)
    return 0 if found.equal else DiffersError.exit_code


def _side(word: str, file: str | None, hash_sources: bool, stack: ExitStack) -> Side:
    from ninferbuild.artifact.reader import Artifact
    from ninferbuild.sides import artifact_side, target_side
    from ninferbuild.target import find_file, load_target, read_file

    plain = os.sep not in word and not (word.endswith(".ninfer") and os.path.isfile(word))
    targets = read_file(file) if plain and (file is not None or find_file() is not None) else None
    if targets is not None and word in targets.names:
        return target_side(load_target(word, targets.path), hash_sources=hash_sources)
    if os.path.exists(word):
        return artifact_side(stack.enter_context(Artifact(word)))
    if os.sep in word or word.endswith(".ninfer"):
        raise MissingFileError(f"{word}: no such file or directory")
    what = f"a target of {targets.path} nor an artifact" if targets is not None else "a target nor an artifact"
    raise UsageError(f"{word} is neither {what}")


def _show(output: Output, found: Comparison) -> None:
    for item in found.objects if not output.quiet else ():
        output.text(item.name)
        for line in (*item.differences, *item.explain):
            output.text(f"  {line}")
    if not output.quiet:
        for title, lines in (
            ("objects only in A", [item.name for item in found.only_a]),
            ("objects only in B", [item.name for item in found.only_b]),
            ("bindings", found.bindings),
            ("uses", found.uses),
            ("components", found.components),
            ("metadata", found.metadata),
            ("provenance, not counted", found.provenance),
        ):
            if lines:
                output.text(f"{title}:")
                for line in lines:
                    output.text(f"  {line}")
    differing = sum(item.status == "differs" for item in found.objects)
    counts = {
        "equal": found.same,
        "different": differing,
        "not known": len(found.objects) - differing,
        "only in A": len(found.only_a),
        "only in B": len(found.only_b),
    }
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    compared = "" if found.payloads else " (payloads not compared)"
    verdict = "equal" if found.equal else "not equal"
    output.text(f"A {found.a.name} ({found.a.kind}), B {found.b.name} ({found.b.kind})")
    output.text(f"{verdict}: objects: {summary}{compared}")
