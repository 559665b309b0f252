"""What a build would do, told from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
import os
from pathlib import Path
import threading
from typing import TYPE_CHECKING, Any

from ninferbuild import link as linker
from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.configure import configured
from ninferbuild.ending import keep_to_the_end
from ninferbuild.models.bulk import collection_paused
from ninferbuild.plan import plan_parents, prepare_user_method
from ninferbuild.publish import behind_link
from ninferbuild.resolve import State
from ninferbuild.session import Session, open_cache, open_session

if TYPE_CHECKING:
    import networkx

    from ninferbuild.artifact.schema import Directory
    from ninferbuild.cache import Cache, Writer
    from ninferbuild.history import Explanation
    from ninferbuild.importance_use import ImportanceUse
    from ninferbuild.plan import Parent, PlannedRecipe
    from ninferbuild.recipe import Recipe
    from ninferbuild.target import Target


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One parent and the state of the action that makes it."""

    name: str
    parameters: tuple[str, ...]
    state: State
    format: str
    layout: str
    shape: tuple[int, ...]
    method: str
    bytes: int
    source_bytes: int
    key: str | None
    objects: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do.

    Attributes:
        directory: the artifact's directory as it would be written; ``provenance`` is final only once payloads exist.
        formats: format → (objects, payload bytes), weights and auxiliaries.
        file_sizes: (path, bytes) of each file, entry first.
        explanations: why actions would run; None unless that was asked for.
        importance: the files of importance vectors, and how many of the parameters that look there have one.
        notes: what a user would want to know of the target, a line each.
    """

    target: Target
    actions: tuple[PlannedAction, ...]
    directory: Directory
    payload_bytes: int
    file_sizes: tuple[tuple[Path, int], ...]
    formats: Mapping[str, tuple[int, int]]
    explanations: tuple[Explanation, ...] | None = None
    importance: tuple[ImportanceUse, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def file_bytes(self) -> int:
        return sum(size for _, size in self.file_sizes)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        explained = self.explanations
        more: dict[str, Any] = (
            {} if explained is None else {"explain": [explanation.to_json() for explanation in explained]}
        )
        if self.importance:
            more["importance"] = [use.to_json() for use in self.importance]
        if self.notes:
            more["notes"] = list(self.notes)
        return {
            "target": self.target.name,
            "out": str(self.target.out),
            "actions": [action.to_json() for action in self.actions],
            "formats": {name: {"objects": count, "bytes": size} for name, (count, size) in self.formats.items()},
            "payload_bytes": self.payload_bytes,
            "file_bytes": self.file_bytes,
            "files": [{"path": str(path), "bytes": size} for path, size in self.file_sizes],
            **more,
        }


def plan(
    target: Target,
    *,
    hash_sources: bool = False,
    device: str | None = None,
    rehash: bool = False,
    explain: bool = False,
) -> BuildPlan:
    """What :func:`build` would do, from headers alone.

    Args:
        hash_sources: read sources where that is needed to tell whether an action is cached.
        explain: say why actions would run.

    Raises:
        as :func:`build`, as far as nothing has to be encoded to find out.
    """
    target = replace(target, out=behind_link(target.out))
    keep_to_the_end(None)  # one plan at a time
    with previewed(target, hash_sources=hash_sources, device=device, rehash=rehash) as (session, cache):
        keep_to_the_end(session)
        explanations = None
        if explain:
            from ninferbuild.history import Explainer

            running = [action for action in session.actions if action.record is None]
            explanations = tuple(Explainer(cache, target.identity).explain(running))
        contents = session.contents()
        layout = linker.lay_out(
            contents, target.out.name, payload_digests=None, source_digests=session.source_digests()
        )
        session.refuse_inputs(target.out, layout)
        shared: set[int] = set()
        actions = []
        for parent, action in zip(session.planned.parents, session.action_of(), strict=True):
            spec, names = parent.target, parent.names
            more = f" (+{len(names) - 1})" if len(names) > 1 else ""
            actions.append(
                PlannedAction(
                    name=names[0] + more,
                    parameters=names,
                    state="cached" if id(action) in shared else action.state,
                    format=spec.format,
                    layout=spec.layout,
                    shape=spec.shape,
                    method=parent.method_name,
                    bytes=encoded_size(spec.layout, spec.format, spec.shape, spec.divisors),
                    source_bytes=action.source_bytes,
                    key=action.key.hex() if action.key is not None else None,
                    objects=(spec.id,),
                )
            )
            shared.add(id(action))
        formats: dict[str, tuple[int, int]] = {}
        for item in layout.directory.objects:
            if item.kind == "tensor":
                count, size = formats.get(item.format, (0, 0))
                formats[item.format] = (count + 1, size + item.bytes)
        return BuildPlan(
            target,
            tuple(actions),
            layout.directory,
            layout.directory.payload_bytes,
            tuple(zip(layout.paths(target.out), layout.lengths(), strict=True)),
            formats,
            explanations,
            session.importance,
            tuple(session.notes()),
        )


@contextmanager
def previewed(
    target: Target, *, hash_sources: bool = False, device: str | None = None, rehash: bool = False
) -> Iterator[tuple[Session, Cache | None]]:
    """The session of a target that is looked at and not built, its actions looked up, with the cache if there is one.

    Args:
        hash_sources: read sources where that is needed to tell whether an action is cached.
    """
    with ExitStack() as stack:
        stack.enter_context(collection_paused())
        cache, writer = _cache_for_planning(target, stack, hash_sources)
        session = stack.enter_context(open_session(target, cache, writer, device, rehash=rehash, peek=True))
        session.resolver.look_up(session.actions, hash_sources=hash_sources, cancel=threading.Event())
        _prepare_for_planning(session)
        yield session, cache


def graph(target: Target, *, device: str | None = None, out: Path | None = None) -> networkx.DiGraph:
    """The graph of a target's actions, each with its state: see :mod:`ninferbuild.action_graph`.

    Args:
        out: where the graph will be written.

    Raises:
        OptionError: ``out`` is a file that the target reads, or lies in its cache.
        as :func:`plan`.
    """
    from ninferbuild.action_graph import action_graph
    from ninferbuild.inputs import input_files, refuse_in_cache, refuse_inputs

    with previewed(target, device=device) as (session, _):
        if out is not None:
            refuse_inputs([out], input_files(session), "--out")
            refuse_in_cache([out], target.cache.directory(), "--out")
        return action_graph(session, session.contents())


def _cache_for_planning(target: Target, stack: ExitStack, hash_sources: bool) -> tuple[Cache | None, Writer | None]:
    """The cache if there is one. Planning makes none, and writes to it only what hashing found."""
    directory = target.cache.directory()
    if not (directory / "index").is_dir():
        return None, None
    if not hash_sources or not os.access(directory, os.W_OK):
        return stack.enter_context(open_cache(target, read_only=True)), None
    cache = stack.enter_context(open_cache(target))
    return cache, stack.enter_context(cache.writer())


def _prepare_for_planning(session: Session) -> None:
    """Call users' methods whose auxiliaries no record holds: sizes depend on them."""
    unknown = [action for action in session.actions if action.parent.rule is None and action.record is None]
    if not unknown:
        return
    from ninferbuild.user_actions import Lookups  # most recipes have no methods of their own

    for action in unknown:
        device = str(session.device())
        request = Lookups(action.parent).watch(action.parent.request, device)
        prepared = prepare_user_method(replace(action.parent, request=request), device)
        session.auxiliaries[id(action)] = prepared.auxiliaries


