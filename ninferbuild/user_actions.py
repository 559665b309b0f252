"""Actions that run a user's function: what enters their manifests, and how they are run.

A user's function sees more than a built-in method (names, labels, policies, the device), so its manifest holds more.
What the function merely *could* look up, such as the policy of another parameter, is not part of the manifest; it is
recorded when it is looked up, like an opened file, and checked before a later hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import metadata
import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
import xxhash

from ninferbuild.artifact.schema import TensorSpec
from ninferbuild.cache import Dep
from ninferbuild.canonical import canonical
from ninferbuild.fingerprint import Fingerprint, Fingerprints, Reason, digest_dep
from ninferbuild.manifest import declares_content
from ninferbuild.method import AuxiliaryKey, AuxiliaryValue, PrepareRequest
from ninferbuild.sources.logical import LogicalSource

if TYPE_CHECKING:
    import torch

    from ninferbuild.plan import Parent

TORCH_THREADS = 4
"""Intra-operation threads of a user's function. Sums depend on it, so it is the same on every machine."""

LOOKUP = "lookup:"
"""Prefix of a dependency that is no file but something looked up in the request."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """What a user's functions add to an action.

    Attributes:
        lines: manifest lines.
        fingerprints: of the functions that run.
        reasons: why the action cannot be cached; empty if it can.
    """

    lines: list[str]
    fingerprints: list[Fingerprint]
    reasons: list[Reason]


def user_code_of(parent: Parent, device: Callable[[], torch.device], taken: Fingerprints) -> UserCode:
    """The user's functions behind one parent.

    Args:
        device: resolves the device; called only for a user's method, whose arithmetic may depend on it.
        taken: fingerprints of this build.
    """
    request = parent.request
    lines = [
        f"python: {sys.version_info.major}.{sys.version_info.minor}",
        f"torch: {_version('torch')}",
        f"numpy: {_version('numpy')}",
    ]
    fingerprints: list[Fingerprint] = []

    def add(name: str, function: object) -> None:
        print_ = taken.of(function)
        lines.extend(f"{name}.{number:04}: {line}" for number, line in enumerate(print_.lines))
        fingerprints.append(print_)

    for index, item in enumerate(request.inputs):
        name = f"input.{index:05}"
        source = item.source
        if source.description is None and declares_content(source):
            for role in ("read_values", "read_encoded"):
                if (function := getattr(source, role)) is not None:
                    add(f"{name}.{role}", function)
            if source.fingerprint is not None:
                lines.append(f"{name}.fingerprint: {canonical(source.fingerprint)}")
            for number, path in enumerate(source.files or ()):
                lines.append(f"{name}.file.{number:04}: {digest_dep(path).hex()}")
        if parent.rule is None:
            lines.append(f"{name}.parameter: {item.parameter}")
            for use in item.uses:
                lines.append(f"{name}.use: {canonical(use)} {request.policies[use]}")
                for key, value in request.auxiliary_overrides.items():
                    if key[:2] == use:
                        lines.append(f"{name}.override: {canonical(key)} {_auxiliary(value)}")
    if parent.rule is None:
        add("code", parent.method)
        lines += [f"device: {device_name(device())}", f"rows per chunk: {request.rows_per_chunk}"]
    reasons = [reason for print_ in fingerprints for reason in print_.uncacheable]
    return UserCode(lines, fingerprints, reasons)


@cache
def _version(distribution: str) -> str:
    return metadata.version(distribution)  # parses a file, and there may be thousands of actions


def device_name(device: torch.device) -> str:
    """What a function's arithmetic may depend on: ``cpu``, or the GPU's name."""
    if device.type == "cpu":
        return "cpu"
    import torch

    return f"{device.type} {torch.cuda.get_device_name(device)}"


def _auxiliary(value: AuxiliaryValue) -> str:
    return f"{value.format} {list(value.shape)} {xxhash.xxh3_128_hexdigest(value.data)}"


class Lookups:
    """What a user's function looked up beyond its own inputs, as dependencies."""

    def __init__(self, parent: Parent):
        request = parent.request
        self._own = {use for item in request.inputs for use in item.uses}
        self.found: dict[str, bytes] = {}

    def note(self, what: str, value: object) -> None:
        self.found[LOOKUP + what] = xxhash.xxh3_128_digest(repr(value).encode())

    def deps(self) -> list[Dep]:
        return [Dep(path=path, digest=digest) for path, digest in sorted(self.found.items())]

    def _watched(self, value: Any, kind: type[Any], what: str) -> Any:
        """A copy of a frozen record, of its subclass ``kind``."""
        watched = kind(**{part.name: getattr(value, part.name) for part in fields(value)})
        assign = structs.force_setattr if isinstance(watched, msgspec.Struct) else object.__setattr__
        assign(watched, "noted", lambda found: self.note(what, found))
        return watched

    def watch(self, request: PrepareRequest, device: str) -> PrepareRequest:
        """The request as the function receives it: the same values, with lookups noted."""
        inputs = tuple(
            structs.replace(item, source=self._watched(item.source, _WatchedSource, f"label {index}"))
            for index, item in enumerate(request.inputs)
        )
        return replace(
            request,
            target=self._watched(request.target, _WatchedSpec, "target id"),
            inputs=inputs,
            device=device,
            policies=_WatchedMapping("policy", request.policies, self, lambda key: key in self._own),
            auxiliary_overrides=_WatchedMapping(
                "override", request.auxiliary_overrides, self, lambda key: tuple(key[:2]) in self._own
            ),
        )


