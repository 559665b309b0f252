"""Where code comes from: the standard library, an installed distribution, this project, or a user.

The answer decides how code enters a fingerprint. A module counts as *installed* only when a distribution next to it
lists its file in ``RECORD``; everything else outside the standard library is a user's: recipe files and their
siblings, directories on ``PYTHONPATH``, editable installs, and stray files in ``site-packages``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
import os
from pathlib import Path
import re
import sys
import sysconfig
from typing import Literal

from ninferbuild.digest import digest_of

OWN_PACKAGE = "ninferbuild"

COMPATIBILITY_PACKAGES = ("tools.convert", "tools.artifact")
"""Import names under which recipe files reach this project."""

COMPATIBILITY_ORIGIN = f"{OWN_PACKAGE}.compat"
"""What stands for the file of such a module; a real package of that name has a file of its own."""

Kind = Literal["stdlib", "installed", "own", "user"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution, identified by what its installer recorded."""

    name: str
    version: str
    record: str  # hexadecimal digest of RECORD, which lists a hash of every file

    def __str__(self) -> str:
        return f"{self.name} {self.version} {self.record}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a module comes from; ``distribution`` is set exactly when it is installed."""

    kind: Kind
    distribution: Distribution | None = None


_STDLIB, _OWN, _USER = Origin("stdlib"), Origin("own"), Origin("user")


def is_within(module: str, package: str) -> bool:
    """Whether ``module`` is ``package`` or inside it."""
    return module == package or module.startswith(package + ".")


@cache
def origin_of(module: str, file: str | None) -> Origin:
    """The origin of the module named ``module`` whose source or extension file is ``file`` (None: it has none)."""
    if is_within(module, OWN_PACKAGE):
        return _OWN
    if file == COMPATIBILITY_ORIGIN and any(is_within(module, name) for name in COMPATIBILITY_PACKAGES):
        return _OWN
    top = module.partition(".")[0]
    if not file or file in ("built-in", "frozen"):
        return _STDLIB if top in sys.stdlib_module_names else _USER
    path = os.path.abspath(file)
    if top in sys.stdlib_module_names and _in_standard_library(path):
        return _STDLIB
    distribution = _distribution_of(module, path)
    return _USER if distribution is None else Origin("installed", distribution)


@cache
def _standard_library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = [paths[key] for key in ("stdlib", "platstdlib")] + [str(Path(os.__file__).parent)]
    extensions = sysconfig.get_config_var("DESTSHARED")
    if extensions:
        found.append(str(extensions))
    return tuple({os.path.join(form, "") for path in found for form in (path, os.path.realpath(path))})


def in_standard_library(path: str) -> bool:
    """Whether an absolute path lies in the standard library proper, not in the site-packages below it."""
    return _in_standard_library(path)


def _in_standard_library(path: str) -> bool:
    return path.startswith(_standard_library()) and not re.search(r"[/\\](site|dist)-packages[/\\]", path)


def _distribution_of(module: str, path: str) -> Distribution | None:
    """The distribution whose RECORD lists ``path``, looked for in the directory the module was found from."""
    root = Path(path).parent
    levels = module.count(".") + (1 if Path(path).stem == "__init__" else 0)
    # The depth by name is exact for ordinary packages; namespace packages and odd loaders need the climb.
    for candidate in (*root.parents[max(levels - 1, 0) : levels], root, *root.parents):
        infos = _distributions(str(candidate))
        if infos:
            return _search(infos, candidate, path, module.partition(".")[0])
    return None


def _search(infos: tuple[Path, ...], root: Path, path: str, top: str) -> Distribution | None:
    relative = Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else ""
    wanted = re.sub(r"[-_.]+", "_", top).lower()
    likely = sorted(infos, key=lambda info: not re.sub(r"[-_.]+", "_", info.name).lower().startswith(wanted + "_"))
    for info in likely:
        record = _record(info)
        if record is not None and relative and record.lists(relative):
            return record.distribution
    return None


@dataclass(frozen=True, slots=True)
class _Record:
    distribution: Distribution
    text: str

    def lists(self, relative: str) -> bool:
        return f"\n{relative}," in self.text or f'\n"{relative}",' in self.text


@cache
def _record(info: Path) -> _Record | None:
    try:
        data = (info / "RECORD").read_bytes()
        metadata = (info / "METADATA").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # without RECORD nothing vouches for the files: they are treated like a user's
    fields = dict(re.findall(r"^(Name|Version):\s*(.+?)\s*$", metadata.partition("\n\n")[0], flags=re.MULTILINE))
    name, version = fields.get("Name", info.stem), fields.get("Version", "?")
    text = "\n" + data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    return _Record(Distribution(name, version, digest_of(data).hex()), text)


@cache
def _distributions(root: str) -> tuple[Path, ...]:
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.name.endswith(".dist-info"))
    except OSError:
        return ()
    return tuple(Path(root, name) for name in names)
