"""Graphs of tasks, and a scheduler that knows nothing about models.

A graph is a ``networkx.DiGraph`` whose nodes are task names and whose edges point from what is needed to what needs
it. A node's ``task`` attribute is a :class:`Task`; a task without ``run`` is a fact that others depend on (a source).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
import heapq
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Task:
    """One node: what it is called, what it needs and how it is done.

    Attributes:
        name: unique in the graph.
        kind, subject: what the node stands for; the scheduler does not look at them.
        needs: names of the tasks that come first.
        run: does the work in a worker thread; None when there is nothing to do.
        cost: bytes of input. Among ready tasks the costliest starts first, so that the last worker is not left alone
            with the largest.
    """

    name: str
    kind: str
    needs: tuple[str, ...] = ()
    run: Callable[[], object] | None = None
    cost: int = 0
    subject: object = None


def graph_of(tasks: Iterable[Task]) -> networkx.DiGraph:
    """The graph of ``tasks``.

    Tasks that come after what they need are by far the fastest: such a list cannot hold a circle.

    Raises:
        ValueError: two tasks have one name, a task needs an unknown one, or they need each other in a circle.
    """
    import networkx

    by_name: dict[str, Task] = {}
    ordered = True
    for task in tasks:
        if task.name in by_name:
            raise ValueError(f"two tasks are called {task.name!r}")
        ordered = ordered and all(need in by_name for need in task.needs)
        by_name[task.name] = task
    graph = networkx.DiGraph()
    graph.add_nodes_from(by_name)
    for name, attributes in graph.nodes(data=True):  # half the time of handing them over with the names
        attributes["task"] = by_name[name]
    if not ordered:
        for task in by_name.values():
            unknown = next((need for need in task.needs if need not in by_name), None)
            if unknown is not None:
                raise ValueError(f"task {task.name!r} needs {unknown!r}, which is not in the graph")
    graph.add_edges_from((need, task.name) for task in by_name.values() for need in task.needs)
    if not ordered and not networkx.is_directed_acyclic_graph(graph):
        circle = " → ".join(edge[0] for edge in networkx.find_cycle(graph))
        raise ValueError(f"tasks need each other in a circle: {circle}")
    return graph


class Failures(Exception):
    """Tasks that failed, in the order in which they did, as (task name, exception)."""

    def __init__(self, failures: list[tuple[str, BaseException]]):
        super().__init__(f"{len(failures)} tasks failed")
        self.failures = failures


def run(graph: networkx.DiGraph, *, workers: int, cancel: threading.Event, keep_going: bool = False) -> None:
    """Run every task after what it needs, at most ``workers`` at a time.

    After a failure no further task starts, or, with ``keep_going``, only tasks that need none of the failed ones.
    Tasks that have started are always waited for. An interrupt (``KeyboardInterrupt``) sets ``cancel``, which running
    tasks may watch to end early, starts nothing more, and is raised once they have ended.

    Raises:
        Failures: at least one task failed.
    """
    waiting = {name: graph.in_degree(name) for name in graph}
    ready: list[tuple[int, int, str]] = []
    order = {name: index for index, name in enumerate(graph)}

    def release(name: str) -> None:
        pending = [name]
        while pending:
            done = pending.pop()
            for following in graph.successors(done):
                waiting[following] -= 1
                if not waiting[following]:
                    offer(following, pending)

    def offer(name: str, pending: list[str]) -> None:
        task: Task = graph.nodes[name]["task"]
        if task.run is None:
            pending.append(name)
        else:
            heapq.heappush(ready, (-task.cost, order[name], name))

    first: list[str] = []
    for name, count in waiting.items():
        if not count:
            offer(name, first)
    for name in first:
        release(name)

    failures: list[tuple[str, BaseException]] = []
    running: dict[Future[object], str] = {}
    stop = False
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="action") as pool:
        try:
            while (ready and not stop) or running:
                while ready and len(running) < workers and not stop:
                    name = heapq.heappop(ready)[2]
                    running[pool.submit(graph.nodes[name]["task"].run)] = name
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name = running.pop(future)
                    error = future.exception()
                    if error is None:
                        release(name)
                    else:
                        failures.append((name, error))
                        if not keep_going or not isinstance(error, Exception):
                            stop = True
        except KeyboardInterrupt:
            cancel.set()
            raise
    if failures:
        raise Failures(failures)
