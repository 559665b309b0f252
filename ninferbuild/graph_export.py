"""A graph of actions as text: Graphviz, Mermaid, GraphML, JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ninferbuild.action_graph import attributes

if TYPE_CHECKING:
    import networkx

Format = Literal["dot", "mermaid", "graphml", "json"]

_DOT_SHAPES = {
    "source": "cylinder",
    "encode": "box",
    "resource": "note",
    "auxiliary": "ellipse",
    "link": "doubleoctagon",
}
_MERMAID_SHAPES = {
    "source": ("[(", ")]"),
    "encode": ("[", "]"),
    "resource": ("[/", "/]"),
    "auxiliary": ("(", ")"),
    "link": ("[[", "]]"),
}
_STATE_COLOURS = {"cached": "#d9ead3", "run": "#f9cb9c", "unknown": "#fff2cc"}


def export(graph: networkx.DiGraph, format: Format) -> str:
    """The text of ``graph``, ending in a newline.

    Args:
        format: ``dot`` for Graphviz, ``mermaid`` for a flow chart in Markdown, ``graphml`` and ``json`` for programs.
            JSON is ``{"nodes": [{"id": …, "kind": …, …}], "edges": [[from, to]]}``.
    """
    return _WRITERS[format](graph)


def is_export(path: Path) -> bool:
    """Whether the file at ``path`` begins as :func:`export` begins in one of its formats."""
    with path.open("rb") as file:
        return file.read(max(map(len, _BEGINNINGS))).startswith(_BEGINNINGS)


def _shown(graph: networkx.DiGraph) -> Iterator[tuple[str, dict[str, str | int]]]:
    for name, task in graph.nodes(data="task"):
        yield name, attributes(task)


def _label(facts: dict[str, str | int]) -> list[str]:
    """Lines of a node's label: what it is, and for an action what it makes."""
    lines = [str(facts["label"])]
    if facts["kind"] == "encode":
        lines.append(f"{facts['method']} → {facts['format']} {facts['shape']}")
    return lines


def _dot(graph: networkx.DiGraph) -> str:
    lines = ["digraph actions {", "  rankdir=LR;", '  node [fontname="sans-serif"];']
    for name, facts in _shown(graph):
        options = {"label": "\\n".join(map(_escaped, _label(facts))), "shape": _DOT_SHAPES[str(facts["kind"])]}
        if "state" in facts:
            options |= {"style": "filled", "fillcolor": _STATE_COLOURS[str(facts["state"])]}
        listed = ", ".join(f'{key}="{value}"' for key, value in options.items())
        lines.append(f'  "{_escaped(name)}" [{listed}];')
    lines += [f'  "{_escaped(begin)}" -> "{_escaped(end)}";' for begin, end in graph.edges]
    return "\n".join([*lines, "}", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _mermaid(graph: networkx.DiGraph) -> str:
    lines = ["flowchart LR"]
    numbers: dict[str, str] = {}
    coloured: dict[str, list[str]] = {}
    for index, (name, facts) in enumerate(_shown(graph)):
        number = numbers[name] = f"n{index}"
        before, after = _MERMAID_SHAPES[str(facts["kind"])]
        text = "<br>".join(map(_entities, _label(facts)))
        lines.append(f'  {number}{before}"{text}"{after}')
        if "state" in facts:
            coloured.setdefault(str(facts["state"]), []).append(number)
    lines += [f"  {numbers[begin]} --> {numbers[end]}" for begin, end in graph.edges]
    for state, members in coloured.items():
        lines.append(f"  classDef {state} fill:{_STATE_COLOURS[state]}")
        lines.append(f"  class {','.join(members)} {state}")
    return "\n".join([*lines, ""])


def _entities(text: str) -> str:
    """Text inside a quoted Mermaid label; ``#`` starts an entity there."""
    for character, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("\n", " ")):
        text = text.replace(character, entity)
    return text


def _graphml(graph: networkx.DiGraph) -> str:
    # networkx writes GraphML as well, and takes ten times as long.
    from xml.sax.saxutils import escape, quoteattr

    types: dict[str, str] = {}
    nodes = []
    for name, facts in _shown(graph):
        nodes.append(f"    <node id={quoteattr(name)}>")
        for key, value in facts.items():
            types.setdefault(key, "long" if isinstance(value, int) else "string")
            nodes.append(f'      <data key="{key}">{escape(str(value))}</data>')
        nodes.append("    </node>")
    edges = (f"    <edge source={quoteattr(begin)} target={quoteattr(end)} />" for begin, end in graph.edges)
    keys = (f'  <key id="{key}" for="node" attr.name="{key}" attr.type="{kind}" />' for key, kind in types.items())
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        *keys,
        '  <graph edgedefault="directed">',
        *nodes,
        *edges,
        "  </graph>",
        "</graphml>",
        "",
    ]
    return "\n".join(lines)


def _json(graph: networkx.DiGraph) -> str:
    nodes = [{"id": name, **facts} for name, facts in _shown(graph)]
    value = {"nodes": nodes, "edges": [list(edge) for edge in graph.edges]}
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


_BEGINNINGS = (
    b"digraph actions {\n  rankdir=LR;\n",
    b"flowchart LR\n  n0",
    b'<?xml version="1.0" encoding="utf-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n'
    b'  <key id="kind"',
    b'{\n  "nodes": [\n    {\n      "id": ',
)
"""What no other program's file begins with, of every format."""

_WRITERS: dict[Format, Callable[[networkx.DiGraph], str]] = {
    "dot": _dot,
    "mermaid": _mermaid,
    "graphml": _graphml,
    "json": _json,
}
