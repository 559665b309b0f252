"""An artifact with components of another one: what ``ninferbuild graft`` writes.

Nothing is decoded and no checkpoint is needed. Payloads are copied block by block, each block once, into temporaries
that get their names when all of them are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
import time
from typing import Any

from ninferbuild import link as linker
from ninferbuild import standing
from ninferbuild.artifact.framing import SegmentMap
from ninferbuild.artifact.objects import ArtifactObject, ResourceObject, TensorObject
from ninferbuild.artifact.schema import (
    ArtifactError,
    Directory,
    FileRecord,
    ResourceSpec,
    TensorSpec,
    decode_directory,
    plan_objects,
)
from ninferbuild.bindings import WEIGHT
from ninferbuild.digest import combine
from ninferbuild.grafting import FIRST_ID, check_component, readers_of, renamed_use
from ninferbuild.inputs import files_of, project_files, refuse_inputs
from ninferbuild.payload import PayloadWriter
from ninferbuild.publish import StagedFile, behind_link, publish, recover, require_regular
from ninferbuild.recipe import ACTIVATION_DIVISOR
from ninferbuild.report import CONVERTER, encode_report, report_path
from ninferbuild.sources.artifact import ArtifactSource, StoredComponent, renamed_binding
from ninferbuild.verify import copy_object, copy_sound
from ninferbuild.version import VERSION
from ninferbuild.writeback import WriteBehind, stays_cached

RECIPE = "graft"
"""``provenance.recipe`` of artifacts that were put together from others."""


@dataclass(frozen=True, slots=True)
class GraftResult:
    """What was written.

    Attributes:
        files: (path, bytes) of each file, entry first.
        grafted: component → (objects, payload bytes) that were taken for it.
    """

    out: Path
    artifact_id: str
    files: tuple[tuple[Path, int], ...]
    objects: int
    payload_bytes: int
    grafted: Mapping[str, tuple[int, int]]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "out": str(self.out),
            "artifact_id": self.artifact_id,
            "files": [{"path": str(path), "bytes": size} for path, size in self.files],
            "objects": self.objects,
            "payload_bytes": self.payload_bytes,
            "grafted": {name: {"objects": count, "bytes": size} for name, (count, size) in self.grafted.items()},
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class _Taken:
    """An object of the output: where it is from, its id there, and the name of that source in the provenance."""

    spec: TensorSpec | ResourceSpec
    source: ArtifactSource
    id: str
    origin: str


def graft_artifact(
    artifact: Path,
    components: Sequence[str],
    donor: Path,
    out: Path,
    *,
    name: str | None = None,
    max_file_bytes: int | None = None,
    overwrite: bool = False,
    observe: Callable[[int, int], None] | None = None,
) -> GraftResult:
    """Write ``out``: ``artifact`` with ``components`` of ``donor``, byte for byte.

    Args:
        artifact, donor: entry files.
        name: ``metadata.name``; None keeps that of ``artifact``.
        overwrite: replace an output that ninferbuild did not make.
        observe: called with the payload bytes written so far and in all.

    Raises:
        OptionError: the output is one of the inputs.
        ValueError: the donor lacks a component, the artifact has it, or the two do not suit each other.
        ArtifactError, OSError: a file is damaged, missing or in the way; nothing was published.
    """
    began = time.perf_counter()
    out = behind_link(out)
    given = [("the artifact", artifact), ("the donor", donor), *project_files()]
    refuse_inputs([out, report_path(out)], given, "--out")
    for made in (out, report_path(out)):
        require_regular(made)
    standing.require_writable(out)
    recover(out)
    standing.refuse_foreign([out], overwrite=overwrite)
    with ExitStack() as stack:
        base, other = (stack.enter_context(ArtifactSource(path)) for path in (artifact, donor))
        plan = _Plan(base, other, components)
        draft = linker.layout_of(plan.directory(name, {}), out.name, max_file_bytes)
        read = [
            (what, path) for what, store in (("the artifact", base), ("the donor", other)) for path in files_of(store)
        ]
        refuse_inputs([*draft.paths(out), report_path(out)], [*read, *project_files()], "--out")
        out.parent.mkdir(parents=True, exist_ok=True)
        linker.require_space(out.parent, sum(draft.lengths()))
        standing.refuse_foreign(draft.paths(out), overwrite=overwrite)
        staged: list[StagedFile] = []
        try:
            for path, length in zip(draft.paths(out), draft.lengths(), strict=True):
                staged.append(StagedFile(path, length))
            digests = _copy(plan, draft, staged, observe)
            layout = linker.layout_of(plan.directory(name, digests), out.name, max_file_bytes)
            decode_directory(layout.text, entry_name=out.name)
            linker.write_framing(layout, staged)
            result = _result(plan, layout, out, time.perf_counter() - began)
            report = StagedFile(report_path(out))
            staged.append(report)
            report.write(0, encode_report(_report(plan, layout, result, digests)))
            paths = layout.paths(out)
            publish(staged[:-1], report, lambda: standing.surplus_of(paths, overwrite=overwrite))
        finally:
            for file in staged:
                file.discard()
    return result


class _Plan:
    """The objects and the directory of the output."""

    def __init__(self, base: ArtifactSource, donor: ArtifactSource, components: Sequence[str]):
        self.base, self.donor = base, donor
        kept = base.artifact.directory
        self.taken = [_Taken(_spec(item), base, item.id, "base") for item in base.artifact.objects]
        self.components = dict(kept.components)
        self.bindings = dict(kept.bindings)
        self.uses = list(kept.uses)
        self.metadata = kept.metadata
        for name in dict.fromkeys(components):
            component = donor.component(name)
            check_component(component, donor, self.components, self.bindings)
            self._add(component)

    def _add(self, component: StoredComponent) -> None:
        present = {item.spec.id: item for item in self.taken}
        for role, resource in component.resources.items():
            there = present.get(resource.id)
            if there is None:
                self.taken.append(_Taken(_spec(resource), self.donor, resource.id, component.name))
            elif there.source.artifact.read_object(there.id) != self.donor.artifact.read_object(resource.id):
                raise ValueError(
                    f"{self.donor.path}: resource {resource.id} ({role}) differs from that of {self.base.path}"
                )
        numbers = [int(key.removeprefix(WEIGHT)) for key in present if key.removeprefix(WEIGHT).isdecimal()]
        first = max([FIRST_ID, *(number + 1 for number in numbers)])
        names = {tensor.id: f"{WEIGHT}{first + index:06d}" for index, tensor in enumerate(component.tensors)}
        self.taken += [
            _Taken(_spec(tensor, names[tensor.id]), self.donor, tensor.id, component.name)
            for tensor in component.tensors
        ]
        self.components[component.name] = component.record
        for reader in readers_of(component):
            self._add_reader(reader)
        self.uses += [renamed_use(use, names) for use in component.uses]
        self.bindings |= {key: renamed_binding(binding, names) for key, binding in component.bindings.items()}

    def _add_reader(self, use: Mapping[str, Any]) -> None:
        """Let a parameter of the base multiply a state of the new component, if it is there and does not yet."""
        parameter, used = use["parameter"], use["input"]
        others = [own for own in self.uses if own["parameter"] == parameter]
        if parameter not in self.bindings or any(own["input"] == used for own in others):
            return
        auxiliaries: dict[str, Any] = next((own["auxiliaries"] for own in others if "auxiliaries" in own), {})
        policy = use.get("activation_policy")
        if policy == "AllowA4" and ACTIVATION_DIVISOR in auxiliaries:
            raise ValueError(
                f"{self.base.path}: {parameter} would need an activation divisor for {used}; build the artifact with "
                "--graft and a recipe that gives one"
            )
        # What the weight was transformed with applies to all that it multiplies.
        shared = {role: binding for role, binding in auxiliaries.items() if role != ACTIVATION_DIVISOR}
        made: dict[str, Any] = {"parameter": parameter, "input": used}
        if policy is not None:
            made["activation_policy"] = policy
        self.uses.append({**made, "auxiliaries": shared} if shared else made)

    def directory(self, name: str | None, digests: Mapping[str, bytes]) -> Directory:
        """The directory; without ``digests`` (object id → digest) its provenance has the right size and no meaning."""
        objects = plan_objects([item.spec for item in self.taken])
        known = [digests.get(item.spec.id, bytes(16)) for item in self.taken]
        origins: dict[str, list[bytes]] = {}
        for item, digest in zip(self.taken, known, strict=True):
            origins.setdefault(item.origin, []).append(digest)
        provenance = {
            "converter": CONVERTER,
            "recipe": RECIPE,
            "sources": {origin: {"digest": combine(consumed).hex()} for origin, consumed in origins.items()},
            "payload": combine(known).hex(),
        }
        metadata = self.metadata if name is None else {**self.metadata, "name": name}
        files = (FileRecord(None, objects[-1].offset + objects[-1].bytes),)
        return Directory(self.components, tuple(objects), self.bindings, self.uses, files, metadata, provenance)


def _spec(item: ArtifactObject, identifier: str | None = None) -> TensorSpec | ResourceSpec:
    name = item.id if identifier is None else identifier
    if isinstance(item, TensorObject):
        return TensorSpec(name, item.shape, item.format, item.layout, item.divisors)
    assert isinstance(item, ResourceObject)
    return ResourceSpec(name, item.bytes)


def _copy(
    plan: _Plan,
    layout: linker.Layout,
    staged: Sequence[StagedFile],
    observe: Callable[[int, int], None] | None,
) -> dict[str, bytes]:
    """Copy every payload to its place; object id → digest.

    Raises:
        ArtifactError: damage was met on the way: an illegal word or, in an artifact made here that is copied whole, a
            payload that is not the one that it was published with.
    """
    behind = WriteBehind(keep=stays_cached(sum(layout.lengths())))
    writer = PayloadWriter(SegmentMap(layout.directory.files, layout.payload_offset), staged, behind)
    done, digests = 0, {}
    root = _root_of(plan.base)
    for item, placed in zip(plan.taken, layout.directory.objects, strict=True):

        def put(offset: int, data: bytes, begin: int = placed.offset) -> None:
            nonlocal done
            writer.put(begin + offset, data)
            done += len(data)
            if observe is not None:
                observe(done, layout.directory.payload_bytes)

        copy = copy_object if root is not None and item.source is plan.base else copy_sound
        digests[placed.id] = copy(item.source.artifact, item.id, put)
    behind.finish()
    kept = combine(digests[item.spec.id] for item in plan.taken if item.source is plan.base).hex()
    if root is not None and kept != root:
        raise ArtifactError(
            f"{plan.base.path}: provenance.payload is {root!r}, but the payloads give {kept}: the artifact is damaged; "
            "get it again"
        )
    return digests


def _root_of(source: ArtifactSource) -> object:
    """The root digest of the payloads that an artifact made here was published with; None for others'."""
    provenance = source.artifact.directory.provenance
    return provenance.get("payload") if provenance.get("converter") == CONVERTER else None


