"""Ports: what each input of a node is connected to, with both ends of every connection checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from posttrain.contracts.stage import Port
from posttrain.errors import PosttrainError, SpecError
from posttrain.planning.nodes import Node, Reference
from posttrain.planning.parsing import Resolved
from posttrain.planning.problems import SpecProblems
from posttrain.planning.questions import outputs_of
from posttrain.planning.references import Ref
from posttrain.planning.source import KeyPath, problem_at
from posttrain.planning.spec import StageSpec
from posttrain.registry.catalogue import Catalogue
from posttrain.wording import did_you_mean, either, indefinite, listed

Drafts = Mapping[str, list[Node]]


def connected(
    draft: Node, stage: StageSpec, drafts: Drafts, resolved: Resolved, catalogue: Catalogue
) -> Node:
    """Return a draft with its inputs and `needs` resolved to nodes.

    Args:
        draft: The node to connect.
        stage: The stage as written.
        drafts: All nodes by stage.
        resolved: Knows where everything is written.
        catalogue: The plugins.

    Raises:
        SpecProblems: Everything that is wrong with the node's connections.
    """
    problems: list[PosttrainError] = []
    ports = {port.name: port for port in draft.plugin.inputs}
    inputs: dict[str, tuple[Reference, ...]] = {}
    for name, value in stage.inputs.items():
        place = ("stages", draft.stage, "inputs", name)
        if name not in ports:
            problems.append(_no_port(name, draft, ports, resolved, place))
            continue
        try:
            wire = _Wire(draft, ports[name], drafts, resolved, catalogue)
            inputs[name] = wire.references(value, place)
        except PosttrainError as error:
            problems.append(error)
    problems.extend(
        _unconnected(port, draft, resolved)
        for port in ports.values()
        if not port.optional and port.name not in stage.inputs
    )
    if problems:
        raise SpecProblems(problems)
    needs = tuple(node.name for need in draft.needs for node in drafts[need])
    return replace(draft, inputs=inputs, needs=needs)


def _no_port(
    name: str, draft: Node, ports: Mapping[str, Port], resolved: Resolved, place: KeyPath
) -> SpecError:
    return problem_at(
        resolved,
        place,
        f"{draft.uses} has no input port `{name}`",
        key=True,
        found=name,
        expected=f"one of {listed(ports)}" if ports else "no inputs",
        fix=did_you_mean(name, ports),
    )


def _unconnected(port: Port, draft: Node, resolved: Resolved) -> SpecError:
    return problem_at(
        resolved,
        ("stages", draft.stage),
        f"input port `{port.name}` of stage `{draft.stage}` ({draft.uses}) is not connected",
        key=True,
        expected=f"an artifact of kind {either(port.kinds)}",
        fix=f"add `{port.name}: STAGE` under `inputs:`",
    )


@dataclass(frozen=True)
class _Wire:
    """One input port that is being connected."""

    draft: Node
    port: Port
    drafts: Drafts
    resolved: Resolved
    catalogue: Catalogue

    def references(self, value: str | list[str], place: KeyPath) -> tuple[Reference, ...]:
        """Return the output ports that an input's value means."""
        written = (
            [(value, place)]
            if isinstance(value, str)
            else [(text, (*place, index)) for index, text in enumerate(value)]
        )
        found = tuple(reference for text, at in written for reference in self._outputs(text, at))
        if len(found) > 1 and not self.port.many:
            raise problem_at(
                self.resolved,
                place,
                f"input port `{self.port.name}` of {self.draft.name} ({self.draft.uses}) takes one artifact",
                found=f"{len(found)}: {listed(map(str, found))}",
                fix=f"name one of them, such as {found[0]}",
            )
        return found

    def _outputs(self, text: str, place: KeyPath) -> Iterator[Reference]:
        reference = Ref.parse(text)
        for producer in _selected(reference, self.drafts[reference.stage], self.resolved, place):
            outputs = {output.name: output for output in outputs_of(producer, self.catalogue)}
            name = reference.port or (next(iter(outputs)) if len(outputs) == 1 else None)
            if name is None or name not in outputs:
                raise self._no_output(text, name, producer, outputs, place)
            if not outputs[name].kinds & self.port.kinds:
                raise problem_at(
                    self.resolved,
                    place,
                    f"{producer.name}.{name} does not fit input port `{self.port.name}` of {self.draft.name}",
                    found=f"{either(outputs[name].kinds)} from {producer.name} ({producer.uses})",
                    expected=f"{either(self.port.kinds)} for {self.draft.name} ({self.draft.uses})",
                    fix=self._other(),
                )
            yield Reference(producer.name, name)

    def _other(self) -> str:
        """Return which outputs of the pipeline would fit the port."""
        nodes = [node for each in self.drafts.values() for node in each if node.name != self.draft.name]
        fitting = [
            f"{node.name}.{port.name}"
            for node in nodes
            for port in outputs_of(node, self.catalogue)
            if port.kinds & self.port.kinds
        ]
        return (
            f"connect one that fits: {listed(fitting)}"
            if fitting
            else f"add a stage that makes {indefinite(either(self.port.kinds))}"
        )

    def _no_output(
        self, text: str, name: str | None, producer: Node, outputs: Iterable[str], place: KeyPath
    ) -> SpecError:
        spelled = Ref.parse(text)
        known = [str(replace(spelled, port=output)) for output in outputs]
        if name is not None:
            message = f"{producer.name} ({producer.uses}) has no output `{name}`"
        elif known:
            message = f"{producer.name} ({producer.uses}) has several outputs"
        else:
            message = f"{producer.name} ({producer.uses}) puts out nothing"
        return problem_at(
            self.resolved,
            place,
            message,
            found=text,
            expected=f"one of {listed(known)}" if known else None,
            fix=did_you_mean(text, known) if name is not None else None,
        )


def _selected(reference: Ref, producers: list[Node], resolved: Resolved, place: KeyPath) -> list[Node]:
    """Return the nodes of a stage that a reference selects; a matrix must be selected from explicitly."""
    names = listed(node.name for node in producers)
    if reference.selector is None and producers[0].matrix:
        raise problem_at(
            resolved,
            place,
            f"stage `{reference.stage}` has a matrix, so it is several nodes",
            found=str(reference),
            expected=f"one of {names}",
            fix=f'write "{replace(reference, selector="*")}" for all of them',
        )
    matching = [node for node in producers if reference.selects(dict(node.matrix))]
    if not matching:
        raise problem_at(
            resolved,
            place,
            f"no node of stage `{reference.stage}` is selected",
            found=str(reference),
            expected=f"one of {names}",
        )
    return matching
