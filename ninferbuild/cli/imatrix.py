"""``ninferbuild imatrix``."""

from __future__ import annotations

from pathlib import Path

import click

from ninferbuild.cli.options import subcommand
from ninferbuild.cli.output import Output
from ninferbuild.errors import UsageError


@subcommand(
    "imatrix",
    examples=(
        "imatrix --gguf qwen.imatrix.gguf --config Qwen3.8-27B/config.json --out qwen.imatrix.safetensors",
        "imatrix --dat imatrix.dat --config Qwen3.8-27B/config.json --out qwen.imatrix.safetensors",
    ),
)
@click.option("--gguf", metavar="PATH", help="What llama-imatrix wrote, in GGUF form.")
@click.option("--dat", metavar="PATH", help="What older versions of llama-imatrix wrote: imatrix.dat.")
@click.option("--config", required=True, metavar="PATH", help="config.json of the checkpoint.")
@click.option("--out", required=True, metavar="PATH", help="Safetensors file to write.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is no importance matrix of this command.")
def command(output: Output, gguf: str | None, dat: str | None, config: str, out: str, overwrite: bool) -> None:
    """Import an importance matrix of llama.cpp for grouped_search.

    The file that is written holds the mean squared activation of each input channel, by parameter. Recipes take it as
    the parameter `imatrix` of the method grouped_search, official ones as `--source imatrix=PATH`.
    """
    from ninferbuild.imatrix import import_matrix, is_imported
    from ninferbuild.inputs import project_files, refuse_inputs
    from ninferbuild.publish import behind_link
    from ninferbuild.sources.llama_imatrix import FORMS
    from ninferbuild.standing import refuse_other

    given = [(form, Path(path)) for form, path in (("gguf", gguf), ("dat", dat)) if path is not None]
    if len(given) != 1:
        raise UsageError("give the importance matrix with --gguf PATH or with --dat PATH")
    ((form, source),) = given
    if Path(out).is_dir():
        raise UsageError(f"--out: {out} is a directory; name a file")
    for option, path in ((f"--{form}", source), ("--config", Path(config))):
        if Path(out).exists() and path.exists() and path.samefile(out):
            raise UsageError(f"--out: {out} is the file that {option} gives; name another one")
    refuse_inputs([Path(out)], project_files(), "--out")
    refuse_other(Path(out), "an importance matrix that this command wrote", is_imported, overwrite=overwrite)
    with FORMS[form](source) as matrix:
        count = import_matrix(source, matrix.mean_squares, Path(config), behind_link(Path(out)))
    if output.as_json:
        output.json_document({"out": out, "parameters": count, "source": source.name})
    else:
        output.report(f"{count} parameters -> {out}")
