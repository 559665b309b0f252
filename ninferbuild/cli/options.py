"""Options that commands share, and the decorator that makes a function a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from ninferbuild.cli.output import Output
from ninferbuild.target import OptionError, Target, convert_target
from ninferbuild.target_schema import PROPOSAL_ROWS

Function = TypeVar("Function", bound=Callable[..., Any])


def subcommand(
    name: str, *, examples: Sequence[str], cls: type[click.Command] = click.Command, **attributes: Any
) -> Callable[[Callable[..., int | None]], click.Command]:
    """A command that takes ``--json``, ``-q`` and ``-v``, gets an :class:`Output` first, and shows ``examples``.

    The function may return an exit code. An example that starts with a space goes on from the one before.
    """

    def make(function: Callable[..., int | None]) -> click.Command:
        @click.pass_context
        def invoke(ctx: click.Context, /, **values: Any) -> int | None:
            output = ctx.ensure_object(Output)
            with output.guarded():
                try:
                    return function(output, **values)
                except KeyboardInterrupt:  # click would write a blank line, wanted or not
                    raise click.Abort from None

        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        settings |= attributes.pop("context_settings", {})
        lines = (f"  {line}" if line.startswith(" ") else f"  ninferbuild {line}" for line in examples)
        epilog = "\n".join(("\b", "Examples:", *lines))
        decorate = click.command(name, cls=cls, epilog=epilog, context_settings=settings, **attributes)
        return decorate(_output_options(update_wrapper(invoke, function)))

    return make


def _output_options(function: Function) -> Function:
    def keep(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            setattr(ctx.ensure_object(Output), str(parameter.name), True)

    flags = (
        ("as_json", ("--json",), "Print JSON, and nothing but JSON, on standard output."),
        ("quiet", ("-q", "--quiet"), "Print errors only, and the answer of a command that was asked for one."),
        ("verbose", ("-v", "--verbose"), "Show more; errors with their traceback."),
    )
    for name, spellings, text in reversed(flags):
        option = click.option(
            *spellings, name, is_flag=True, expose_value=False, is_eager=True, callback=keep, help=text
        )
        function = option(function)
    return function


class Decorator(Protocol):
    """What adds options to a function."""

    def __call__(self, function: Function, /) -> Function: ...


def _all(*options: Decorator) -> Decorator:
    def decorate(function: Function, /) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


file_option: Decorator = click.option(
    "-f", "--file", metavar="FILE", help="Target file, instead of the nearest ninferbuild.toml."
)

change_options: Decorator = _all(
    click.option(
        "--assign",
        "assigns",
        multiple=True,
        metavar="SELECTOR=FORMAT[:METHOD]",
        help="Assign a format to the parameters that SELECTOR matches, after the recipe. Repeatable.",
    ),
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set a key of the target, as if the target file said so: rows_per_chunk=64, proposal.rows=4096, "
        "cache.max_size=200G. Repeatable.",
    ),
)

build_options: Decorator = _all(
    click.option("--overwrite", is_flag=True, help="Replace an output that ninferbuild did not make."),
    click.option("--rerun", is_flag=True, help="Encode everything again; cached actions are not used."),
    click.option("--rehash", is_flag=True, help="Read and hash every source, whatever is remembered about it."),
    click.option(
        "--no-link", "link", is_flag=True, default=True, flag_value=False, help="Fill the cache; write nothing."
    ),
    click.option("-k", "--keep-going", is_flag=True, help="Encode what can be encoded after a failure; link nothing."),
    click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Actions that run at a time."),
    click.option("--dry-run", is_flag=True, help="Show what would be done, like 'ninferbuild plan'."),
    click.option("--explain", is_flag=True, help="Say of each action that runs what changed since the last build."),
)


def convert_options(*, required: bool) -> Decorator:
    """The reference converter's options; ``required``: ``--model``, ``--recipe`` and ``--out`` must be given."""
    return _all(
        click.option(
            "--model", metavar="PATH", required=required, help="Checkpoint: directory, .safetensors or index."
        ),
        click.option("--recipe", metavar="RECIPE", required=required, help="Official name or FILE.py[:function]."),
        click.option(
            "--override",
            "overrides",
            metavar="RECIPE",
            multiple=True,
            help="Runs after recipe and proposal. Repeatable.",
        ),
        click.option(
            "--source",
            "sources",
            metavar="NAME=PATH",
            multiple=True,
            help="Named source, opened on demand; one that nothing asks for need not exist. Repeatable.",
        ),
        click.option(
            "--graft",
            "grafts",
            metavar="COMPONENT=FILE",
            multiple=True,
            help="Takes a component from an artifact, byte for byte. Repeatable.",
        ),
        click.option("--components", metavar="LIST", help="Comma-separated, of text,vision,mtp,dflash,dflash2."),
        click.option(
            "--resource",
            "resources",
            metavar="ROLE=PATH",
            multiple=True,
            help="Replaces a frontend resource. Repeatable.",
        ),
        click.option("--proposal", is_flag=True, help="Add the indexed proposal head."),
        click.option(
            "--proposal-rows",
            type=int,
            metavar="N",
            default=PROPOSAL_ROWS,
            show_default=True,
            help="Its shortlist size.",
        ),
        click.option("--ranking", metavar="PATH", help="Its token counts, instead of the default ranking file."),
        click.option("--name", "artifact_name", metavar="NAME", help="Stored in the artifact as metadata.name."),
        click.option("--out", metavar="PATH", required=required, help="Entry file of the artifact."),
        click.option(
            "--device", metavar="DEVICE", help="cpu, cuda (every GPU) or cuda:0,1; default: CUDA if there is one."
        ),
        click.option(
            "--rows-per-chunk",
            type=int,
            metavar="N",
            help="Rows of a processing block; no effect on the bytes of built-in methods.",
        ),
        click.option("--max-file-bytes", metavar="SIZE", help="Bound on each file: bytes or 32G; default: one file."),
        click.option(
            "--workers",
            type=int,
            metavar="N",
            help="Actions that run at a time, unless -j is given; no effect on bytes.",
        ),
    )


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``[targets.NAME]`` that say what convert's ``options`` say; the options are taken out.

    Raises:
        UsageError: a ``--source`` or ``--resource`` that is not ``NAME=PATH``, or that repeats a name.
    """
    rows, ranking = options.pop("proposal_rows"), options.pop("ranking")
    proposal = {"rows": rows} | ({"ranking": ranking} if ranking is not None else {})
    components = options.pop("components")
    settings = {
        "model": options.pop("model"),
        "recipe": options.pop("recipe"),
        "overrides": list(options.pop("overrides")),
        "components": None if components is None else components.split(","),
        "sources": _pairs("source", options.pop("sources")),
        "grafts": _pairs("graft", options.pop("grafts")),
        "resources": _pairs("resource", options.pop("resources")),
        "proposal": proposal if options.pop("proposal") else None,
        "name": options.pop("artifact_name"),
        "out": options.pop("out"),
        "max_file_bytes": options.pop("max_file_bytes"),
        "device": options.pop("device"),
        "rows_per_chunk": options.pop("rows_per_chunk"),
        "workers": options.pop("workers"),
    }
    return {key: value for key, value in settings.items() if value is not None and value not in ([], {})}


def _pairs(kind: str, entries: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries:
        name, _, path = entry.partition("=")
        if not name or not path or name in pairs:
            raise OptionError(f"{kind} requires unique NAME=PATH entries, not {entry!r}")
        pairs[name] = path
    return pairs


def chosen_targets(
    names: Sequence[str], file: str | None, options: dict[str, Any], *, sets: Sequence[str], assigns: Sequence[str]
) -> tuple[Target, ...]:
    """The targets a command is about: those named, or the one that convert's options in ``options`` describe.

    Raises:
        UsageError: as :func:`ninferbuild.target.load_targets`; both given.
    """
    from ninferbuild.target import load_targets

    device = options["device"]
    settings = settings_of(options)
    if settings.keys() <= {"device"}:
        if device is not None:
            sets = (*sets, f"device={device}")
        return load_targets(names, file, sets=sets, assigns=assigns)
    if names or file is not None:
        raise OptionError("give targets or the options of convert, not both; --set changes a key of a target")
    if "model" in settings:
        settings.setdefault("out", f"{Path(settings['model']).resolve().stem}.ninfer")
    return (convert_target(settings, sets=sets, assigns=assigns),)
