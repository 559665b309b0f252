"""The graph of one target's actions: source, encode, resource, auxiliary and link nodes.

One builder serves the execution, which runs the encode nodes, and the command that shows the graph. Linking has a node
and no work: it may have to be repeated after damaged payloads were made again, so the build does it when the graph has
been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninferbuild.artifact.layouts import encoded_size
from ninferbuild.graph import Task, graph_of
from ninferbuild.models.bulk import collection_paused

if TYPE_CHECKING:
    import networkx

    from ninferbuild.link import Contents
    from ninferbuild.method import AuxiliaryKey
    from ninferbuild.resolve import Action
    from ninferbuild.session import Session
    from ninferbuild.sources.description import Part
    from ninferbuild.sources.logical import LogicalSource
    from ninferbuild.sources.regions import SourceFile

KINDS = ("source", "encode", "resource", "auxiliary", "link")
"""Kinds of nodes, in the order in which they stand in the graph. A node's name starts with its kind and a colon."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A stored tensor that actions read, or what a function reads for them.

    Attributes:
        name: of the tensor in its file, or the label of a source that no file is known of.
        source: name of the opened source that the file belongs to, if any.
        file: the file; None for values in memory and for functions.
    """

    name: str
    source: str | None
    file: SourceFile | None


@collection_paused()
def action_graph(
    session: Session, contents: Contents, run: Callable[[Action], object] | None = None
) -> networkx.DiGraph:
    """The graph of a session whose actions have been looked up.

    Args:
        contents: what the linker will write; users' methods have been prepared for it.
        run: runs one action. Actions with a cached result have nothing to do, and none has without ``run``.
    """
    return graph_of(_tasks(session, contents, run))


def _tasks(session: Session, contents: Contents, run: Callable[[Action], object] | None) -> Iterator[Task]:
    """Every node after what it needs."""
    sources = _Sources(session)
    encodes: list[Task] = []
    for action in session.actions:
        name = f"encode:{action.parent.target.id}"
        work = None if run is None or action.record is not None else _work(run, action)
        cost = max(action.source_bytes, 1) if work is not None else 0
        encodes.append(Task(name, "encode", sources.of(action), work, cost, action))
    yield from sources.tasks.values()
    yield from encodes
    linked = [task.name for task in encodes]
    for identifier, data in contents.resources.items():
        linked.append(f"resource:{identifier}")
        yield Task(linked[-1], "resource", subject=(identifier, len(data)))
    needs = _auxiliary_needs(session, contents, encodes)
    for item in contents.auxiliaries:
        linked.append(f"auxiliary:{item.id}")
        yield Task(linked[-1], "auxiliary", tuple(needs.get(item.id, {})), subject=item)
    out = session.configured.target.out
    yield Task(f"link:{out.name}", "link", tuple(linked), subject=out)


def _work(run: Callable[[Action], object], action: Action) -> Callable[[], object]:
    return lambda: run(action)


def _auxiliary_needs(session: Session, contents: Contents, encodes: Sequence[Task]) -> dict[str, dict[str, None]]:
    """Auxiliary object → the encode nodes whose methods supply its value; none for a value that the recipe gave."""
    if not contents.auxiliaries:
        return {}
    makers = {
        parameter: task.name
        for task, action in zip(encodes, session.actions, strict=True)
        for parent in action.parents
        for parameter in parent.names
    }
    given: Mapping[AuxiliaryKey, object] = session.configured.recipe.auxiliary_overrides
    needs: dict[str, dict[str, None]] = {}
    for use in contents.uses:
        if use["parameter"] not in session.configured.recipe.selections:
            continue  # a grafted component brings its own
        for role, binding in use.get("auxiliaries", {}).items():
            key = (use["parameter"], use["input"], role)
            maker = makers.get(session.configured.recipe.resolve(use["parameter"]))
            if key not in given and maker is not None:
                needs.setdefault(binding["object"], {})[maker] = None
    return needs


class _Sources:
    """The source nodes of a graph, one for each stored tensor, made as actions are found to read them."""

    def __init__(self, session: Session):
        self.tasks: dict[tuple[int, str], Task] = {}
        self._opened = session.configured.sources
        self._names: dict[int, str | None] = {}
        self._taken: dict[str, int] = {}

    def of(self, action: Action) -> tuple[str, ...]:
        """Names of the nodes that the inputs of ``action`` come from."""
        needed: dict[str, None] = {}
        for item in action.parent.request.inputs:
            described = item.source.description
            if described is None:
                needed[self._opaque(item.source)] = None
                continue
            for part in described.parts:
                needed[self._stored(part, item.source.label)] = None
        return tuple(needed)

    def _stored(self, part: Part, label: str) -> str:
        if not part.region.spans:
            return self._node((0, part.name or label), part.name or label, None)
        file = part.region.spans[0].file
        if file.path is None:  # an array, whatever rows of it are taken
            return self._node((id(file), ""), label, file)
        return self._node((id(file), part.name), part.name or label, file)

    def _opaque(self, source: LogicalSource) -> str:
        origin, _ = source.derivation
        return self._node((id(origin.read_values), origin.label), origin.label, None)

    def _node(self, key: tuple[int, str], name: str, file: SourceFile | None) -> str:
        task = self.tasks.get(key)
        if task is None:
            source = self._source_of(file)
            full = f"source:{name}" if source is None else f"source:{source}/{name}"
            count = self._taken[full] = self._taken.get(full, 0) + 1
            if count > 1:  # two arrays in memory may bear one label
                full = f"{full}#{count}"
            task = self.tasks[key] = Task(full, "source", subject=SourceTensor(name, source, file))
        return task.name

    def _source_of(self, file: SourceFile | None) -> str | None:
        if file is None:
            return None
        if id(file) not in self._names:
            self._names[id(file)] = self._opened.name_of(file)
        return self._names[id(file)]


def attributes(task: Task) -> dict[str, str | int]:
    """What is worth showing of a node, besides its name: plain values."""
    subject: Any = task.subject
    shown: dict[str, str | int] = {"kind": task.kind}
    if task.kind == "source":
        shown |= {"label": subject.name}
        if subject.source is not None:
            shown["source"] = subject.source
        if subject.file is not None and subject.file.path is not None:
            shown["file"] = str(subject.file.path)
    elif task.kind == "encode":
        shown |= _of_encode(subject)
    elif task.kind == "resource":
        identifier, size = subject
        shown |= {"label": identifier, "bytes": size}
    elif task.kind == "auxiliary":
        shown |= {"label": subject.id, "format": subject.format, "bytes": len(subject.data)}
    else:
        shown |= {"label": subject.name, "file": str(subject)}
    return shown


def _of_encode(action: Action) -> dict[str, str | int]:
    parent = action.parent
    spec = parent.target
    shown: dict[str, str | int] = {
        "label": _first(parent.names),
        "state": action.state,
        "method": parent.method_name,
        "format": spec.format,
        "layout": spec.layout,
        "shape": str(list(spec.shape)),
        "objects": " ".join(other.target.id for other in action.parents),
        "parameters": " ".join(dict.fromkeys(name for other in action.parents for name in other.names)),
        "bytes": encoded_size(spec.layout, spec.format, spec.shape, spec.divisors),
        "source_bytes": action.source_bytes,
    }
    if action.key is not None:
        shown["key"] = action.key.hex()
    return shown


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" (+{len(names) - 1})" if len(names) > 1 else "")
