"""From a validated spec to a graph of nodes: matrix expanded, options validated, ports connected.

Every problem is found before anything runs, and each names both ends of the connection it is about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.contracts.stage import Port, SourceMark, Stage
from posttrain.errors import PluginError, PosttrainError, SpecError
from posttrain.planning.problems import SpecProblems, did_you_mean, listed
from posttrain.planning.references import Ref, scalar_text
from posttrain.planning.source import KeyPath, problem_at
from posttrain.planning.spec import Resolved, Resources, Runtime, StageSpec
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import ConfigProblems, marked, validate_config


@dataclass(frozen=True)
class Reference:
    """One output port of one node."""

    node: str
    port: str

    def __str__(self) -> str:
        return f"{self.node}.{self.port}"


@dataclass(frozen=True)
class Node:
    """One stage after matrix expansion, with validated options and resolved inputs."""

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

    def outputs(self) -> tuple[Port, ...]:
        """Return the output ports under this node's options."""
        return self.plugin.outputs(self.config)


@dataclass(frozen=True)
class Graph:
    """The nodes of a pipeline in an order in which they can run."""

    nodes: Mapping[str, Node]
    base: Path
    required: frozenset[str] = frozenset()
    """Nodes outside the selection (`--from`): they must be in the cache already."""

    @property
    def order(self) -> tuple[str, ...]:
        """Node names, every node after what it depends on."""
        return tuple(self.nodes)

    @property
    def dependencies(self) -> dict[str, tuple[str, ...]]:
        """The nodes each node waits for."""
        return {
            name: tuple(
                dict.fromkeys([*(ref.node for refs in node.inputs.values() for ref in refs), *node.needs])
            )
            for name, node in self.nodes.items()
        }

    def ancestors(self, names: Iterable[str]) -> set[str]:
        """Return the named nodes and everything they depend on."""
        found: set[str] = set()
        queue = list(names)
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                queue.extend(self.dependencies[name])
        return found

    def descendants(self, names: Iterable[str]) -> set[str]:
        """Return the named nodes and everything that depends on them."""
        found = set(names)
        for name in self.order:
            if found.intersection(self.dependencies[name]):
                found.add(name)
        return found


def build_graph(resolved: Resolved, catalogue: Catalogue, base: Path, *, tiny: bool = False) -> Graph:
    """Expand, validate and connect a resolved spec.

    Args:
        resolved: The spec with its defaults merged, and where each value was written.
        catalogue: The plugins.
        base: Directory that relative source paths are resolved against.
        tiny: Overlay every stage's `tiny` options.

    Raises:
        SpecProblems: Everything that is wrong, each with its place.
    """
    problems: list[PosttrainError] = []
    drafts: dict[str, list[Node]] = {}
    for name, stage in resolved.spec.stages.items():
        try:
            drafts[name] = _expand(name, stage, catalogue, base, resolved, tiny)
        except SpecProblems as several:
            problems.extend(several.problems)
        except PosttrainError as error:
            problems.append(error)
    if problems:
        raise SpecProblems(problems)
    nodes: list[Node] = []
    for name, stage in resolved.spec.stages.items():
        for draft in drafts[name]:
            try:
                nodes.append(_connect(draft, stage, drafts, resolved))
            except SpecProblems as several:
                problems.extend(several.problems)
    if problems:
        raise SpecProblems(dict.fromkeys(problems))
    return Graph(_sorted(nodes), base)


def select(graph: Graph, *, only: Sequence[str] = (), start: Sequence[str] = ()) -> Graph:
    """Narrow a graph to `only` some nodes and what they need, or to what runs `from` some nodes on.

    Names may be nodes or stages (all of a stage's nodes). With `start`, the nodes before are required to be cached.
    """
    keep, required = set(graph.nodes), set[str]()
    if only:
        keep &= graph.ancestors(_named(graph, only, "--only"))
    if start:
        onward = graph.descendants(_named(graph, start, "--from"))
        keep &= graph.ancestors(onward)
        required = keep - onward
    nodes = {name: node for name, node in graph.nodes.items() if name in keep}
    return replace(graph, nodes=nodes, required=frozenset(required))


