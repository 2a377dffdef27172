"""The graph of a pipeline: its nodes, what connects them, and which of them a command is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.contracts.stage import Port, Stage
from posttrain.planning.spec import Resources, Runtime


@dataclass(frozen=True)
class Reference:
    """One output port of one node."""

    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


@dataclass(frozen=True)
class Node:
    """One stage after matrix expansion, with validated options and resolved inputs.

    Args:
        name: The node's name: the stage's, with the values of its matrix if it has one (`dpo[seed=1]`).
        stage: The stage's name in the pipeline file.
        uses: The plugin.
        plugin: The stage plugin itself.
        config: The validated options; local source paths are absolute.
        inputs: What each connected input port gets.
        needs: Nodes that must have passed before, without handing anything over.
        resources: What the stage process needs of the machine.
        runtime: The environment of the stage process.
        matrix: The values of the matrix' axes.
        where: Where the stage is written.
        origins: Where each option was set, by its dotted path: `file:line:column`, an override, or `default`.
        pipeline: The name of the pipeline it belongs to, where that has one.
    """

    name: str
    stage: str
    uses: str
    plugin: Stage
    config: Any
    inputs: Mapping[str, tuple[Reference, ...]]
    needs: tuple[str, ...]
    resources: Resources
    runtime: Runtime
    matrix: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    pipeline: str | None = None

    def outputs(self) -> tuple[Port, ...]:
        """Return the output ports under this node's options."""
        return self.plugin.outputs(self.config)


@dataclass(frozen=True)
class Graph:
    """The nodes of a pipeline in an order in which they can run.

    Args:
        nodes: The nodes, every one after what it depends on.
        base: Directory that relative source paths are resolved against.
        required: Nodes outside the selection (`--from`): they must be in the cache already.
    """

    nodes: Mapping[str, Node]
    base: Path
    required: frozenset[str] = frozenset()

    @property
    def order(self) -> tuple[str, ...]:
        """Node names, every node after what it depends on."""
        return tuple(self.nodes)

    @property
    def dependencies(self) -> dict[str, tuple[str, ...]]:
        """The nodes each node waits for."""
        return dependencies(self.nodes.values())

    def ancestors(self, names: Iterable[str]) -> set[str]:
        """Return the named nodes and everything they depend on."""
        needed, found, queue = self.dependencies, set[str](), list(names)
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                queue.extend(needed[name])
        return found

    def descendants(self, names: Iterable[str]) -> set[str]:
        """Return the named nodes and everything that depends on them."""
        found = set(names)
        for name, needed in self.dependencies.items():
            if found.intersection(needed):
                found.add(name)
        return found


def dependencies(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    """Return the nodes that each node waits for: those that hand something over, then those it `needs`."""
    return {
        node.name: tuple(
            dict.fromkeys([*(ref.node for refs in node.inputs.values() for ref in refs), *node.needs])
        )
        for node in nodes
    }
