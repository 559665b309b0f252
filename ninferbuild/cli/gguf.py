"""``ninferbuild gguf``: what GGUF files hold."""

from __future__ import annotations

import click

from ninferbuild.cli.options import subcommand
from ninferbuild.cli.output import Output
from ninferbuild.printable import printable

_EXAMPLES = ("gguf ls model.gguf", "gguf ls model.gguf --json")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="\n".join(("\b", "Examples:", *(f"  ninferbuild {example}" for example in _EXAMPLES))),
    invoke_without_command=True,
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Look into GGUF files."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


@subcommand("ls", examples=(*_EXAMPLES, "gguf ls model.gguf | cut -f3 | sort | uniq -c"))
@click.argument("file")
def _ls(output: Output, file: str) -> None:
    """List the tensors of the GGUF FILE by name: name, shape and stored type, separated by tabs.

    Shapes are row-major, the slowest axis first. Only the header is read, also of one file of a split model.
    """
    from ninferbuild.sources.ggml_types import ggml_name
    from ninferbuild.sources.gguf import GGUFFile

    with GGUFFile(file, shard=True) as opened:
        rows = sorted((name, info.shape, ggml_name(info.type_id)) for name, info in opened.tensors.items())
    if output.as_json:
        output.json_document([{"name": name, "shape": list(shape), "type": kind} for name, shape, kind in rows])
        return
    for name, shape, kind in rows:
        output.text(f"{printable(name)}\t{tuple(shape)}\t{kind}")


command.add_command(_ls)
