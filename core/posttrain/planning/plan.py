"""The plan: what a run would do, and why, before anything is started."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain.artifacts.store import KeyRecord, Store
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Certainty, Estimate, Finding, Input, Level
from posttrain.errors import DataError
from posttrain.planning.graph import Graph, Node, Reference
from posttrain.planning.handoffs import Handoffs, predicted_inputs, real_input, refusals
from posttrain.planning.keys import differences, key_ingredients, key_of
from posttrain.registry.catalogue import Catalogue

TRACKED = (
    "posttrain",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "tokenizers",
    "safetensors",
    "numpy",
)
"""Distributions whose versions are recorded with every artifact and compared as drift."""


class Standing(StrEnum):
    """Where a node stands before a run."""

    CACHED = "cached"
    NEW = "new"
    STALE = "stale"
    WAITS = "waits"
    """Not known yet: an input will be rebuilt, and equal content would make this node cached again."""
    BLOCKED = "blocked"
    """A gate it depends on said no, and nothing has changed since."""


@dataclass(frozen=True)
class NodePlan:
    """One node of the plan.

    Args:
        node: The node's name.
        uses: The stage it runs.
        standing: Cached, new, stale, or waiting for an input.
        reasons: Why it is not cached.
        key: The node's key, when every input is known.
        record: What the cache holds under the key.
        plugins: Identity of the stage and of every component.
        findings: Hand-off findings.
        estimate: Expected parameters and memory.
        launch: The command of the stage process.
        drift: Versions that differ from those the cached outputs were made with.
    """

    node: str
    uses: str
    standing: Standing
    reasons: tuple[str, ...]
    key: str | None
    record: KeyRecord | None
    plugins: Mapping[str, Mapping[str, Any]]
    findings: tuple[Finding, ...]
    estimate: Estimate | None
    launch: tuple[str, ...]
    drift: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return the node for `--json`."""
        return {
            "node": self.node,
            "uses": self.uses,
            "standing": self.standing.value,
            "reasons": list(self.reasons),
            "key": self.key,
            "outputs": dict(self.record.outputs) if self.record else {},
            "status": self.record.status if self.record else None,
            "plugins": {name: dict(identity) for name, identity in self.plugins.items()},
            "findings": [
                {
                    "rule": f.rule,
                    "level": f.level.value,
                    "certainty": f.certainty.value,
                    "message": f.message,
                    "port": f.port,
                    "fix": f.fix,
                }
                for f in self.findings
            ],
            "estimate": None if self.estimate is None else vars(self.estimate),
            "launch": list(self.launch),
            "drift": list(self.drift),
            "inputs": {port: list(origins) for port, origins in self.inputs.items()},
        }


