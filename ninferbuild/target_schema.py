"""What a target may say: its fields, and the keys of ``ninferbuild.toml`` with the value that each takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
import difflib
import os
from pathlib import Path
import re
from typing import Any

from ninferbuild.device_names import parse_device
from ninferbuild.errors import UsageError
from ninferbuild.units import parse_size

PROPOSAL_ROWS = 131072
"""Rows of the proposal head where a target asks for one without saying how many."""

ROWS_PER_CHUNK = 512

_NAME_BYTES = 255 - len("...ninferbuild-journal.000000000000.ninferbuild-tmp")
"""Bytes of an output's name, so that the temporary of its journal still has a name that file systems take."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")


class MissingFileError(UsageError, FileNotFoundError):
    """A file that a target names does not exist."""


class OptionError(UsageError, ValueError):
    """The value of an option or key is of the right type, but not one that can be used."""


@dataclass(frozen=True, slots=True)
class Assign:
    """One ``[[targets.NAME.assign]]`` or ``--assign``: a ``recipe.assign`` that runs last.

    ``origin`` says where it was written, for messages.
    """

    select: tuple[str, ...]
    format: str | None = None
    method: str | None = None
    layout: str | None = None
    rows: tuple[int, int] | None = None
    parameters: Mapping[str, Any] | None = None
    activation_policy: str | None = None
    origin: str = field(default="", compare=False)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``recipe.assign(select, …)``: the choices that were given."""
        names = ("format", "method", "layout", "rows", "parameters", "activation_policy")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Proposal:
    """The indexed proposal head: shortlist size, and the file of token counts if not the default one."""

    rows: int = PROPOSAL_ROWS
    ranking: Path | None = None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """``[cache]``.

    Attributes:
        dir: where it is; ``$NINFERBUILD_CACHE`` goes before it, see :meth:`directory`.
        max_size: bound on its live bytes.
        trust_stat: believe ``stat`` on any file system, not only on those known to keep a kernel's ctime.
        allow_foreign_fs: do not refuse a cache on a network file system.
        before_environment: ``dir`` goes before ``$NINFERBUILD_CACHE``. No key of the file sets it.
    """

    dir: Path | None = None
    max_size: int | None = None
    trust_stat: bool = False
    allow_foreign_fs: bool = False
    before_environment: bool = False

    def directory(self) -> Path:
        """``$NINFERBUILD_CACHE``, else ``dir``, else the platform's user cache directory."""
        from ninferbuild.cache import default_directory

        if self.dir is None or (os.environ.get("NINFERBUILD_CACHE") and not self.before_environment):
            return default_directory()
        return self.dir


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written, and how its text is to be read.

    Attributes:
        file: the target file, or None for options of the command line.
        directory: directory that relative paths start from, or None to leave them as they are.
        path: keys that lead to the value.
        by_set: whether ``--set`` gave it.
    """

    file: Path | None
    directory: Path | None
    path: tuple[str, ...] = ()
    by_set: bool = False

    def __truediv__(self, key: str) -> Origin:
        return replace(self, path=(*self.path, key))

    def __str__(self) -> str:
        key = "".join(part if part.startswith("[") else f".{part}" for part in self.path).removeprefix(".")
        if self.by_set:
            return f"--set {key}"
        if self.file is None:
            option, *rest = self.path or ("options",)
            return " ".join((f"--{OPTIONS.get(option, option.replace('_', '-'))}", *rest))
        return f"{self.file}: {key}" if key else str(self.file)

    def error(self, message: str) -> OptionError:
        return OptionError(f"{self}: {message}")

    def expand(self, text: str) -> str:
        """``${VAR}`` and ``${VAR:-default}`` replaced; a default stands in for an unset or empty variable."""
        if self.file is None:  # the shell has done it
            return text

        def value(match: re.Match[str]) -> str:
            name, default = match.groups()
            found = os.environ.get(name)
            if default is not None:
                return found or default
            if found is None:
                raise self.error(f"environment variable {name} is not set; set it or write ${{{name}:-DEFAULT}}")
            return found

        expanded = _VARIABLE.sub(value, text)
        if "${" in _VARIABLE.sub("", text):
            raise self.error(f"{text!r} has a '${{' that is not ${{VAR}} or ${{VAR:-default}}")
        return expanded


OPTIONS = {
    "overrides": "override",
    "sources": "source",
    "grafts": "graft",
    "resources": "resource",
}
"""Key → option of ``convert``, where they differ by more than underscores."""


def read_text(value: object, origin: Origin) -> str:
    if not isinstance(value, str):
        raise _wrong_type(value, "a string", origin)
    if not (text := origin.expand(value)):
        raise origin.error("must not be empty")
    return text


def read_path(value: object, origin: Origin) -> Path:
    """A path: ``~`` expanded, relative ones joined to the file's directory."""
    text = read_text(value, origin)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise origin.error(f"{text!a} cannot be a file name in the locale's encoding, {error.encoding}") from None
    if origin.directory is None:
        return Path(text)
    try:
        return origin.directory / Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise origin.error(f"cannot expand {text!r}: {error}") from None