def _named(graph: Graph, names: Sequence[str], option: str) -> set[str]:
    chosen: set[str] = set()
    for name in names:
        matching = {node.name for node in graph.nodes.values() if name in (node.name, node.stage)}
        if not matching:
            known = list(dict.fromkeys(node.stage for node in graph.nodes.values()))
            raise SpecError(
                "no such stage in this pipeline",
                where=option,
                found=name,
                expected=f"one of {listed(known)}",
                fix=did_you_mean(name, known),
            )
        chosen |= matching
    return chosen


def _expand(
    name: str, stage: StageSpec, catalogue: Catalogue, base: Path, resolved: Resolved, tiny: bool
) -> list[Node]:
    """Return one draft node per point of the matrix; inputs are connected later."""
    try:
        plugin = catalogue.stage(stage.uses)
    except PluginError as error:
        raise problem_at(
            resolved,
            ("stages", name, "uses"),
            error.message,
            found=error.found,
            expected=error.expected,
            fix=error.fix,
        ) from error
    nodes = []
    for values in itertools.product(*stage.matrix.values()):
        point = dict(zip(stage.matrix, values, strict=True))
        options = _overlay(stage.with_, plugin.tiny) if tiny else dict(stage.with_)
        for key, value in point.items():
            options = _with_value(options, tuple(key.split(".")), value)
        label = ",".join(f"{key}={scalar_text(value)}" for key, value in point.items())
        nodes.append(
            Node(
                name=f"{name}[{label}]" if label else name,
                stage=name,
                uses=stage.uses,
                plugin=plugin,
                config=_config(plugin, options, catalogue, base, name, resolved),
                inputs={},
                needs=tuple(stage.needs),
                resources=stage.resources,
                runtime=stage.runtime,
                matrix=point,
                where=str(resolved.position(("stages", name), key=True)),
            )
        )
    return nodes


def _config(
    plugin: Stage, options: Mapping[str, Any], catalogue: Catalogue, base: Path, name: str, resolved: Resolved
) -> Any:
    """Validate a stage's options and make its local source paths absolute."""
    try:
        config = validate_config(plugin.config, options, catalogue)
        absolute = dict(options)
        for path, value in marked(config, SourceMark):
            if value is not None:
                absolute = _with_value(absolute, path, str((base / str(value)).absolute()))
        return validate_config(plugin.config, absolute, catalogue)
    except ConfigProblems as several:
        raise SpecProblems(
            problem_at(
                resolved,
                ("stages", name, "with", *problem.path),
                problem.message,
                found=problem.found,
                expected=problem.expected,
                fix=problem.suggestion,
            )
            for problem in several.problems
        ) from several


def _connect(draft: Node, stage: StageSpec, drafts: Mapping[str, list[Node]], resolved: Resolved) -> Node:
    """Resolve a draft's input references and `needs`, checking both ends of every connection."""
    problems: list[PosttrainError] = []
    ports = {port.name: port for port in draft.plugin.inputs}
    inputs: dict[str, tuple[Reference, ...]] = {}
    for name, value in stage.inputs.items():
        place = ("stages", draft.stage, "inputs", name)
        if name not in ports:
            problems.append(
                problem_at(
                    resolved,
                    place,
                    f"{draft.uses} has no input port `{name}`",
                    key=True,
                    expected=listed(ports),
                    fix=did_you_mean(name, ports),
                )
            )
            continue
        try:
            inputs[name] = _references(value, ports[name], draft, drafts, resolved, place)
        except SpecError as error:
            problems.append(error)
    for port in ports.values():
        if not port.optional and port.name not in stage.inputs:
            problems.append(
                problem_at(
                    resolved,
                    ("stages", draft.stage),
                    key=True,
                    message=f"input port `{port.name}` of stage `{draft.stage}` ({draft.uses}) is not connected",
                    expected=f"an artifact of kind {_kinds(port)}",
                    fix=f"add `{port.name}: STAGE` under `inputs:`",
                )
            )
    if problems:
        raise SpecProblems(problems)
    needs = tuple(node.name for need in draft.needs for node in drafts[need])
    return replace(draft, inputs=inputs, needs=needs)


