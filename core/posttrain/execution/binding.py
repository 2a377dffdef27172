"""Binding: a node meets the artifacts that really reach it, and gets its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts.store import Store
from posttrain.contracts.stage import Certainty, Finding, Input, Level, SecretMark
from posttrain.errors import DataError, HandoffError
from posttrain.planning.graph import Graph, Node, Reference
from posttrain.planning.handoffs import Handoffs, refusals
from posttrain.planning.keys import key_ingredients, key_of, source_digests
from posttrain.planning.secrets import is_reference
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import marked


@dataclass(frozen=True)
class Bound:
    """A node with its real inputs.

    Args:
        node: The node.
        inputs: What reaches each port.
        digests: The same as digests.
        ingredients: What the key was computed from.
        key: The key.
        findings: What the stage's check and the hand-off rules say now.
    """

    node: Node
    inputs: Mapping[str, Sequence[Input]]
    digests: dict[str, list[str]]
    ingredients: dict[str, Any]
    key: str
    findings: tuple[Finding, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The node's options as JSON; secrets are references."""
        options: dict[str, Any] = self.node.config.model_dump(mode="json")
        return options

    @property
    def warnings(self) -> list[str]:
        """What the check and the rules warn of now that the real artifacts are there."""
        return [
            f"{finding.label}: {finding.message}"
            for finding in self.findings
            if finding.level == Level.WARNING and finding.certainty == Certainty.VERIFIED
        ]

    def require_same_sources(self, base: Path, store: Store) -> None:
        """Refuse what was built while a source file changed: nobody can tell which content it was built from.

        Raises:
            DataError: A source is not what the key says any more.
        """
        known: dict[str, str] = self.ingredients["sources"]
        now = source_digests(self.node.config, base, store.memo)
        changed = [option for option in known if now.get(option) != known[option]]
        if changed:
            raise DataError(
                "this source changed while it was read",
                where=f"{self.node.name}.with.{changed[0]}",
                found=f"sha256 {now.get(changed[0])}",
                expected=f"sha256 {known[changed[0]]}",
                fix="let its writer finish first, then run again",
            )


def bind(
    graph: Graph, node: Node, outputs: Mapping[Reference, Input], catalogue: Catalogue, store: Store
) -> Bound:
    """Bind a node whose dependencies have all passed.

    Raises:
        HandoffError: What reaches it does not fit.
        DataError: A source file is missing.
    """
    handoffs = Handoffs(graph, catalogue)
    inputs = handoffs.inputs(node, outputs)
    digests = {
        port: [item.artifact.digest for item in items if item.artifact is not None]
        for port, items in inputs.items()
    }
    findings = handoffs.findings(node, outputs)
    if refused := refusals(findings):
        raise _refusal(node, refused)
    ingredients = key_ingredients(node, catalogue, digests, graph.base, store.memo)
    return Bound(node, inputs, digests, ingredients, key_of(ingredients), tuple(findings))


def _refusal(node: Node, findings: Sequence[Finding]) -> HandoffError:
    first, *others = findings
    more = "; ".join(f"{finding.label}: {finding.message}" for finding in others)
    return HandoffError(
        f"{first.label}: {first.message}",
        where=f"{node.name}.{first.port}" if first.port else node.name,
        found=f"besides, {more}" if more else None,
        fix=first.fix,
    )


def declared_secrets(node: Node) -> list[str]:
    """Return the names of the variables that a node's options and its `runtime.env` refer to as secrets."""
    options = (str(value) for _, value in marked(node.config, SecretMark) if value is not None)
    references = [*options, *filter(is_reference, node.runtime.env.values())]
    return sorted({reference.removeprefix("env:") for reference in references})