def read_out(value: object, origin: Origin) -> Path:
    """The path of an artifact. Its name is written into the artifact and its report, in UTF-8, and other names are
    made from it.
    """
    path = read_path(value, origin)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise origin.error(f"{str(path)!a} is not UTF-8; choose another name, or a UTF-8 locale") from None
    if path.name in ("", "..") or str(value).endswith(os.sep) or os.path.isdir(path):
        raise origin.error(f"{path} is a directory; name a file")
    if len(os.fsencode(path.name)) > _NAME_BYTES or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise origin.error(f"{path} is too long; the name of the file may have {_NAME_BYTES} bytes")
    return path


def read_device(value: object, origin: Origin) -> str:
    name = read_text(value, origin)
    try:
        parse_device(name)
    except ValueError as error:
        raise origin.error(f"{name}: {error}") from None
    return name


def read_reference(value: object, origin: Origin) -> str:
    """A recipe: a registered name as it is; a file, with or without ``:function``, as a path like any other."""
    text = read_text(value, origin)
    if text.isidentifier() or origin.directory is None:
        return text
    file, function = split_reference(text)
    path = str(read_path(file, origin))
    return path if function is None else f"{path}:{function}"


def split_reference(reference: str) -> tuple[str, str | None]:
    """File and function of ``FILE`` or ``FILE:function``; only an identifier after the last colon is a function."""
    file, colon, function = reference.rpartition(":")
    return (file, function) if colon and file and function.isidentifier() else (reference, None)


def read_count(value: object, origin: Origin) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(value, "an integer", origin)
    if value < 1:
        raise origin.error(f"must be at least 1, not {value}")
    return value


def read_flag(value: object, origin: Origin) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(value, "true or false", origin)
    return value


def read_size(value: object, origin: Origin) -> int:
    if isinstance(value, str):
        try:
            value = parse_size(origin.expand(value))
        except ValueError as error:
            raise origin.error(str(error)) from None
    return read_count(value, origin)


def read_texts(value: object, origin: Origin) -> tuple[str, ...]:
    return tuple(read_text(item, origin / f"[{index}]") for index, item in enumerate(_items(value, origin)))


def read_references(value: object, origin: Origin) -> tuple[str, ...]:
    return tuple(read_reference(item, origin / f"[{index}]") for index, item in enumerate(_items(value, origin)))


def read_components(value: object, origin: Origin) -> tuple[str, ...]:
    names = read_texts(value, origin)
    if repeated := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise origin.error(f"must not repeat {repeated!r}")
    return names


def read_paths(value: object, origin: Origin) -> dict[str, Path]:
    return {key: read_path(item, origin / key) for key, item in _table(value, origin).items()}


def read_resources(value: object, origin: Origin) -> dict[str, Path]:
    """Paths; a relative one that is not there is looked for under ``$NINFER_ROOT`` as well."""
    root = os.environ.get("NINFER_ROOT")
    paths = read_paths(value, origin)
    for role, path in paths.items():
        given = Path(origin.expand(_table(value, origin)[role]))  # type: ignore[arg-type]  # read_paths has checked it
        if root and not given.is_absolute() and not path.exists() and (Path(root) / given).exists():
            paths[role] = Path(root) / given
    return paths


def read_sources(value: object, origin: Origin) -> dict[str, Path]:
    sources = read_paths(value, origin)
    if "base" in sources:
        where = "with --model" if origin.file is None else "as 'model'"
        raise origin.error(f"the source 'base' is given {where}")
    return sources


