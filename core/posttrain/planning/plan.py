"""The plan: what a run would do, and why, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from posttrain.artifacts.store import KeyRecord
from posttrain.contracts.stage import Estimate, Finding, Input
from posttrain.errors import HandoffError, SpecError
from posttrain.planning.capacity import Machine
from posttrain.planning.handoffs import refusals
from posttrain.planning.nodes import Graph, Reference
from posttrain.wording import listed


class Standing(StrEnum):
    """Where a node stands before a run."""

    CACHED = "cached"
    NEW = "new"
    STALE = "stale"
    WAITS = "waits"
    """Not known yet: an input will be rebuilt, and equal content would make this node cached again."""
    BLOCKED = "blocked"
    """A gate it depends on said no, and nothing has changed since."""

    @property
    def settled(self) -> bool:
        """Whether there is nothing to build."""
        return self in (Standing.CACHED, Standing.BLOCKED)


@dataclass(frozen=True)
class Judgement:
    """Where a node stands and why.

    Args:
        standing: Cached, new, stale, waiting for an input, or blocked.
        reasons: Why it is not cached.
        key: The node's key, when every input is known.
        record: What the cache holds under the key.
    """

    standing: Standing
    reasons: tuple[str, ...] = ()
    key: str | None = None
    record: KeyRecord | None = None


@dataclass(frozen=True)
class NodePlan:
    """One node of the plan.

    Args:
        node: The node's name.
        uses: The stage it runs.
        judgement: Where it stands.
        plugins: Identity of the stage, by its name, and of every component, by its option (`with.loss`).
        means: Names of the components that cannot change the outputs, such as a backend, by their options; another
            one is no reason to run the node again.
        config: The resolved options; secrets are references.
        origins: Where each option was set.
        findings: Hand-off findings.
        estimate: Expected parameters and memory.
        launch: The command of the stage process.
        drift: Versions that differ from those the cached outputs were made with.
        inputs: What reaches each port.
    """

    node: str
    uses: str
    judgement: Judgement
    plugins: Mapping[str, Mapping[str, Any]]
    means: Mapping[str, str]
    config: Mapping[str, Any]
    origins: Mapping[str, str]
    findings: tuple[Finding, ...]
    estimate: Estimate | None
    launch: tuple[str, ...]
    drift: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]

    @property
    def standing(self) -> Standing:
        """Where the node stands."""
        return self.judgement.standing

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not cached."""
        return self.judgement.reasons

    @property
    def key(self) -> str | None:
        """The node's key, when every input is known."""
        return self.judgement.key

    @property
    def record(self) -> KeyRecord | None:
        """What the cache holds under the key."""
        return self.judgement.record

    @property
    def stops(self) -> bool:
        """Whether what depends on the node cannot run although nothing is left to build before it."""
        rejected = self.record is not None and self.record.status != "completed"
        return rejected or self.standing == Standing.BLOCKED

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
            "means": dict(self.means),
            "config": dict(self.config),
            "origins": dict(self.origins),
            "findings": [
                {name: value for name, value in asdict(finding).items() if name != "node"}
                for finding in self.findings
            ],
            "estimate": None if self.estimate is None else asdict(self.estimate),
            "launch": list(self.launch),
            "drift": list(self.drift),
            "inputs": {port: list(origins) for port, origins in self.inputs.items()},
        }


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Args:
        name: The pipeline's name.
        spec_digest: The digest of the resolved spec.
        graph: What would be run.
        nodes: The nodes as they stand.
        outputs: What every output port holds, or is expected to hold.
        warnings: What is odd about plugins (one that is broken may be a rule that does not speak) and records.
    """

    name: str
    spec_digest: str
    graph: Graph
    nodes: Mapping[str, NodePlan]
    outputs: Mapping[Reference, Input] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def refused(self) -> list[Finding]:
        """The findings that forbid the run."""
        return refusals([finding for node in self.nodes.values() for finding in node.findings])

    @property
    def unbuilt(self) -> list[str]:
        """Nodes that the selection requires to be cached (`--from`) and that are not."""
        required = [node for name, node in self.nodes.items() if name in self.graph.required]
        return [node.node for node in required if node.standing != Standing.CACHED]

    @property
    def nothing_to_do(self) -> bool:
        """Whether every node is cached, or blocked by a cached verdict."""
        return all(node.standing.settled for node in self.nodes.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for `--json` and for `plan.json`."""
        return {
            "pipeline": self.name,
            "spec_digest": self.spec_digest,
            "nothing_to_do": self.nothing_to_do,
            "refused": len(self.refused),
            "unbuilt": self.unbuilt,
            "warnings": list(self.warnings),
            "nodes": [node.as_dict() for node in self.nodes.values()],
        }


def require_allowed(plan: Plan) -> None:
    """Refuse a plan whose hand-offs do not fit or whose selection lacks what it needs.

    Raises:
        HandoffError: Some hand-off does not fit.
        SpecError: `--from` leaves out stages that are not cached.
    """
    if plan.refused:
        first, *others = plan.refused
        where = f"{first.node}.{first.port}" if first.port else first.node
        more = dict.fromkeys(f"{f.node}: {f.message}" for f in others if f.message != first.message)
        raise HandoffError(
            f"{first.label}: {first.message}" if first.code else first.message,
            where=where,
            found=f"besides, {'; '.join(more)}" if more else None,
            fix=first.fix,
        )
    if plan.unbuilt:
        raise SpecError(
            "these stages come before the selection and are not in the cache",
            where="--from",
            found=listed(plan.unbuilt),
            fix="run without --from, or select from an earlier stage",
        )


def require_room(plan: Plan) -> None:
    """Refuse to run a plan with a node that is new or stale and asks for more than this machine has.

    Raises:
        SpecError: It has less.
    """
    machine = Machine.here()
    for name, node in plan.nodes.items():
        if node.standing in (Standing.NEW, Standing.STALE):
            machine.require(name, plan.graph.nodes[name].resources)
