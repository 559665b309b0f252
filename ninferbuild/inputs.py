"""The files that a build reads, and the refusal to write any of them.

An output that is a symbolic link is written through it, and one file may have several names; so files are compared by
device and inode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import os
from pathlib import Path
import sys
from typing import TYPE_CHECKING, Any

from ninferbuild import user_modules
from ninferbuild.models.resources import TEXT_RESOURCES, VISION_RESOURCES
from ninferbuild.target_schema import OptionError, split_reference

if TYPE_CHECKING:
    from ninferbuild.configure import Configured
    from ninferbuild.session import Session

Input = tuple[str, Path]
"""(what the build reads it as, path)"""

_OF_A_MODEL = ("config.json", "model.safetensors.index.json", *TEXT_RESOURCES, *VISION_RESOURCES)


def input_files(session: Session) -> Iterator[Input]:
    """The files that a planned build reads; some of them more than once, and some that need not exist."""
    ready = session.configured
    yield from _of_target(ready)
    for name in ready.sources.opened:
        for path in files_of(ready.sources[name]):
            yield f"source {name!r}", path
    for path in (Path(ready.model.root, name) for name in _OF_A_MODEL if ready.model.root is not None):
        yield "a file of the model", path
    if ready.ranking is not None:
        yield "the ranking", ready.ranking
    for use in session.importance:
        yield "an importance matrix", Path(use.file.path)
    for path in session.memo.paths():
        yield "a source", path


def _of_target(ready: Configured) -> Iterator[Input]:
    target = ready.target
    if target.file is not None:
        yield from _of_project(target.file)
    yield from project_files()
    for reference in (target.recipe, *target.overrides):
        if not reference.isidentifier():
            yield "a recipe file", Path(split_reference(reference)[0])
    for name in user_modules.imported():
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield f"the module {name}", Path(file)
    for kind, table in (("source", target.sources), ("the donor of", target.grafts), ("resource", target.resources)):
        for name, path in table.items():
            yield f"{kind} {name!r}", path


def project_files() -> Iterator[Input]:
    """The target file that commands find from the working directory, and its lock; options alone read neither."""
    from ninferbuild.target import find_file

    found = find_file()
    if found is not None:
        yield from _of_project(found)


def _of_project(target_file: Path) -> Iterator[Input]:
    from ninferbuild.lock import lock_path

    yield "the target file", target_file
    yield "the lock of the targets", lock_path(target_file)


def files_of(store: Any) -> Iterator[Path]:
    """The files of an opened source: all shards of a checkpoint, all parts of an artifact."""
    listed = getattr(store, "paths", None)
    if callable(listed):
        yield from listed()
    elif (path := getattr(store, "path", None)) is not None:
        yield Path(path)


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[Input], origin: object) -> None:
    """Check that no file of ``outputs`` is one of ``inputs``, which are looked at only where an output exists.

    Args:
        origin: the option or key that says where the outputs go.

    Raises:
        OptionError: one of them is; both are named.
    """
    existing: dict[tuple[int, int] | None, Path] = {
        identity: path for path in outputs if (identity := _identity(path)) is not None
    }
    if not existing:
        return
    for what, path in inputs:
        written = existing.get(_identity(path))
        if written is not None:
            raise OptionError(
                f"{origin}: {written} would be written and is read, as {what} ({path}); choose another output"
            )


def refuse_in_cache(outputs: Iterable[Path], cache: Path, origin: object) -> None:
    """Raises ``OptionError`` when an output, behind symbolic links, lies in the directory of the cache."""
    directory = os.path.realpath(cache)
    for path in outputs:
        if Path(os.path.realpath(path)).is_relative_to(directory):
            raise OptionError(f"{origin}: {path} lies in the cache, {cache}; choose another output")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
