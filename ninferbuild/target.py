"""Targets: from ``ninferbuild.toml``, or from the options of ``convert``, to a :class:`Target`.

A target says which checkpoint is built with which recipe and options. Loading one reads the target file and checks
that the files it names exist; nothing of the checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import os
from pathlib import Path
import tomllib
from typing import Any

from ninferbuild.errors import UsageError
from ninferbuild.target_options import merge, parse_assign, read_sets
from ninferbuild.target_schema import (
    CACHE_KEYS,
    ROWS_PER_CHUNK,
    TARGET_KEYS,
    Assign,
    CacheSettings,
    MissingFileError,
    OptionError,
    Origin,
    Proposal,
    check_keys,
    read_table,
    split_reference,
    suggest,
)

__all__ = [
    "FILE_NAME",
    "Assign",
    "CacheSettings",
    "MissingFileError",
    "OptionError",
    "Proposal",
    "Target",
    "TargetFile",
    "convert_target",
    "find_file",
    "load_target",
    "load_targets",
    "parse_assign",
    "read_file",
]

FILE_NAME = "ninferbuild.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is built: checkpoint, recipe and options.

    Attributes:
        name: name of the target; for ``convert`` the name of the output file.
        identity: what the cache knows the target by: real path of its file, ``#`` and name; for ``convert`` the real
            path of the output.
        file: the file that defines it; None for ``convert``.
        recipe, overrides: official name, or ``FILE.py[:function]`` with a path that needs no other directory.
        components: None leaves the choice to the model adapter.
        artifact_name: ``metadata.name`` of the artifact.
        max_file_bytes: bound on each file of the artifact; None: one file.
        device: None: CUDA where there is one, else the CPU.
        workers: CPU workers; None leaves the choice to the executor.
        grafts: component → artifact that it is taken from, byte for byte.
        assigns: assignments that run after recipe, proposal and overrides.
    """

    name: str
    identity: str
    file: Path | None
    model: Path
    recipe: str
    out: Path
    overrides: tuple[str, ...] = ()
    components: tuple[str, ...] | None = None
    sources: Mapping[str, Path] = field(default_factory=dict)
    grafts: Mapping[str, Path] = field(default_factory=dict)
    resources: Mapping[str, Path] = field(default_factory=dict)
    proposal: Proposal | None = None
    artifact_name: str | None = None
    max_file_bytes: int | None = None
    device: str | None = None
    rows_per_chunk: int = ROWS_PER_CHUNK
    workers: int | None = None
    assigns: tuple[Assign, ...] = ()
    cache: CacheSettings = field(default_factory=CacheSettings)

    def settings(self) -> dict[str, Any]:
        """The keys of ``[targets.NAME]`` that give this target from any directory: plain values, absolute paths."""
        proposal: dict[str, Any] | None = None
        if self.proposal is not None:
            ranking = self.proposal.ranking
            proposal = {"rows": self.proposal.rows} | ({"ranking": _absolute(ranking)} if ranking else {})
        settings: dict[str, Any] = {
            "model": _absolute(self.model),
            "recipe": _absolute_reference(self.recipe),
            "overrides": [_absolute_reference(override) for override in self.overrides],
            "components": None if self.components is None else list(self.components),
            "sources": {name: _absolute(path) for name, path in self.sources.items()},
            "grafts": {component: _absolute(path) for component, path in self.grafts.items()},
            "resources": {role: _absolute(path) for role, path in self.resources.items()},
            "proposal": proposal,
            "name": self.artifact_name,
            "out": _absolute(self.out),
            "max_file_bytes": self.max_file_bytes,
            "device": self.device,
            "rows_per_chunk": None if self.rows_per_chunk == ROWS_PER_CHUNK else self.rows_per_chunk,
            "workers": self.workers,
            "assign": [
                {"select": list(assign.select)}
                | {key: list(value) if key == "rows" else value for key, value in assign.arguments().items()}
                for assign in self.assigns
            ],
        }
        return {key: value for key, value in settings.items() if value is not None and value not in ([], {})}

    @property
    def origin(self) -> Origin:
        """Where its keys were written, for messages."""
        directory = self.file.parent if self.file else None
        return Origin(self.file, directory, ("targets", self.name) if self.file else ())

    def check_files(self) -> None:
        """Raises :class:`MissingFileError`, naming the key, when a file that the target names does not exist.

        Sources of ``convert`` are left alone: one that is never opened need not exist.
        """
        origin = self.origin
        named: list[tuple[Origin, Path]] = [(origin / "model", self.model)]
        for index, reference in enumerate((self.recipe, *self.overrides)):
            if not reference.isidentifier():
                key = origin / "recipe" if index == 0 else origin / "overrides"
                named.append((key, Path(split_reference(reference)[0])))
        if self.file is not None:
            named += [(origin / "sources" / name, path) for name, path in self.sources.items()]
        named += [(origin / "grafts" / component, path) for component, path in self.grafts.items()]
        named += [(origin / "resources" / role, path) for role, path in self.resources.items()]
        if self.proposal is not None and self.proposal.ranking is not None:
            key = origin / "proposal" / "ranking" if self.file else origin / "ranking"
            named.append((key, self.proposal.ranking))
        for key, path in named:
            if not path.exists():
                raise MissingFileError(f"{key}: no such file or directory: {path}")