def _result(plan: _Plan, layout: linker.Layout, out: Path, seconds: float) -> GraftResult:
    grafted: dict[str, tuple[int, int]] = {}
    for item, placed in zip(plan.taken, layout.directory.objects, strict=True):
        if item.origin != "base":
            count, size = grafted.get(item.origin, (0, 0))
            grafted[item.origin] = (count + 1, size + placed.bytes)
    return GraftResult(
        out=out,
        artifact_id=layout.artifact_id.hex(),
        files=tuple(zip(layout.paths(out), layout.lengths(), strict=True)),
        objects=len(layout.directory.objects),
        payload_bytes=layout.directory.payload_bytes,
        grafted=grafted,
        seconds=seconds,
    )


def _report(plan: _Plan, layout: linker.Layout, result: GraftResult, digests: Mapping[str, bytes]) -> dict[str, Any]:
    """The report beside the artifact, in the form of a build's."""
    directory = layout.directory
    base = {"path": str(plan.base.path), "artifact_id": plan.base.artifact_id}
    donor = {"path": str(plan.donor.path), "artifact_id": plan.donor.artifact_id}
    return {
        "components": directory.components,
        "name": directory.metadata.get("name"),
        "output": str(result.out),
        "provenance": {
            "converter": CONVERTER,
            "recipe": RECIPE,
            "sources": {"base": base, **dict.fromkeys(result.grafted, donor)},
        },
        "parameters": len(directory.bindings),
        "uses": len(directory.uses),
        "objects": len(directory.objects),
        "methods": [
            {
                "object": placed.id,
                "sources": [f"{item.source.path}:{item.id}"],
                "method": RECIPE,
                "format": placed.format,
                "layout": placed.layout,
                "shape": list(placed.shape),
                "payload_bytes": placed.bytes,
                "digest": digests[placed.id].hex(),
            }
            for item, placed in zip(plan.taken, directory.objects, strict=True)
            if isinstance(placed, TensorObject)
        ],
        "artifact_id": result.artifact_id,
        "files": [
            {"path": str(path), "payload_bytes": record.payload_bytes}
            for (path, _), record in zip(result.files, directory.files, strict=True)
        ],
        "payload_bytes": result.payload_bytes,
        "seconds": result.seconds,
        "ninferbuild": VERSION,
    }