def read_proposal(value: object, origin: Origin) -> Proposal | None:
    """``true``, a number of rows, or a table of ``rows`` and ``ranking``; ``false`` takes an inherited one away."""
    if isinstance(value, bool):
        return Proposal() if value else None
    if isinstance(value, int):
        return Proposal(read_count(value, origin))
    if not isinstance(value, Mapping):
        raise _wrong_type(value, "true, a number of rows, or a table of rows and ranking", origin)
    return Proposal(**read_table(value, {"rows": read_count, "ranking": read_path}, origin))


def read_assigns(value: object, origin: Origin) -> tuple[Assign, ...]:
    return tuple(_read_assign(item, origin / f"[{index}]") for index, item in enumerate(_items(value, origin)))


def _read_assign(value: object, origin: Origin) -> Assign:
    table = read_table(_table(value, origin), _ASSIGN_KEYS, origin)
    if not table.get("select"):
        raise origin.error("'select' is missing: which parameters to assign")
    if not table.keys() - {"select", "rows"}:
        raise origin.error("changes nothing; give format, method, layout, parameters or activation_policy")
    return Assign(**table, origin=str(origin))


def _read_selectors(value: object, origin: Origin) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(value, origin)
    for item in items:
        if not isinstance(item, str) or not item:
            raise _wrong_type(item, "a selector", origin)
    return tuple(str(item) for item in items)


def _read_rows(value: object, origin: Origin) -> tuple[int, int]:
    bounds = _items(value, origin)
    match bounds:
        case [int() as first, int() as last] if not isinstance(first, bool) and not isinstance(last, bool):
            return first, last
    raise origin.error("requires two bounds, [first, last], last not included")


def _read_parameters(value: object, origin: Origin) -> dict[str, Any]:
    return {key: _plain(item, origin / key) for key, item in _table(value, origin).items()}


def _plain(value: object, origin: Origin) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, origin / str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, origin / f"[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, bool | int | float | str):
        raise _wrong_type(value, "a string, number, true, false, list or table", origin)
    return value


Reader = Callable[[Any, Origin], Any]

_ASSIGN_KEYS: Mapping[str, Reader] = {
    "select": _read_selectors,
    "format": read_text,
    "method": read_text,
    "layout": read_text,
    "rows": _read_rows,
    "parameters": _read_parameters,
    "activation_policy": read_text,
}

TARGET_KEYS: Mapping[str, Reader] = {
    "model": read_path,
    "recipe": read_reference,
    "overrides": read_references,
    "components": read_components,
    "sources": read_sources,
    "grafts": read_paths,
    "resources": read_resources,
    "proposal": read_proposal,
    "name": read_text,
    "out": read_out,
    "max_file_bytes": read_size,
    "device": read_device,
    "rows_per_chunk": read_count,
    "workers": read_count,
    "assign": read_assigns,
}
"""Keys of ``[targets.NAME]`` and ``[defaults]``, with what reads their value."""

CACHE_KEYS: Mapping[str, Reader] = {
    "dir": read_path,
    "max_size": read_size,
    "trust_stat": read_flag,
    "allow_foreign_fs": read_flag,
}
"""Keys of ``[cache]``."""

LIST_KEYS = frozenset({"overrides", "components"})
"""Keys for which ``--set KEY=a,b`` means a list."""


def read_table(table: Mapping[str, object], keys: Mapping[str, Reader], origin: Origin) -> dict[str, Any]:
    """The values of ``table`` read by ``keys``.

    Raises:
        UsageError: an unknown key or a value that its reader refuses.
    """
    check_keys(table, keys, origin)
    return {key: keys[key](value, origin / key) for key, value in table.items()}


def check_keys(table: Mapping[str, object], known: Sequence[str] | Mapping[str, object], origin: Origin) -> None:
    for key in table:
        if key not in known:
            raise (origin / key).error(f"unknown key{suggest(key, list(known))}")


def suggest(name: str, known: Sequence[str]) -> str:
    """``; did you mean 'X'?``, or what there is to choose from."""
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(sorted(known))}" if known else ""


def _items(value: object, origin: Origin) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, "a list", origin)
    return value


def _table(value: object, origin: Origin) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _wrong_type(value, "a table", origin)
    return value


def _wrong_type(value: object, expected: str, origin: Origin) -> OptionError:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return origin.error(f"must be {expected}, not {names.get(type(value), type(value).__name__)}")