def _references(
    value: str | list[str],
    port: Port,
    draft: Node,
    drafts: Mapping[str, list[Node]],
    resolved: Resolved,
    place: KeyPath,
) -> tuple[Reference, ...]:
    """Return the output ports that an input's value means."""
    texts = (
        [(value, place)]
        if isinstance(value, str)
        else [(text, (*place, at)) for at, text in enumerate(value)]
    )
    found = tuple(
        reference for text, at in texts for reference in _resolve(text, port, draft, drafts, resolved, at)
    )
    if len(found) > 1 and not port.many:
        raise problem_at(
            resolved,
            place,
            f"input port `{port.name}` of {draft.name} takes one artifact",
            found=", ".join(map(str, found)),
            fix="name one output, such as stage[seed=0]",
        )
    return found


def _resolve(
    text: str, port: Port, draft: Node, drafts: Mapping[str, list[Node]], resolved: Resolved, place: KeyPath
) -> Iterable[Reference]:
    """Return the output ports that one written reference means."""
    reference = Ref.parse(text)
    for producer in _selected(reference, drafts[reference.stage], resolved, place):
        outputs = {output.name: output for output in producer.outputs()}
        name = reference.port or (next(iter(outputs)) if len(outputs) == 1 else None)
        if name not in outputs:
            raise problem_at(
                resolved,
                place,
                f"{producer.name} has no output `{name}`" if name else f"{producer.name} has several outputs",
                found=text,
                expected="one of " + listed(f"{reference.stage}.{output}" for output in outputs),
                fix=did_you_mean(name, outputs) if name else None,
            )
        if not outputs[name].kinds & port.kinds:
            raise problem_at(
                resolved,
                place,
                f"{producer.name}.{name} does not fit input port `{port.name}` of {draft.name}",
                found=f"{_kinds(outputs[name])} from {producer.name} ({producer.uses})",
                expected=f"{_kinds(port)} for {draft.name} ({draft.uses})",
            )
        yield Reference(producer.name, name)


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
            fix=f'write "{reference.stage}[*]" for all of them',
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


def _sorted(nodes: list[Node]) -> dict[str, Node]:
    """Sort topologically, keeping the written order where it is free."""
    graph = Graph({node.name: node for node in nodes}, Path())
    waiting, done = dict(graph.nodes), dict[str, Node]()
    while waiting:
        ready = next((name for name in waiting if all(d in done for d in graph.dependencies[name])), None)
        if ready is None:
            cycle = _cycle(graph.dependencies, next(iter(waiting)), set(waiting))
            raise SpecProblems(
                [
                    SpecError(
                        "these stages depend on each other in a circle",
                        where=waiting[cycle[0]].where,
                        found=" → ".join(cycle),
                        fix="remove one of these inputs or needs",
                    )
                ]
            )
        done[ready] = waiting.pop(ready)
    return done


def _cycle(dependencies: Mapping[str, Sequence[str]], start: str, among: set[str]) -> list[str]:
    path, seen = [start], {start}
    while True:
        following = next(name for name in dependencies[path[-1]] if name in among)
        if following in seen:
            return [*path[path.index(following) :], following]
        path.append(following)
        seen.add(following)


def _overlay(options: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(options)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = (
            _overlay(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _with_value(options: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """Return a copy of nested options with one value set; a bare component name on the way becomes a mapping."""
    key, *rest = path
    changed: dict[Any, Any] = dict(options)
    if not rest:
        changed[key] = value
        return changed
    inner = changed.get(key, {})
    if isinstance(inner, list):
        items = list(inner)
        items[int(rest[0])] = _with_value(items[int(rest[0])], tuple(rest[1:]), value) if rest[1:] else value
        changed[key] = items
    else:
        changed[key] = _with_value({"name": inner} if isinstance(inner, str) else inner, tuple(rest), value)
    return changed


def _kinds(port: Port) -> str:
    return " or ".join(sorted(port.kinds))
