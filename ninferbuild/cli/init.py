"""``ninferbuild init``."""

from __future__ import annotations

from collections.abc import Mapping
import json
import os
from pathlib import Path
import shutil
import tempfile
from typing import Any

import click

from ninferbuild.cli.options import convert_options, settings_of, subcommand
from ninferbuild.cli.output import Output
from ninferbuild.errors import UsageError
from ninferbuild.printable import printable
from ninferbuild.publish import require_regular
from ninferbuild.target import FILE_NAME, TargetFile, find_file, parse_assign
from ninferbuild.target_schema import ROWS_PER_CHUNK, MissingFileError, split_reference
from ninferbuild.toml_text import toml_key, toml_value

_PATHS = ("model", "out")
_REFERENCES = ("recipe", "overrides")
_PATH_TABLES = ("sources", "grafts", "resources")


@subcommand(
    "init",
    examples=(
        "init qwen3.6-27b --model Qwen3.6-27B --recipe qwen3_6_27b --components text,vision,mtp",
        "init qwen3.6-27b --from qwen3.6-27b.ninfer.conversion.json",
    ),
)
@click.argument("name")
@click.option(
    "-f", "--file", metavar="FILE", help="Target file to add to; default: the nearest ninferbuild.toml, or a new one."
)
@click.option(
    "--from", "report", metavar="REPORT", help="Take the options from the .conversion.json of an earlier build."
)
@convert_options(required=False)
@click.option("--assign", "assigns", multiple=True, metavar="SELECTOR=FORMAT[:METHOD]", help="Repeatable.")
def command(
    output: Output, name: str, file: str | None, report: str | None, assigns: tuple[str, ...], **options: Any
) -> None:
    """Add a target to ninferbuild.toml, creating the file if there is none.

    NAME is the new target. Its keys come from convert's options, or from a report with options on top. What the file
    holds already stays as it is, byte for byte.
    """
    path = Path(file) if file is not None else find_file() or Path(FILE_NAME)
    settings = _settings_of_report(Path(report)) if report is not None else {}
    settings |= settings_of(options)
    if assigns:
        parsed = [parse_assign(text) for text in assigns]
        settings["assign"] = [{"select": assign.select[0], **assign.arguments()} for assign in parsed]
    for key in ("model", "recipe"):
        if key not in settings:
            raise UsageError(f"--{key} is required, or --from REPORT")
    require_regular(path)
    text = target_text(name, settings, Path(os.path.abspath(path)).parent)
    try:
        before = path.read_bytes().decode()
    except FileNotFoundError:
        before = ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    if before and name in TargetFile(path, before).names:
        raise UsageError(f"{path}: the target {name!r} exists already; choose another name, or edit it")
    joint = "" if not before else "\n" if before.endswith("\n") else "\n\n"
    after = before + joint + text
    target = TargetFile(path, after).target(name)  # what is written can be read back
    _replace(path, after.encode())
    if output.as_json:
        output.json_document({"file": str(path), "target": name, "settings": target.settings()})
    else:
        output.report(printable(f"added target {name} to {path}"))


def target_text(name: str, settings: Mapping[str, Any], directory: Path) -> str:
    """``[targets.NAME]`` in TOML; relative paths in ``settings`` start from the working directory, those written from
    ``directory``.
    """
    header = f"targets.{toml_key(name)}"
    lines = [f"[{header}]"]
    tables = []
    for key, value in settings.items():
        if key in _PATHS:
            value = _rebase(value, directory)
        elif key in _REFERENCES:
            value = (
                [_rebase_reference(item, directory) for item in value]
                if isinstance(value, list)
                else (_rebase_reference(value, directory))
            )
        elif key in _PATH_TABLES:
            value = {role: _rebase(item, directory) for role, item in value.items()}
        elif key == "proposal":
            value = dict(value)
            if "ranking" in value:
                value["ranking"] = _rebase(value["ranking"], directory)
        if isinstance(value, dict):
            tables += ["", f"[{header}.{key}]", *_lines(value)]
        elif key == "assign":
            for assign in value:
                tables += ["", f"[[{header}.assign]]", *_lines(assign)]
        else:
            lines.append(f"{key} = {toml_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items()]


def _rebase(path: str, directory: Path) -> str:
    """``path`` as the target file says it. A ``~`` or ``$`` that is part of a name must not be read as more."""
    if os.path.isabs(path):
        return path
    relative = os.path.relpath(path, directory)
    return f"./{relative}" if relative.startswith("~") else relative


def _rebase_reference(reference: str, directory: Path) -> str:
    if reference.isidentifier():
        return reference
    file, function = split_reference(reference)
    file = _rebase(file, directory)
    return file if function is None else f"{file}:{function}"


def _settings_of_report(path: Path) -> dict[str, Any]:
    """Settings of a target from a ``.conversion.json``: our own reports hold them; the reference's hold enough."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"--from: no such report: {path}") from None
    except ValueError as error:
        raise UsageError(f"--from: {path} is not a conversion report: {error}") from None
    target = report.get("target") if isinstance(report, dict) else None
    if isinstance(target, dict) and target.keys() >= {"model", "recipe"}:
        return dict(target)
    try:
        provenance = report["provenance"]
        if provenance["recipe"] == "graft":
            raise UsageError(f"--from: {path} is of 'ninferbuild graft', which builds no target; run it again")
        paths = {name: source["path"] for name, source in provenance["sources"].items()}
        text = report["components"].get("text", {})
        proposal = text.get("proposal")
        settings = {
            "model": paths.pop("base"),
            "recipe": provenance["recipe"],
            "overrides": [provenance["override"]] if "override" in provenance else None,
            "components": list(report["components"]),
            "sources": paths,
            "proposal": proposal
            and {"rows": proposal["rows"]} | ({"ranking": provenance["ranking"]} if "ranking" in provenance else {}),
            "name": report["name"],
            "out": report["output"],
            "rows_per_chunk": None if report["rows_per_chunk"] == ROWS_PER_CHUNK else report["rows_per_chunk"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        what = f"; it has no {error}" if isinstance(error, KeyError) else ""
        raise UsageError(f"--from: {path} is not a conversion report{what}") from None
    return {key: value for key, value in settings.items() if value}


def _replace(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` in one step, through symbolic links and with the mode that the file has."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
