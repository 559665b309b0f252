"""The scheduler, the graph of a target's actions, and its text forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
import json
from pathlib import Path
import re
import threading
from typing import Any
import xml.etree.ElementTree as ElementTree

from fixtures import fx
import networkx
import pytest

from ninferbuild.action_graph import KINDS, action_graph, attributes
from ninferbuild.build import build
from ninferbuild.graph import Failures, Task, graph_of, run
from ninferbuild.graph_export import export
from ninferbuild.preview import graph
from ninferbuild.session import open_session
from ninferbuild.target import Assign, CacheSettings, Target

# The scheduler


def scheduled(tasks: Iterable[Task], *, workers: int = 2, keep_going: bool = False) -> None:
    run(graph_of(tasks), workers=workers, cancel=threading.Event(), keep_going=keep_going)


def test_order_and_costs() -> None:
    done: list[str] = []

    def task(name: str, *needs: str, cost: int = 0) -> Task:
        return Task(name, "work", needs, lambda: done.append(name), cost)

    scheduled(
        [task("end", "small", "large"), task("small", "begin"), task("large", "begin", cost=9), task("begin")],
        workers=1,
    )
    assert done == ["begin", "large", "small", "end"]


def test_tasks_without_work_pass_on() -> None:
    done: list[str] = []
    tasks = [
        Task("source", "source"),
        Task("cached", "encode", ("source",)),
        Task("runs", "encode", ("source", "cached"), lambda: done.append("runs")),
        Task("link", "link", ("cached", "runs")),
        Task("after", "work", ("link",), lambda: done.append("after")),
    ]
    scheduled(tasks)
    assert done == ["runs", "after"]


def test_failures() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError("bad")

    def tasks() -> list[Task]:
        return [
            Task("bad", "work", (), fail, 9),
            Task("good", "work", (), lambda: done.append("good")),
            Task("needs bad", "work", ("bad",), lambda: done.append("needs bad")),
        ]

    with pytest.raises(Failures) as caught:
        scheduled(tasks(), workers=1)
    assert [(name, str(error)) for name, error in caught.value.failures] == [("bad", "bad")]
    assert done == []
    with pytest.raises(Failures):
        scheduled(tasks(), workers=1, keep_going=True)
    assert done == ["good"]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", "x"), Task("a", "x")], "two tasks are called 'a'"),
        ([Task("a", "x", ("b",))], "task 'a' needs 'b', which is not in the graph"),
        ([Task("a", "x", ("b",)), Task("b", "x", ("a",))], "in a circle"),
        ([Task("a", "x", ("a",))], "in a circle: a"),
    ],
)
def test_what_is_no_graph(tasks: list[Task], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph_of(tasks)


# Graphs of targets


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Built, but for one action, whose format has changed since."""
    root = tmp_path_factory.mktemp("graph")
    checkpoint = fx.write_all(root / "fx")
    made = Target(
        name="t",
        identity=str(root / "t.ninfer"),
        file=None,
        model=checkpoint / "dense",
        recipe="qwen3_6_27b",
        components=("text",),
        out=root / "t.ninfer",
        device="cpu",
        cache=CacheSettings(dir=root / "cache", trust_stat=True),
    )
    build(made)
    return made


def of_kind(shown: networkx.DiGraph, kind: str) -> list[str]:
    return [name for name, task in shown.nodes(data="task") if task.kind == kind]