@dataclass(frozen=True)
class Plan:
    """What a run would do."""

    name: str
    spec_digest: str
    graph: Graph
    nodes: Mapping[str, NodePlan]
    outputs: Mapping[Reference, Input] = field(default_factory=dict)

    @property
    def refused(self) -> list[Finding]:
        """The findings that forbid the run."""
        return refusals([finding for node in self.nodes.values() for finding in node.findings])

    @property
    def unbuilt(self) -> list[str]:
        """Nodes that the selection requires to be cached (`--from`) and that are not."""
        return [name for name in sorted(self.graph.required) if self.nodes[name].standing != Standing.CACHED]

    @property
    def nothing_to_do(self) -> bool:
        """Whether every node is cached, or blocked by a cached verdict."""
        return all(node.standing in (Standing.CACHED, Standing.BLOCKED) for node in self.nodes.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for `--json` and for `plan.json`."""
        return {
            "pipeline": self.name,
            "spec_digest": self.spec_digest,
            "nothing_to_do": self.nothing_to_do,
            "refused": len(self.refused),
            "nodes": [node.as_dict() for node in self.nodes.values()],
        }


@dataclass
class Planner:
    """Walks a graph in order, propagating real manifests where they exist and predictions where not."""

    graph: Graph
    catalogue: Catalogue
    store: Store
    launch: Sequence[str]

    def plan(self, name: str, spec_digest: str) -> Plan:
        """Plan every node. Starts no server, imports nothing heavy, writes nothing but the digest memo."""
        outputs: dict[Reference, Input] = {}
        nodes: dict[str, NodePlan] = {}
        latest = self._latest()
        for node in self.graph.nodes.values():
            planned = self._node(node, outputs, nodes, latest.get((node.name, node.uses)))
            nodes[node.name] = planned
            outputs.update(self._outputs(node, planned, outputs))
        return Plan(name, spec_digest, self.graph, nodes, outputs)

    def _latest(self) -> dict[tuple[str, str], KeyRecord]:
        """Return the newest record of every node name and stage, to compare ingredients with."""
        newest: dict[tuple[str, str], KeyRecord] = {}
        for record in self.store.records():
            at = (record.node, record.uses)
            if at not in newest or record.created > newest[at].created:
                newest[at] = record
        return newest

    def _node(
        self,
        node: Node,
        outputs: Mapping[Reference, Input],
        planned: Mapping[str, NodePlan],
        last: KeyRecord | None,
    ) -> NodePlan:
        handoffs = Handoffs(self.graph, self.catalogue)
        inputs = handoffs.inputs(node, outputs)
        findings = handoffs.findings(node, outputs)
        standing, reasons, key, record = self._standing(node, inputs, planned, last, findings)
        identities = {node.uses: self.catalogue.identity(Group.STAGE, node.uses)}
        return NodePlan(
            node=node.name,
            uses=node.uses,
            standing=standing,
            reasons=tuple(reasons),
            key=key,
            record=record,
            plugins=identities,
            findings=tuple(findings),
            estimate=node.plugin.estimate(node.config, inputs),
            launch=(node.runtime.python or self.launch[0], *self.launch[1:]),
            drift=tuple(drift(record.versions)) if record else (),
            inputs={port: tuple(item.origin for item in items) for port, items in inputs.items()},
        )

    def _standing(
        self,
        node: Node,
        inputs: Mapping[str, Sequence[Input]],
        planned: Mapping[str, NodePlan],
        last: KeyRecord | None,
        findings: list[Finding],
    ) -> tuple[Standing, list[str], str | None, KeyRecord | None]:
        digests = {
            port: [item.artifact.digest if item.artifact else None for item in items]
            for port, items in inputs.items()
        }
        known = {port: [d for d in found if d is not None] for port, found in digests.items()}
        try:
            ingredients = key_ingredients(node, self.catalogue, known, self.graph.base, self.store.memo)
        except DataError as error:
            findings.append(
                Finding(
                    "source",
                    Level.ERROR,
                    Certainty.VERIFIED,
                    f"{error.message}: {error.found}",
                    node.name,
                    error.where,
                    error.fix,
                )
            )
            return Standing.NEW, ["its source does not exist"], None, None
        changed = (
            []
            if last is None
            else differences(_without_inputs(last.ingredients), _without_inputs(ingredients))
        )
        if known != digests:
            waiting = [
                dependency
                for dependency in self.graph.dependencies[node.name]
                if planned[dependency].standing != Standing.CACHED
            ]
            if last is None:
                return Standing.NEW, [], None, None
            standing = Standing.STALE if changed else Standing.WAITS
            return standing, [*changed, f"waits for {', '.join(waiting)}"], None, None
        blockers = [name for name in self.graph.dependencies[node.name] if _blocks(planned[name])]
        if blockers:
            return Standing.BLOCKED, [f"{name} said {_said(planned[name])}" for name in blockers], None, None
        key = key_of(ingredients)
        record = self.store.lookup(key)
        reason = self._not_usable(node, inputs, record)
        if record is not None and reason is None:
            return Standing.CACHED, [], key, record
        if record is not None:
            return Standing.STALE, [str(reason)], key, None
        if last is None:
            return Standing.NEW, [], key, None
        return (
            Standing.STALE,
            differences(last.ingredients, ingredients) or ["its outputs were removed"],
            key,
            None,
        )

    def _not_usable(
        self, node: Node, inputs: Mapping[str, Sequence[Input]], record: KeyRecord | None
    ) -> str | None:
        if record is None:
            return "never run"
        moving = node.plugin.pinned(node.config)
        if moving is not None:
            return f"never cached: {moving}"
        return self.store.usable(record) or node.plugin.holds(node.config, inputs, self.store.workspace)

    def _outputs(
        self, node: Node, planned: NodePlan, outputs: Mapping[Reference, Input]
    ) -> dict[Reference, Input]:
        if planned.record is not None:
            return {
                Reference(node.name, port): real_input(Reference(node.name, port), self.store.get(digest))
                for port, digest in planned.record.outputs.items()
            }
        inputs = Handoffs(self.graph, self.catalogue).inputs(node, outputs)
        return predicted_inputs(self.graph, node, inputs)


def _said(node: NodePlan) -> str:
    return node.record.status if node.record is not None else node.standing.value


def _blocks(node: NodePlan) -> bool:
    """Whether what depends on a node cannot run although nothing is left to build before it."""
    return node.standing == Standing.BLOCKED or (
        node.record is not None and node.record.status != "completed"
    )


def _without_inputs(ingredients: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ingredients.items() if name != "inputs"}


@cache
def current_versions() -> Mapping[str, str]:
    """Return the installed versions of the tracked distributions, read from metadata without importing them."""
    found = {"python": platform.python_version()}
    for name in TRACKED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def drift(made_with: Mapping[str, str]) -> list[str]:
    """Return the versions that differ from those an artifact was made with."""
    now = current_versions()
    return [
        f"{name} {version} → {now[name]}"
        for name, version in sorted(made_with.items())
        if name in now and now[name] != version
    ]


def workspace_of(base: Path) -> Path:
    """Return the default workspace under a directory."""
    return base.absolute() / ".posttrain"
