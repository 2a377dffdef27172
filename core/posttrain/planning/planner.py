"""Planning: a walk over the graph that compares every node with what the store holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from posttrain.artifacts.store import KeyRecord, Store
from posttrain.contracts.stage import Certainty, Estimate, Finding, Input, Level
from posttrain.errors import DataError, PluginError
from posttrain.planning.capacity import Machine
from posttrain.planning.handoffs import Handoffs, complaint, predicted_inputs, real_input
from posttrain.planning.keys import differences, key_ingredients, key_of, plugin_identities
from posttrain.planning.nodes import Graph, Node, Reference
from posttrain.planning.past import Past
from posttrain.planning.plan import Judgement, NodePlan, Plan, Standing
from posttrain.planning.questions import estimate_of, lapse, movement
from posttrain.planning.requirements import crowding
from posttrain.planning.versions import drift
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import choices

Inputs = Mapping[str, Sequence[Input]]


@dataclass(frozen=True)
class Planner:
    """Walks a graph in order, propagating real manifests where they exist and predictions where not.

    Args:
        graph: The nodes.
        catalogue: The plugins.
        store: What was built already.
        launch: The command of a stage process.
        machine: What nodes that are to be built will find.
    """

    graph: Graph
    catalogue: Catalogue
    store: Store
    launch: Sequence[str]
    machine: Machine = field(default_factory=Machine.here)

    def plan(self, name: str, spec_digest: str) -> Plan:
        """Plan every node. Starts no server, imports nothing heavy, writes nothing but the digest memo.

        Raises:
            PluginError: A stage cannot say what it would put out.
        """
        outputs: dict[Reference, Input] = {}
        nodes: dict[str, NodePlan] = {}
        past = Past.of(self.store)
        for node in self.graph.nodes.values():
            inputs = self._handoffs.inputs(node, outputs)
            planned = self._node(node, inputs, outputs, nodes, past.last(node))
            nodes[node.name] = planned
            outputs.update(self._outputs(node, planned, inputs))
        warnings = (*self.catalogue.troubles(), *self.catalogue.warnings, *past.damaged)
        return Plan(name, spec_digest, self.graph, nodes, outputs, warnings)

    @cached_property
    def _handoffs(self) -> Handoffs:
        return Handoffs(self.graph, self.catalogue)

    def _node(
        self,
        node: Node,
        inputs: Inputs,
        outputs: Mapping[Reference, Input],
        planned: Mapping[str, NodePlan],
        last: KeyRecord | None,
    ) -> NodePlan:
        findings = self._handoffs.findings(node, outputs)
        try:
            judgement = self._judgement(node, inputs, planned, last)
        except DataError as error:
            if not any(finding.level is Level.ERROR for finding in findings):
                findings.append(_no_source(node, error))
            judgement = Judgement(Standing.NEW, (error.message,))
        if judgement.standing == Standing.BLOCKED:
            findings = []  # it does not run: what it would refuse, the verdict itself above all, is no error
        estimate, trouble = self._estimate(node, inputs)
        if not judgement.standing.settled:
            trouble += crowding(node, estimate, self.machine)
        return NodePlan(
            node=node.name,
            uses=node.uses,
            judgement=judgement,
            plugins=self._plugins(node),
            means=_means(node),
            config=node.config.model_dump(mode="json"),
            origins=node.origins,
            findings=(*findings, *(replace(each, node=node.name) for each in trouble)),
            estimate=estimate,
            launch=(node.runtime.python or self.launch[0], *self.launch[1:]),
            drift=tuple(drift(judgement.record.versions)) if judgement.record else (),
            inputs={port: tuple(item.origin for item in items) for port, items in inputs.items()},
        )

    def _judgement(
        self, node: Node, inputs: Inputs, planned: Mapping[str, NodePlan], last: KeyRecord | None
    ) -> Judgement:
        """Return where a node stands.

        Raises:
            DataError: A source file is missing, so the node has no key.
        """
        digests = {
            port: [item.artifact.digest for item in items if item.artifact is not None]
            for port, items in inputs.items()
        }
        ingredients = key_ingredients(node, self.catalogue, digests, self.graph.base, self.store.memo)
        needed = [planned[name] for name in self.graph.dependencies[node.name]]
        if stopping := [each for each in needed if each.stops]:
            return Judgement(Standing.BLOCKED, tuple(f"{each.node} said {_said(each)}" for each in stopping))
        if all(item.verified for items in inputs.values() for item in items):
            return self._bound(node, inputs, ingredients, last)
        if last is None:
            return Judgement(Standing.NEW)
        changed = differences(_without_inputs(last.ingredients), _without_inputs(ingredients))
        waiting = ", ".join(each.node for each in needed if each.standing != Standing.CACHED)
        standing = Standing.STALE if changed else Standing.WAITS
        return Judgement(standing, (*changed, f"waits for {waiting}"))

    def _bound(
        self, node: Node, inputs: Inputs, ingredients: Mapping[str, Any], last: KeyRecord | None
    ) -> Judgement:
        """Return where a node stands whose every input is in the store."""
        key = key_of(ingredients)
        record = self.store.lookup(key)
        if record is not None:
            reason = self._unusable(node, inputs, record)
            if reason is None:
                return Judgement(Standing.CACHED, (), key, record)
            return Judgement(Standing.STALE, (reason,), key)
        if last is None:
            return Judgement(Standing.NEW, (), key)
        reasons = differences(last.ingredients, ingredients) or ["its outputs were removed"]
        return Judgement(Standing.STALE, tuple(reasons), key)

    def _unusable(self, node: Node, inputs: Inputs, record: KeyRecord) -> str | None:
        moving = movement(node, self.catalogue)
        if moving is not None:
            return f"never cached: {moving}"
        return self.store.usable(record) or lapse(node, inputs, self.store.workspace, self.catalogue)

    def _estimate(self, node: Node, inputs: Inputs) -> tuple[Estimate | None, list[Finding]]:
        """Return the estimate; a stage that fails to make one can still run."""
        try:
            return estimate_of(node, inputs, self.catalogue), []
        except PluginError as error:
            return None, [complaint(node.uses, error, Level.WARNING)]

    def _plugins(self, node: Node) -> dict[str, dict[str, Any]]:
        found = plugin_identities(node.uses, node.config, self.catalogue)
        components = {f"with.{option}": identity for option, identity in found["components"].items()}
        return {node.uses: found["stage"], **components}

    def _outputs(self, node: Node, planned: NodePlan, inputs: Inputs) -> dict[Reference, Input]:
        if planned.record is None:
            return predicted_inputs(self.graph, node, inputs, self.catalogue)
        references = {Reference(node.name, port): digest for port, digest in planned.record.outputs.items()}
        return {
            reference: real_input(reference, self.store.get(digest))
            for reference, digest in references.items()
        }


def _means(node: Node) -> dict[str, str]:
    keyed = {path for path, _, _ in choices(node.config, volatile=False)}
    named = ((path, choice.name) for path, choice, _ in choices(node.config) if path not in keyed)
    return {f"with.{'.'.join(map(str, path))}": name for path, name in named}


def _no_source(node: Node, error: DataError) -> Finding:
    return Finding(
        rule="source",
        level=Level.ERROR,
        certainty=Certainty.VERIFIED,
        message=f"with.{error.where}: {error.message}: {error.found}",
        node=node.name,
        fix=error.fix,
    )


def _said(node: NodePlan) -> str:
    return node.record.status if node.record is not None else node.standing.value


def _without_inputs(ingredients: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ingredients.items() if name != "inputs"}