def test_graph_of_a_target(target: Target) -> None:
    shown = graph(target)
    assert networkx.is_directed_acyclic_graph(shown)
    assert {task.kind for _, task in shown.nodes(data="task")} == {"source", "encode", "resource", "link"}
    assert all(name.startswith(f"{task.kind}:") and task.run is None for name, task in shown.nodes(data="task"))
    (link,) = of_kind(shown, "link")
    assert link == "link:t.ninfer"
    assert set(shown.predecessors(link)) == {*of_kind(shown, "encode"), *of_kind(shown, "resource")}
    assert all(shown.in_degree(name) == 0 and shown.out_degree(name) > 0 for name in of_kind(shown, "source"))
    by_label = {attributes(task)["label"]: name for name, task in shown.nodes(data="task")}
    gate = by_label["text/layers/3/mlp/gate (+1)"]
    prefix = "source:base/model.language_model.layers.3.mlp."
    assert list(shown.predecessors(gate)) == [f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"]
    # Rows of one stored tensor are packed into two parents: one source, two actions.
    query = "source:base/model.language_model.layers.3.self_attn.q_proj.weight"
    assert len(list(shown.successors(query))) == 2
    facts = attributes(shown.nodes[gate]["task"])
    assert facts["format"] == "q4_g64_fp16"
    assert facts["shape"] == "[512, 128]"
    assert facts["parameters"] == "text/layers/3/mlp/gate text/layers/3/mlp/up"


def changed(target: Target) -> Target:
    return replace(target, assigns=(Assign(("text/layers/3/mlp/down",), format="q8_g32_fp16"),))


def test_states(target: Target) -> None:
    shown = [attributes(task) for _, task in graph(changed(target)).nodes(data="task") if task.kind == "encode"]
    states = {facts["label"]: facts["state"] for facts in shown}
    assert states.pop("text/layers/3/mlp/down") == "run"
    assert set(states.values()) <= {"cached", "unknown"}


def test_only_missing_actions_have_work(target: Target) -> None:
    with open_session(target, None, None, None, rerun=False, rehash=False) as session:
        held = session.actions[3]
        for action in session.actions:
            if action is not held:
                action.record = object()  # type: ignore[assignment]
        ran: list[Any] = []
        shown = action_graph(session, session.contents(), ran.append)
        run(shown, workers=2, cancel=threading.Event())
        assert ran == [held]
        assert [name for name, task in shown.nodes(data="task") if task.run is not None] == [
            f"encode:{held.parent.target.id}"
        ]


def test_auxiliaries_come_from_the_action_that_imports_them(target: Target) -> None:
    imported = replace(
        target,
        recipe="qwen3_6_27b_nvfp4",
        sources={"quantized": target.model.with_name("q6")},
        cache=CacheSettings(dir=target.out.with_name("nothing")),
    )
    shown = graph(imported)
    auxiliaries = of_kind(shown, "auxiliary")
    assert auxiliaries
    for name in auxiliaries:
        (maker,) = shown.predecessors(name)
        assert attributes(shown.nodes[maker]["task"])["format"] == "nvfp4"
        assert list(shown.successors(name)) == ["link:t.ninfer"]
        assert attributes(shown.nodes[name]["task"])["bytes"] == 4
    sources = {str(attributes(shown.nodes[name]["task"])["source"]) for name in of_kind(shown, "source")}
    assert sources == {"base", "quantized"}


def test_equal_work_on_equal_bytes_is_one_node(target: Target, tmp_path: Path) -> None:
    override = tmp_path / "tied.py"
    override.write_text(
        "def configure(model, recipe, sources):\n"
        "    head = model.parameters['text/output_head']\n"
        "    recipe.assign('text/token_embedding', format='q6_g64_fp16', source=head.source)\n"
    )
    shown = graph(replace(target, overrides=(str(override),)))
    facts = [attributes(task) for _, task in shown.nodes(data="task") if task.kind == "encode"]
    (tied,) = [item for item in facts if "text/output_head" in str(item["parameters"])]
    assert "text/token_embedding" in str(tied["parameters"])
    assert len(str(tied["objects"]).split()) == 2


# Text forms


@pytest.fixture(scope="module")
def shown(target: Target) -> networkx.DiGraph:
    return graph(changed(target))


def test_json(shown: networkx.DiGraph) -> None:
    value = json.loads(export(shown, "json"))
    assert [node["id"] for node in value["nodes"]] == list(shown.nodes)
    assert [tuple(edge) for edge in value["edges"]] == list(shown.edges)
    assert {node["kind"] for node in value["nodes"]} <= set(KINDS)


def test_graphml(shown: networkx.DiGraph) -> None:
    text = export(shown, "graphml")
    assert ElementTree.fromstring(text).tag.endswith("graphml")
    read = networkx.parse_graphml(text)
    assert set(read.nodes) == set(shown.nodes)
    assert set(read.edges) == set(shown.edges)
    assert read.nodes["link:t.ninfer"]["kind"] == "link"
    assert {type(facts["bytes"]) for _, facts in read.nodes(data=True) if facts["kind"] == "encode"} == {int}


def test_dot(shown: networkx.DiGraph) -> None:
    lines = export(shown, "dot").splitlines()
    assert (lines[0], lines[-1]) == ("digraph actions {", "}")
    assert len([line for line in lines if " -> " in line]) == shown.number_of_edges()
    assert len([line for line in lines if "label=" in line]) == shown.number_of_nodes()
    (down,) = [line for line in lines if 'label="text/layers/3/mlp/down\\n' in line]
    assert "grouped_absmax → q8_g32_fp16 [128, 256]" in down


def test_mermaid(shown: networkx.DiGraph) -> None:
    lines = export(shown, "mermaid").splitlines()
    assert lines[0] == "flowchart LR"
    assert len([line for line in lines if re.fullmatch(r"  n\d+ --> n\d+", line)]) == shown.number_of_edges()
    assert any(line.startswith("  class n") and line.endswith(" run") for line in lines)


def test_names_are_quoted() -> None:
    odd = 'a"b\\c<d>#'
    drawn = graph_of([Task(odd, "resource", subject=(odd, 1))])
    assert json.loads(export(drawn, "json"))["nodes"][0]["id"] == odd
    assert list(networkx.parse_graphml(export(drawn, "graphml")).nodes) == [odd]
    assert r'  "a\"b\\c<d>#" [label="a\"b\\c<d>#", shape="note"];' in export(drawn, "dot").splitlines()
    assert r'  n0[/"a#quot;b\c#lt;d#gt;#35;"/]' in export(drawn, "mermaid").splitlines()
