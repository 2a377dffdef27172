"""From a resolved spec to a graph of nodes: matrices expanded, options validated, ports connected.

Every problem is found before anything runs, and each names both ends of the connection it is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.errors import PosttrainError, SpecError
from posttrain.planning.expansion import expanded
from posttrain.planning.nodes import Graph, Node, Reference, dependencies
from posttrain.planning.parsing import Resolved
from posttrain.planning.problems import SpecProblems
from posttrain.planning.wiring import connected
from posttrain.registry.catalogue import Catalogue
from posttrain.wording import did_you_mean, listed

__all__ = ["Graph", "Node", "Reference", "build_graph", "select"]


def build_graph(resolved: Resolved, catalogue: Catalogue, base: Path, pipeline: str | None = None) -> Graph:
    """Expand, validate and connect a resolved spec.

    Args:
        resolved: The spec with its defaults merged, and where each value was written.
        catalogue: The plugins.
        base: Directory that relative source paths are resolved against.
        pipeline: The pipeline's name.

    Raises:
        SpecProblems: Everything that is wrong, each with its place.
    """
    drafts = expanded(resolved, catalogue, base)
    problems: list[PosttrainError] = []
    nodes: list[Node] = []
    for name, stage in resolved.spec.stages.items():
        for draft in drafts[name]:
            try:
                nodes.append(connected(draft, stage, drafts, resolved, catalogue))
            except SpecProblems as several:
                problems.extend(several.problems)
    if problems:
        # The nodes of one matrix have the same inputs, and so the same problems.
        raise SpecProblems({str(problem): problem for problem in problems}.values())
    return Graph(_sorted([replace(node, pipeline=pipeline) for node in nodes]), base)


def select(graph: Graph, *, only: Sequence[str] = (), start: Sequence[str] = ()) -> Graph:
    """Narrow a graph to `only` some nodes and what they need, or to what runs `from` some nodes on.

    Names may be nodes or stages (all of a stage's nodes). With `start`, the nodes before are required to be
    cached.

    Raises:
        SpecError: A name stands for nothing, or nothing is left between the two ends.
    """
    keep, required = set(graph.nodes), set[str]()
    if only:
        keep &= graph.ancestors(_named(graph, only, "--only"))
    if start:
        onward = keep & graph.descendants(_named(graph, start, "--from"))
        if not onward:
            raise SpecError(
                "nothing is selected: none of the stages of --only comes after those of --from",
                where="--from",
                found=f"--from {listed(start)} --only {listed(only)}",
            )
        keep &= graph.ancestors(onward)
        required = keep - onward
    nodes = {name: node for name, node in graph.nodes.items() if name in keep}
    return replace(graph, nodes=nodes, required=frozenset(required))


def _named(graph: Graph, names: Sequence[str], option: str) -> set[str]:
    chosen: set[str] = set()
    for name in names:
        matching = {node.name for node in graph.nodes.values() if name in (node.name, node.stage)}
        if not matching:
            nodes = graph.nodes.values()
            known = list(dict.fromkeys([*(n.stage for n in nodes), *(n.name for n in nodes)]))
            raise SpecError(
                "no such stage in this pipeline",
                where=option,
                found=name,
                expected=f"one of {listed(known)}",
                fix=did_you_mean(name, known),
            )
        chosen |= matching
    return chosen


def _sorted(nodes: Iterable[Node]) -> dict[str, Node]:
    """Sort topologically, keeping the written order where it is free."""
    waiting, done = {node.name: node for node in nodes}, dict[str, Node]()
    needed = dependencies(waiting.values())
    while waiting:
        ready = next((name for name in waiting if all(d in done for d in needed[name])), None)
        if ready is None:
            raise SpecProblems([_circular(needed, waiting)])
        done[ready] = waiting.pop(ready)
    return done


def _circular(needed: Mapping[str, Sequence[str]], waiting: Mapping[str, Node]) -> SpecError:
    """Return the error for nodes that all wait for one another; it shows one circle in the order of work."""
    path = [next(iter(waiting))]
    while (before := next(name for name in needed[path[-1]] if name in waiting)) not in path:
        path.append(before)
    circle = [before, *reversed(path[path.index(before) :])]
    return SpecError(
        "these stages depend on each other in a circle",
        where=waiting[circle[0]].where,
        found=" → ".join(circle),
        fix="remove one of these inputs or needs",
    )
