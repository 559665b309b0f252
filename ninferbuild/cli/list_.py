"""``ninferbuild list``."""

from __future__ import annotations

from collections.abc import Callable
import sys
from typing import Any

import click

from ninferbuild.cli.options import file_option, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.errors import UsageError


@subcommand("list", examples=("list targets", "list recipes", "list methods --json", "list formats"))
@click.argument("what", type=click.Choice(("targets", "recipes", "methods", "formats")))
@file_option
def command(output: Output, what: str, file: str | None) -> None:
    """List what there is to build or to build with."""
    rows = _LISTS[what](file)
    if output.as_json:
        output.json_document(rows)
    elif rows:
        output.table([[_cell(value) for value in row.values()] for row in rows], header=list(rows[0]))


def _targets(file: str | None) -> list[dict[str, Any]]:
    from ninferbuild.target import read_file

    targets = read_file(file)
    built_by_default = targets.default or (targets.names if len(targets.names) == 1 else ())
    rows = []
    for name in targets.names:
        row: dict[str, Any] = {"name": name, "default": name in built_by_default}
        try:
            target = targets.target(name)
        except UsageError as error:  # one that cannot be read does not hide the others
            row |= {"recipe": None, "model": None, "out": None, "problem": str(error)}
        else:
            row |= {"recipe": target.recipe, "model": str(target.model), "out": str(target.out), "problem": None}
        rows.append(row)
    return rows


def _recipes(_file: str | None) -> list[dict[str, Any]]:
    from ninferbuild.recipes import RECIPES

    return [{"name": name, "about": _first_line(recipe)} for name, recipe in RECIPES.items()]


def _methods(_file: str | None) -> list[dict[str, Any]]:
    from ninferbuild.rules import METHODS

    return [
        {
            "name": name,
            "version": getattr(method, "version", None),
            "about": _first_line(sys.modules[method.__module__]),
        }
        for name, method in METHODS.items()
    ]


def _formats(_file: str | None) -> list[dict[str, Any]]:
    from ninferbuild.artifact.formats import NUMERIC_FORMATS
    from ninferbuild.artifact.layouts import encoded_size

    side = 4096  # large enough for padding not to matter
    return [
        {
            "name": name,
            "layout": item.layout,
            "bits_per_weight": round(encoded_size(item.layout, name, (side, side)) * 8 / side**2, 3),
        }
        for name, item in NUMERIC_FORMATS.items()
    ]


def _first_line(thing: object) -> str:
    return (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0]


def _cell(value: object) -> str:
    return {True: "yes", False: "", None: ""}[value] if value is None or isinstance(value, bool) else str(value)


_LISTS: dict[str, Callable[[str | None], list[dict[str, Any]]]] = {
    "targets": _targets,
    "recipes": _recipes,
    "methods": _methods,
    "formats": _formats,
}