class TargetFile:
    """One ``ninferbuild.toml``, read and checked for unknown tables; targets are read when asked for.

    Raises:
        UsageError: the file does not exist, is not TOML, or has unknown keys at the top; the message names it.
    """

    def __init__(self, path: Path, text: str | None = None):
        self.path = path
        self._directory = Path(os.path.abspath(path)).parent
        origin = Origin(path, self._directory)
        if text is None:
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                raise MissingFileError(f"no such target file: {path}") from None
            except UnicodeDecodeError as error:
                raise origin.error(f"not UTF-8: {error.reason} at byte {error.start}") from None
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise origin.error(f"not valid TOML: {error}") from None
        check_keys(content, ("default", "defaults", "cache", "targets"), origin)
        for key in ("defaults", "cache", "targets"):
            if not isinstance(content.get(key, {}), dict):
                raise (origin / key).error("must be a table")
        self._origin = origin
        self._defaults: dict[str, Any] = content.get("defaults", {})
        self._cache: dict[str, Any] = content.get("cache", {})
        self._targets: dict[str, Any] = content.get("targets", {})
        for name, table in self._targets.items():
            where = origin / "targets" / name
            if not isinstance(table, dict):
                raise where.error("must be a table")
            if not name or "/" in name or "\0" in name:
                raise where.error("a target's name cannot be empty or hold '/'")
        self.default = self._read_default(content.get("default", []))

    @property
    def names(self) -> tuple[str, ...]:
        """The targets, in the order of the file."""
        return tuple(self._targets)

    def cache_settings(self, sets: Sequence[str] = ()) -> CacheSettings:
        """``[cache]``, with the ``cache.…`` keys of ``sets`` in place."""
        return _cache_settings(self._cache, self._settings(sets)[1], self._origin)

    def target(self, name: str, *, sets: Sequence[str] = (), assigns: Sequence[str] = ()) -> Target:
        """The target ``name``. ``sets`` are ``KEY=VALUE``, ``assigns`` are ``SELECTOR=FORMAT[:METHOD]``.

        Raises:
            UsageError: an unknown target or key, a wrong type, an unset variable, a cycle of ``extends``; the message
                names key and file. Whether files exist is not looked at: see :meth:`Target.check_files`.
        """
        if name not in self._targets:
            raise UsageError(f"{self.path}: unknown target {name!r}{suggest(name, self.names)}")
        origin = self._origin / "targets" / name
        merged = self._merged(name)
        read_table(self._defaults, TARGET_KEYS, self._origin / "defaults")
        changes, cache_changes = self._settings(sets)
        values = read_table(merge(merged, changes), TARGET_KEYS, origin)
        self._check_outputs(name, values)
        return _make(
            name,
            values,
            origin,
            identity=f"{os.path.realpath(self.path)}#{name}",
            out=values.get("out", self._directory / f"{name}.ninfer"),
            assigns=assigns,
            cache=_cache_settings(self._cache, cache_changes, self._origin),
        )

    def _settings(self, sets: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        return read_sets(sets, Origin(self.path, self._directory, by_set=True))

    def _read_default(self, value: object) -> tuple[str, ...]:
        origin = self._origin / "default"
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise origin.error("must be a list of target names")
        for name in value:
            if name not in self._targets:
                raise origin.error(f"unknown target {name!r}{suggest(name, self.names)}")
        return tuple(dict.fromkeys(value))

    def _merged(self, name: str) -> dict[str, Any]:
        """Defaults, then what ``name`` extends, then its own keys."""
        chain: list[str] = []
        current: str | None = name
        while current is not None:
            origin = self._origin / "targets" / (chain[-1] if chain else name) / "extends"
            if current in chain:
                raise origin.error(f"a cycle: {' → '.join([*chain[chain.index(current) :], current])}")
            if current not in self._targets:
                raise origin.error(f"unknown target {current!r}{suggest(current, self.names)}")
            chain.append(current)
            current = self._targets[current].get("extends")
            if current is not None and not isinstance(current, str):
                raise (self._origin / "targets" / chain[-1] / "extends").error("must be the name of a target")
        merged: dict[str, Any] = self._defaults
        for link in reversed(chain):
            own = {key: value for key, value in self._targets[link].items() if key != "extends"}
            check_keys(own, (*TARGET_KEYS, "extends"), self._origin / "targets" / link)
            merged = merge(merged, own)
        return merged

    def _check_outputs(self, name: str, values: Mapping[str, Any]) -> None:
        """Two targets with one output would replace each other's on every build."""
        out = os.path.abspath(values.get("out", self._directory / f"{name}.ninfer"))
        for other in self.names:
            if other == name:
                continue
            try:
                raw = self._merged(other).get("out", f"{other}.ninfer")
                theirs = TARGET_KEYS["out"](raw, self._origin / "targets" / other / "out")
            except UsageError:
                continue  # reported when that target is asked for
            if os.path.abspath(theirs) == out:
                where = self._origin / "targets" / name / "out"
                raise where.error(f"the target {other!r} writes {out} too; give one of them another 'out'")


def find_file(start: Path | None = None) -> Path | None:
    """``ninferbuild.toml`` in ``start`` (the working directory if None) or the nearest directory above; else None."""
    directory = Path(os.path.abspath(start or Path.cwd()))
    return next((path for up in (directory, *directory.parents) if (path := up / FILE_NAME).is_file()), None)


def read_file(file: str | Path | None = None) -> TargetFile:
    """The target file at ``file``, or the one that :func:`find_file` finds.

    Raises:
        UsageError: there is none, or it cannot be read as one.
    """
    if file is not None:
        path = Path(file)
        return TargetFile(path / FILE_NAME if path.is_dir() else path)
    found = find_file()
    if found is None:
        raise UsageError(
            f"no {FILE_NAME} in {Path.cwd()} or above; name one with -f, write one with 'ninferbuild init', "
            "or use 'ninferbuild convert'"
        )
    return TargetFile(found)


def load_targets(
    names: Sequence[str] = (),
    file: str | Path | None = None,
    *,
    sets: Sequence[str] = (),
    assigns: Sequence[str] = (),
) -> tuple[Target, ...]:
    """The targets ``names``; without names the ``default`` ones, else the only one. Files they name exist.

    Raises:
        UsageError: as :meth:`TargetFile.target`; several targets and none chosen; a missing file.
    """
    targets = read_file(file)
    chosen = tuple(dict.fromkeys(names)) or targets.default
    if not chosen:
        if len(targets.names) != 1:
            there = f"choose one of {', '.join(targets.names)}" if targets.names else "it defines no target"
            raise UsageError(f"{targets.path}: no target given and no 'default' in the file; {there}")
        chosen = targets.names
    loaded = tuple(targets.target(name, sets=sets, assigns=assigns) for name in chosen)
    for target in loaded:
        target.check_files()
    return loaded


def load_target(
    name: str | None = None,
    file: str | Path | None = None,
    *,
    sets: Sequence[str] = (),
    assigns: Sequence[str] = (),
) -> Target:
    """One target of ``file``, or of the ``ninferbuild.toml`` in the working directory or above.

    ``name`` None stands for the default target, or the only one. ``sets`` (``"rows_per_chunk=64"``) and ``assigns``
    (``"text/layers/3/*/query=q6_g64_fp16"``) are what ``--set`` and ``--assign`` take.

    Raises:
        UsageError: as :func:`load_targets`, or several default targets.
    """
    loaded = load_targets(() if name is None else (name,), file, sets=sets, assigns=assigns)
    if len(loaded) != 1:
        raise UsageError(f"several default targets: {', '.join(target.name for target in loaded)}; name one")
    return loaded[0]


def convert_target(
    settings: Mapping[str, Any], *, sets: Sequence[str] = (), assigns: Sequence[str] = (), check: bool = True
) -> Target:
    """The target that options describe; ``settings`` has the keys of ``[targets.NAME]``, ``out`` required.

    Relative paths stay as they are. Raises ``UsageError`` naming the option.
    """
    origin = Origin(None, None)
    changes, cache_changes = read_sets(sets, Origin(None, None, by_set=True))
    values = read_table(merge(settings, changes), TARGET_KEYS, origin)
    if "out" not in values:
        raise (origin / "out").error("is required: the file to write")
    out: Path = values["out"]
    target = _make(
        out.name,
        values,
        origin,
        identity=os.path.realpath(out),
        out=out,
        assigns=assigns,
        cache=_cache_settings({}, cache_changes, origin),
    )
    if check:
        target.check_files()
    return target


def _make(
    name: str,
    values: Mapping[str, Any],
    origin: Origin,
    *,
    identity: str,
    out: Path,
    assigns: Sequence[str],
    cache: CacheSettings,
) -> Target:
    for key in ("model", "recipe"):
        if key not in values:
            raise (origin / key).error("is required")
    fields = {key: value for key, value in values.items() if key not in ("name", "out", "assign")}
    return Target(
        name=name,
        identity=identity,
        file=origin.file,
        out=out,
        artifact_name=values.get("name"),
        assigns=(*values.get("assign", ()), *map(parse_assign, assigns)),
        cache=cache,
        **fields,
    )


def _cache_settings(table: Mapping[str, Any], changes: Mapping[str, Any], origin: Origin) -> CacheSettings:
    return CacheSettings(**read_table(merge(table, changes), CACHE_KEYS, origin / "cache"))


def _absolute(path: Path) -> str:
    return os.path.abspath(path)


def _absolute_reference(reference: str) -> str:
    if reference.isidentifier():
        return reference
    file, function = split_reference(reference)
    return os.path.abspath(file) if function is None else f"{os.path.abspath(file)}:{function}"
