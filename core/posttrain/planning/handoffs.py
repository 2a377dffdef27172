"""What reaches a node's ports, and what the hand-off rules say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import Group
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Finding, Input, Level, Prediction
from posttrain.errors import PosttrainError
from posttrain.planning.nodes import Graph, Node, Reference
from posttrain.planning.questions import objections, outputs_of, predictions, prompts_of, verdicts
from posttrain.planning.requirements import shortfalls
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.rules import Ruling, require_own_code, rulebook

PROMPTS = "prompts.txt"
"""A dataset artifact may carry one prompt hash a line in this file; the leakage rule reads it."""


def real_input(reference: Reference, artifact: Artifact) -> Input:
    """Return an input whose facts come from a committed artifact."""
    prompts: frozenset[str] | None = None
    if artifact.kind == Kind.DATASET and artifact.file(PROMPTS).exists():
        prompts = frozenset(artifact.file(PROMPTS).read_text().split())
    return Input(str(reference), artifact.kind, artifact.facts, artifact, prompts)


def predicted_inputs(
    graph: Graph, node: Node, inputs: Mapping[str, Sequence[Input]], catalogue: Catalogue
) -> dict[Reference, Input]:
    """Return what a node is expected to put out, before it has run.

    Raises:
        PluginError: The stage cannot tell because it is broken.
    """
    expected = predictions(node, inputs, catalogue)
    found = {}
    for port in outputs_of(node, catalogue):
        prediction = expected.get(port.name) or Prediction(min(port.kinds))
        dataset = prediction.kind == Kind.DATASET
        prompts = prompts_of(node, port.name, graph.base, catalogue) if dataset else None
        reference = Reference(node.name, port.name)
        found[reference] = Input(str(reference), prediction.kind, prediction.facts, None, prompts)
    return found


@dataclass(frozen=True)
class Handoffs:
    """Judges the hand-offs of a graph with the stages' own checks and with every registered rule."""

    graph: Graph
    catalogue: Catalogue

    def inputs(self, node: Node, outputs: Mapping[Reference, Input]) -> dict[str, list[Input]]:
        """Return what reaches each port of a node."""
        return {
            port: [outputs[reference] for reference in references] for port, references in node.inputs.items()
        }

    def site(self, node: Node, outputs: Mapping[Reference, Input]) -> Site:
        """Return a node as the rules see it, with its ancestors."""
        return self._site(node.name, outputs, {})

    def _site(self, name: str, outputs: Mapping[Reference, Input], made: dict[str, Site]) -> Site:
        if name not in made:
            node = self.graph.nodes[name]
            upstream = {
                str(reference): self._site(reference.node, outputs, made)
                for references in node.inputs.values()
                for reference in references
            }
            made[name] = Site(name, node.uses, node.plugin, node.config, self.inputs(node, outputs), upstream)
        return made[name]

    def findings(self, node: Node, outputs: Mapping[Reference, Input]) -> list[Finding]:
        """Return what the stage's check and every rule have to say about one node.

        A check or rule that raises says so as an error of its own: a broken one never passes for silence.
        """
        site = self.site(node, outputs)
        found = _heard(node.uses, lambda: objections(node, site.inputs, self.catalogue))
        found += _heard("requirements", lambda: tuple(shortfalls(node, self.catalogue)))
        for name in self.catalogue.names(Group.RULE):
            found += _heard(name, partial(self._ruled, name, site))
        return [replace(finding, node=node.name) for finding in found]

    @cached_property
    def _book(self) -> Mapping[str, Ruling]:
        return rulebook(self.catalogue)

    def _ruled(self, name: str, site: Site) -> tuple[Finding, ...]:
        """Ask one rule; what it finds carries its name and its code, whatever it wrote there itself."""
        code = require_own_code(self.catalogue, name, self._book).code
        return tuple(replace(each, rule=name, code=code) for each in verdicts(name, site, self.catalogue))


def _heard(judge: str, ask: Callable[[], tuple[Finding, ...]]) -> list[Finding]:
    """Return what a judge says; what it raises is an error."""
    try:
        return list(ask())
    except PosttrainError as error:
        return [complaint(judge, error)]


def complaint(judge: str, error: PosttrainError, level: Level = Level.ERROR) -> Finding:
    """Return what a check, a rule or an estimate raised, as a finding."""
    found = f": {error.found}" if error.found else ""
    where = f" ({error.where})" if error.where else ""
    return Finding(judge, level, Certainty.VERIFIED, f"{error.message}{found}{where}", fix=error.fix)


def refusals(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that forbid a run: errors that rest on real or predicted manifests."""
    return [f for f in findings if f.level == Level.ERROR and f.certainty != Certainty.UNKNOWN]
