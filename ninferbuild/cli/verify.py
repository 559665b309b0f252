"""``ninferbuild verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ninferbuild.cli.byte_bar import byte_bar
from ninferbuild.cli.options import subcommand
from ninferbuild.cli.output import Output
from ninferbuild.printable import printable

if TYPE_CHECKING:
    from ninferbuild.verify import Verification


@subcommand(
    "verify",
    examples=(
        "verify qwen3.6-27b.ninfer",
        "verify qwen3.6-27b.ninfer --against qwen3.6-27b.ninfer.conversion.json",
        "verify qwen3.6-27b.ninfer --against ninferbuild.lock --json",
        "verify qwen3.6-27b.ninfer --against SHA256SUMS",
    ),
)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A conversion report, a lock or a sha256sum file; the artifact must be what it says.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Findings to show for one object or file; the others are counted.",
)
def command(output: Output, artifact: Path, against: Path | None, limit: int) -> int:
    """Check an artifact, ARTIFACT being its entry file; no checkpoint is needed.

    Reads all of it: framing, directory, geometry, every code and scale word, padding, auxiliary tensors, and for
    artifacts made by ninferbuild the artifact id and the digest of the payload.

    The exit code is 1 if the artifact breaks a rule, else 3 if it is not what FILE says.
    """
    from ninferbuild.expected import read_expected
    from ninferbuild.verify import verify

    expected = None if against is None else read_expected(against, artifact)
    with byte_bar(output) as observe:
        result = verify(artifact, against=expected, limit=limit, observe=observe)
    if output.as_json:
        output.json_document(result.to_json())
    else:
        _print(output, result)
    return result.exit_code


def _print(output: Output, result: Verification) -> None:
    from ninferbuild.units import format_size

    for finding in result.findings:
        output.text(printable(str(finding)))
    for subject, count in result.more.items():
        output.text(printable(f"{subject}: {count} more"))
    if result.unchecked:
        was = "was" if result.unchecked == 1 else "were"
        output.text(f"{_counted(result.unchecked, 'object')} could not be read and {was} not checked")
    if result.exit_code:
        verdict = "is not valid" if result.invalid else "is valid"
        if result.different:
            verdict += f"{' and' if result.invalid else ' but'} not what {result.against} says"
        found = _counted(result.invalid + result.different, "finding")
        output.report(printable(f"{result.path} {verdict}: {found}"))
        return
    held = (
        _counted(result.objects, "object"),
        _counted(len(result.files), "file"),
        format_size(result.payload_bytes),
    )
    agrees = f", as {result.against} says" if result.against else ""
    output.report(printable(f"{result.path} is valid{agrees}: {', '.join(held)}"))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
