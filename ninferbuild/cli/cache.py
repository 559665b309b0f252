"""``ninferbuild cache``: where it is, what it holds, and making it smaller."""

from __future__ import annotations

from datetime import datetime
import os
from typing import TYPE_CHECKING, Any

import click

from ninferbuild.cli.options import file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.cli.plain import plain
from ninferbuild.errors import UsageError
from ninferbuild.target import TargetFile, find_file, read_file
from ninferbuild.target_schema import CacheSettings
from ninferbuild.units import format_size, parse_age, parse_size

if TYPE_CHECKING:
    from ninferbuild.cache import Cache

_EXAMPLES = ("cache dir", "cache stats", "cache prune --max-size 200G --older-than 30d --dry-run", "cache clear")


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="\n".join(("\b", "Examples:", *(f"  ninferbuild {example}" for example in _EXAMPLES))),
    invoke_without_command=True,
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Look after the cache of encoded payloads. It is always safe to delete.

    It is in $NINFERBUILD_CACHE, else where `[cache] dir` of ninferbuild.toml says, else in the user's cache directory.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _age(text: str) -> float:
    try:
        return parse_age(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_target_option = click.option(
    "--target", metavar="TARGET", help="Only what this target uses: a name in ninferbuild.toml, or convert's output."
)


def _file(file: str | None) -> TargetFile | None:
    return read_file(file) if file is not None or find_file() is not None else None


def _settings(file: str | None) -> CacheSettings:
    targets = _file(file)
    return targets.cache_settings() if targets is not None else CacheSettings()


def _open(file: str | None, *, read_only: bool = False) -> Cache:
    from ninferbuild.cache import Cache

    settings = _settings(file)
    return Cache.open(
        settings.directory(),
        read_only=read_only,
        max_size=settings.max_size,
        create=False,
        allow_foreign_fs=settings.allow_foreign_fs,
    )


def _identity(target: str | None, file: str | None) -> str | None:
    """What the cache knows ``target`` by."""
    if target is None or "#" in target:
        return target
    targets = _file(file)
    if targets is not None and target in targets.names:
        return f"{os.path.realpath(targets.path)}#{target}"
    return os.path.realpath(target)


def _show(output: Output, facts: dict[str, Any]) -> None:
    """Facts as ``key: value`` lines, then groups of facts as tables, then lists."""
    if output.as_json:
        output.json_document(facts)
        return
    for key, value in facts.items():
        if not isinstance(value, dict | list):
            output.text(f"{key.replace('_', ' ')}: {_cell(key, value)}")
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            output.text()
            _rows(output, [{key.removesuffix("s"): name, **row} for name, row in value.items()])
        elif isinstance(value, list) and value:
            output.text(f"{key.replace('_', ' ')}:")
            for line in value:
                output.text(f"  {line}")


def _rows(output: Output, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    numeric = [index for index, column in enumerate(columns) if isinstance(rows[0][column], int | float)]
    output.table(
        [[_cell(column, row[column]) for column in columns] for row in rows],
        header=[column.replace("_", " ") for column in columns],
        right=numeric,
    )


def _cell(key: str, value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() if "bytes" in key or key in ("disk_before", "disk_after", "length", "max_size"):
            return format_size(value)
        case float() if key in ("made", "used"):
            return datetime.fromtimestamp(value).isoformat(" ", "seconds")
        case float():
            return f"{value:.1%}" if key.endswith("rate") else f"{value:.1f}"
        case _:
            return str(value)


@subcommand("dir", examples=("cache dir", "cache dir --json"))
@file_option
def _dir(output: Output, file: str | None) -> None:
    """Print the cache's directory."""
    directory = str(_settings(file).directory())
    if output.as_json:
        output.json_document({"dir": directory})
    else:
        output.text(directory)


@subcommand("stats", examples=("cache stats", "cache stats --json"))
@file_option
def _stats(output: Output, file: str | None) -> None:
    """Show what the cache holds and what it has saved."""
    with _open(file, read_only=True) as cache:
        stats = cache.stats()
    _show(output, {**plain(stats), "hit_rate": stats.hit_rate})


@subcommand("ls", examples=("cache ls", "cache ls --target qwen3.6-27b --json"))
@file_option
@_target_option
def _ls(output: Output, file: str | None, target: str | None) -> None:
    """List cached actions, the most recently used first."""
    identity = _identity(target, file)
    with _open(file, read_only=True) as cache:
        rows = [plain(row) for row in cache.ls(identity)]
    if output.as_json:
        output.json_document(rows)
    elif rows:
        _rows(output, rows)


@subcommand(
    "prune",
    examples=(
        "cache prune --max-size 200G",
        "cache prune --older-than 30d --keep-builds 2",
        "cache prune --target old-model --dry-run",
    ),
)
@file_option
@click.option("--max-size", type=_size, metavar="N", help="Keep at most so much: 200G is 2·10¹¹ bytes, 200Gi binary.")
@click.option("--older-than", type=_age, metavar="AGE", help="Drop what has not been used for so long: 30d, 12h.")
@click.option(
    "--keep-builds", type=click.IntRange(min=0), metavar="K", help="Keep what each target's last K builds use."
)
@_target_option
@click.option("--dry-run", is_flag=True, help="Say what would go; drop nothing.")
def _prune(output: Output, file: str | None, target: str | None, dry_run: bool, **criteria: Any) -> None:
    """Drop cached payloads, least recently used first.

    What a running build needs stays, and so does what the last build of a target uses that still exists, unless
    --max-size cannot be kept otherwise. Without options only what nothing refers to goes.
    """
    identity = _identity(target, file)
    with _open(file) as cache:
        facts = plain(cache.prune(target=identity, dry_run=dry_run, **criteria))
    if not output.as_json and not output.verbose:
        facts["actions"] = len(facts.pop("keys"))
    _show(output, facts)


@subcommand("compact", examples=("cache compact",))
@file_option
def _compact(output: Output, file: str | None) -> None:
    """Give the space of dropped payloads back to the file system."""
    with _open(file) as cache:
        _show(output, plain(cache.compact()))


@subcommand("clear", examples=("cache clear",))
@file_option
def _clear(output: Output, file: str | None) -> None:
    """Empty the cache. The next build encodes everything again.

    While other processes use the cache, what their builds need stays.
    """
    if not _settings(file).directory().exists():
        _show(output, {"disk_before": 0, "disk_after": 0})
        return
    with _open(file) as cache:
        _show(output, plain(cache.clear()))


@subcommand("rm", examples=("cache rm 0f3a5c0d9b7e4f6a8c1d2e3f40516273", "cache rm 0f3a5c"))
@file_option
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
def _rm(output: Output, file: str | None, keys: tuple[str, ...]) -> None:
    """Drop the payloads of the actions KEY, as 'cache ls' and reports name them; the first digits are enough."""
    with _open(file) as cache:
        chosen = [_one_key(cache, key) for key in keys]
        for key in chosen:
            cache.remove(key)
    if output.as_json:
        output.json_document({"removed": [key.hex() for key in chosen]})
    else:
        output.report(f"dropped {len(chosen)} actions")


def _one_key(cache: Cache, text: str) -> bytes:
    found = cache.matching(text)
    if not found:
        raise UsageError(f"no action with the key {text!r} in {cache.path}; 'ninferbuild cache ls' shows them")
    if len(found) > 1:
        raise UsageError(f"the keys of {len(found)} actions start with {text!r}; give more digits")
    return found[0]


@subcommand("verify", examples=("cache verify", "cache verify --repair"))
@file_option
@click.option("--repair", is_flag=True, help="Drop what is damaged, so that it is made again.")
def _verify(output: Output, file: str | None, repair: bool) -> int:
    """Read the whole cache and check every record and payload.

    The exit code is 1 if something is damaged and stays so.
    """
    with _open(file, read_only=not repair) as cache:
        result = cache.verify(repair=repair)
    _show(output, plain(result))
    return 1 if result.problems and not result.repaired else 0


for _member in (_dir, _stats, _ls, _prune, _compact, _clear, _rm, _verify):
    command.add_command(_member)