Noted = Callable[[object], None]


class _WatchedSpec(TensorSpec):
    """A target that notes when its id is looked at: the id is a position in the artifact, which other parents move."""

    noted: Noted | None = None  # a copy made by a function has none: making it looked at the id already

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "id" and (noted := super().__getattribute__("noted")) is not None:
            noted(value)
        return value


class _WatchedSource(LogicalSource, frozen=True, eq=False, kw_only=True):
    """A source that notes when its label is looked at: the label holds the path of the checkpoint."""

    noted: Noted | None = None  # as above

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "label" and (noted := super().__getattribute__("noted")) is not None:
            noted(value)
        return value


class _WatchedMapping(Mapping[Any, Any]):
    """A mapping that notes which foreign keys were looked up; walking through it notes the whole."""

    def __init__(self, name: str, inner: Mapping[Any, Any], lookups: Lookups, own: Callable[[Any], bool]):
        self._name, self._inner, self._lookups, self._own = name, inner, lookups, own

    def __getitem__(self, key: Any) -> Any:
        value = self._inner.get(key)
        if not self._own(key):
            self._lookups.note(f"{self._name} {key!r}", value)
        return self._inner[key]

    def __iter__(self) -> Iterator[Any]:
        self._lookups.note(self._name, sorted(self._inner.items(), key=repr))
        return iter(self._inner)

    def __len__(self) -> int:
        self._lookups.note(self._name, sorted(self._inner.items(), key=repr))
        return len(self._inner)


def lookup_digest(what: str, parent: Parent) -> bytes | None:
    """The digest of a recorded lookup as it would be found today; None when it no longer exists."""
    request = parent.request
    name = what.removeprefix(LOOKUP)
    if name == "target id":
        return xxhash.xxh3_128_digest(repr(request.target.id).encode())
    if name.startswith("label "):
        index = int(name.removeprefix("label "))
        return xxhash.xxh3_128_digest(repr(request.inputs[index].source.label).encode())
    for kind, mapping in (("policy", request.policies), ("override", request.auxiliary_overrides)):
        if name == kind:
            return xxhash.xxh3_128_digest(repr(sorted(mapping.items(), key=repr)).encode())
        if name.startswith(kind + " "):
            wanted = name.removeprefix(kind + " ")
            value = next((found for key, found in mapping.items() if repr(key) == wanted), None)
            return xxhash.xxh3_128_digest(repr(value).encode())
    return None


def still_holds(deps: tuple[Dep, ...], parent: Parent) -> bool:
    """Whether everything a recorded run opened or looked up is unchanged."""
    return next(changed_deps(deps, parent), None) is None


def changed_deps(deps: tuple[Dep, ...], parent: Parent) -> Iterator[str]:
    """What a recorded run opened or looked up and would find changed today: paths, and names of lookups."""
    for dep in deps:
        if dep.path.startswith(LOOKUP):
            if lookup_digest(dep.path, parent) != dep.digest:
                yield dep.path.removeprefix(LOOKUP)
        else:
            try:
                unchanged = digest_dep(dep.path) == dep.digest
            except OSError:
                unchanged = False
            if not unchanged:
                yield dep.path


AuxiliaryPosition = tuple[int, int, str]
"""(input, use of the input, role); (-1, -1, …) for a use of a parameter that is no input of the parent."""


def positions(
    auxiliaries: Mapping[AuxiliaryKey, AuxiliaryValue], request: PrepareRequest
) -> list[tuple[AuxiliaryPosition, AuxiliaryValue]]:
    """Auxiliaries by position instead of by name, so that a record serves any layer."""
    places = {use: (index, number) for index, item in enumerate(request.inputs) for number, use in enumerate(item.uses)}
    found: list[tuple[AuxiliaryPosition, AuxiliaryValue]] = []
    for (parameter, input_name, role), value in auxiliaries.items():
        place = places.get((parameter, input_name))
        if place is None:
            found.append(((-1, -1, "\0".join((parameter, input_name, role))), value))
        else:
            found.append(((*place, role), value))
    return found


def by_name(position: AuxiliaryPosition, request: PrepareRequest) -> AuxiliaryKey:
    """The key of an auxiliary stored by position."""
    index, number, role = position
    if index < 0:
        parameter, input_name, role = role.split("\0")
        return parameter, input_name, role
    parameter, input_name = request.inputs[index].uses[number]
    return parameter, input_name, role


@contextmanager
def settled_torch() -> Iterator[None]:
    """torch as a user's function runs under it: a fixed thread count, deterministic algorithms, no TF32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    import torch

    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.set_num_threads(TORCH_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
