"""What a traversal of user code has found: facts, reasons, and the labels that tell objects apart."""

from __future__ import annotations

from collections.abc import Mapping
import importlib
import sys
from typing import Any

import xxhash

from ninferbuild.bytecode import Reference
from ninferbuild.hazards import PATH_ATTRIBUTES, Hazard, package_hazard, standard_library_hazard
from ninferbuild.lazy_torch import is_loaded
from ninferbuild.origins import Origin
from ninferbuild.own_versions import CAPTURED, version_lines
from ninferbuild.reason import Reason

MUTATES = Hazard("it changes while the function runs", "keep the state inside the function, or pass it as an argument")
COMPILED = Hazard("it is compiled code of no installed package", "install its package with pip")

SHOWN = 160
"""Characters of a value that a line shows; of a longer one, half of them and a digest."""


class Findings:
    """The lines of one fingerprint and the reasons against keeping results.

    Labels, and so the lines, depend on names and on the order in which names sort, not on where things stand in a file
    or in memory.
    """

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.reasons: dict[str, Reason] = {}
        self._labels: dict[int, str] = {}
        self._label_counts: dict[str, int] = {}
        self._alive: list[object] = []  # an id is an identity only as long as its object lives
        self._path_users: dict[tuple[str, str], None] = {}
        self._knows_paths = False

    def refuse(self, where: str, hazard: Hazard) -> str:
        """Note a reason; the first one about an object is enough."""
        self.reasons.setdefault(where, Reason(where, hazard.why, hazard.fix))
        return "uncacheable"

    def fact(self, name: str, value: str) -> None:
        """Add a line; ``value`` may be of any length."""
        self.lines[f"{name} = {shown(value)}"] = None

    def label(self, thing: object, name: str) -> tuple[str, bool]:
        """The label of an object and whether it is new; several objects of one name are told apart by numbers."""
        known = self._labels.get(id(thing))
        if known is not None:
            return known, False
        count = self._label_counts[name] = self._label_counts.get(name, 0) + 1
        label = self._labels[id(thing)] = name if count == 1 else f"{name}#{count}"
        self._alive.append(thing)
        return label, True

    def namespace(self, namespace: Mapping[str, Any]) -> str:
        """The label of a module's namespace."""
        return self.label(namespace, str(namespace.get("__name__", "?")))[0]

    def note_origin(self, origin: Origin, module: str, where: str) -> None:
        """The lines about a module that is not a user's."""
        if origin.kind == "installed":
            self.lines[f"package {origin.distribution}"] = None
        elif origin.kind == "own":
            versions = version_lines(module)
            if versions is None:
                self.refuse(where, CAPTURED)
            self.lines.update(dict.fromkeys(versions or ()))
        elif origin.kind == "user":
            self.refuse(where, COMPILED)
        else:
            self.lines[f"python {sys.version_info.major}.{sys.version_info.minor}"] = None

    def note_use(
        self, origin: Origin, module: str, chain: tuple[str, ...], where: str, reference: Reference | None = None
    ) -> None:
        """The lines about what is not a user's, and the reasons when it is known for hidden inputs."""
        self.note_origin(origin, module, where)
        self._knows_paths = self._knows_paths or module.partition(".")[0] == "pathlib"
        if reference is not None and reference.stores:
            self.refuse(where, MUTATES)
        check = {"stdlib": standard_library_hazard, "installed": package_hazard}.get(origin.kind)
        hazard = check(module, chain, reference.call if reference else None) if check is not None else None
        if hazard is not None:
            self.refuse(where, hazard)

    def note_paths(self) -> None:
        """Something of a path is in reach, so that attributes may be those of a path."""
        self._knows_paths = True

    def note_attribute(self, attribute: str, where: str) -> None:
        """An attribute whose name looks something up in the file system if it is that of a path."""
        self._path_users[where, attribute] = None

    def keep_alive(self, thing: object) -> None:
        """``thing`` is known by its id from now on."""
        self._alive.append(thing)

    def finish(self) -> None:
        """Add what depends on everything else."""
        if self._knows_paths:
            for where, attribute in self._path_users:
                self.refuse(f"{where} (.{attribute})", PATH_ATTRIBUTES[attribute])
        self.lines.update(dict.fromkeys(_torch_settings()))


def shown(text: str) -> str:
    """A text as a line shows it: itself, or its beginning, its length and a digest."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}… {len(text)} {text_digest(text)}"


def text_digest(text: str) -> str:
    """The digest that stands for a text, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def _torch_settings() -> list[str]:
    """Global settings of torch that a recipe changed and that decide what its functions compute."""
    if not is_loaded():
        return []
    torch = importlib.import_module("torch")
    settings = {
        "dtype": (torch.get_default_dtype(), torch.float32),
        "device": (str(torch.get_default_device()), "cpu"),
        "float32 matmul precision": (torch.get_float32_matmul_precision(), "highest"),
    }
    return [f"torch default {name} = {found}" for name, (found, usual) in settings.items() if found != usual]