def parameters(target: Target, pattern: str | None = None) -> list[dict[str, Any]]:
    """Every logical parameter with what the recipe chose for it.

    ``auxiliaries`` are the roles that its uses have; what users' methods supply is known only once they ran.

    Args:
        pattern: shell-style pattern of names; ``*`` crosses ``/``. None: all.

    Raises:
        ValueError: the pattern matches nothing, or the target cannot be planned.
    """
    with configured(target) as ready:
        planned = plan_parents(ready.recipe, rows_per_chunk=target.rows_per_chunk)
        stored: dict[str, list[Parent]] = {}
        roles: dict[str, dict[str, None]] = {}
        for parent in planned.parents:
            for name in parent.names:
                stored.setdefault(name, []).append(parent)
        for table in (ready.recipe.auxiliary_overrides, *(p.checked.auxiliaries for p in planned.parents if p.checked)):
            for name, _, role in table:
                roles.setdefault(name, {})[role] = None
        logical = [(name, item.shape, item.inputs) for name, item in ready.model.parameters.items()]
        for use in planned.grafted_uses:
            for role in use.get("auxiliaries", {}):
                roles.setdefault(use["parameter"], {})[role] = None
        found = []
        for name, shape, inputs in (*logical, *_grafted(planned, ready.recipe)):
            if pattern is not None and name != pattern and not fnmatchcase(name, pattern):
                continue
            owner = name
            while owner in ready.recipe.aliases:
                owner = ready.recipe.aliases[owner]
            parents = list({id(parent): parent for parent in stored[owner]}.values())
            found.append(
                {
                    "name": name,
                    "shape": list(shape),
                    "inputs": list(inputs),
                    "format": ", ".join(dict.fromkeys(parent.target.format for parent in parents)),
                    "method": ", ".join(dict.fromkeys(parent.method_name for parent in parents)),
                    "parent": ", ".join(parent.target.id for parent in parents),
                    "auxiliaries": list(roles.get(name, ())),
                }
            )
    if not found:
        raise ValueError(f"{pattern!r} matched no logical parameter of {target.name}")
    return found


def _grafted(planned: PlannedRecipe, recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """(name, shape, inputs) of each parameter of a grafted component; part of an object has its elements as shape."""
    shapes = {spec.id: spec.shape for spec in planned.grafted}
    inputs: dict[str, list[str]] = {}
    for use in planned.grafted_uses:
        inputs.setdefault(use["parameter"], []).append(use["input"])
    for taken in recipe.grafts:
        for name in taken.component.bindings:
            whole = planned.bindings[name].get("object")
            shape = (taken.component.elements(name) or 0,) if whole is None else shapes[whole]
            yield name, shape, tuple(inputs.get(name, ()))
