"""From stages to nodes: each point of a matrix with its validated options, and where each of them was set."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.contracts.stage import SourceMark, Stage
from posttrain.errors import PluginError, PosttrainError, SpecError
from posttrain.keypath import ABSENT, KeyPath, numbered, step
from posttrain.planning.nodes import Node
from posttrain.planning.overrides import assign
from posttrain.planning.parsing import Resolved
from posttrain.planning.problems import SpecProblems
from posttrain.planning.references import scalar_text
from posttrain.planning.source import Position, dotted, problem_at
from posttrain.planning.spec import StageSpec
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import ConfigProblem, ConfigProblems, marked, validate_config

DEFAULT = "default"
"""The origin of an option that nobody set."""


def expanded(resolved: Resolved, catalogue: Catalogue, base: Path) -> dict[str, list[Node]]:
    """Return the nodes of every stage, their inputs not connected yet.

    Raises:
        SpecProblems: Everything that is wrong with plugins and options, each problem with its place.
    """
    problems: list[PosttrainError] = []
    drafts: dict[str, list[Node]] = {}
    for name, stage in resolved.spec.stages.items():
        try:
            drafts[name] = _expanded(name, stage, catalogue, base, resolved)
        except SpecProblems as several:
            problems.extend(several.problems)
        except PosttrainError as error:
            problems.append(error)
    if problems:
        raise SpecProblems(problems)
    return drafts


def _expanded(
    name: str, stage: StageSpec, catalogue: Catalogue, base: Path, resolved: Resolved
) -> list[Node]:
    plugin = _plugin(name, stage, catalogue, resolved)
    problems: dict[str, PosttrainError] = {}
    nodes = []
    for values in itertools.product(*map(enumerate, stage.matrix.values())):
        options = _options(name, stage, dict(zip(stage.matrix, values, strict=True)), resolved)
        try:
            nodes.append(_node(name, stage, plugin, options, _config(plugin, options, catalogue, base)))
        except SpecProblems as several:
            # The nodes of one matrix share most options, and so most problems.
            problems.update((str(problem), problem) for problem in several.problems)
    if problems:
        raise SpecProblems(problems.values())
    return nodes


def _node(name: str, stage: StageSpec, plugin: Stage, options: Options, config: Any) -> Node:
    label = ",".join(f"{axis}={scalar_text(value)}" for axis, value in options.point.items())
    return Node(
        name=f"{name}[{label}]" if label else name,
        stage=name,
        uses=stage.uses,
        plugin=plugin,
        config=config,
        inputs={},
        needs=tuple(stage.needs),
        resources=stage.resources,
        runtime=stage.runtime,
        matrix=options.point,
        where=str(options.resolved.position(("stages", name), key=True)),
        origins={dotted(path): options.origin(path) for path in _leaves(config.model_dump(mode="json"))},
    )


def _plugin(name: str, stage: StageSpec, catalogue: Catalogue, resolved: Resolved) -> Stage:
    try:
        return catalogue.stage(stage.uses)
    except PluginError as error:
        raise problem_at(
            resolved,
            ("stages", name, "uses"),
            error.message,
            found=error.found,
            expected=error.expected,
            fix=error.fix,
        ) from error


@dataclass(frozen=True)
class Options:
    """What was set for one node, and where.

    Args:
        values: The options as they were written, the node's point of the matrix among them.
        stage: The stage's name.
        point: The values of the matrix' axes.
        axes: Where the values of the matrix are written, by the path of the option.
        resolved: Knows where everything else is written.
    """

    values: Mapping[str, Any]
    stage: str
    point: Mapping[str, Any]
    axes: Mapping[KeyPath, KeyPath]
    resolved: Resolved

    def position(self, path: KeyPath, *, key: bool = False) -> Position:
        """Return where the option at `path` was set: in the stage, under `defaults` or `matrix`, or from outside."""
        for option, place in self.axes.items():
            if path[: len(option)] == option:
                return self.resolved.position(place)
        return self.resolved.position(("stages", self.stage, "with", *path), key=key)

    def origin(self, path: KeyPath) -> str:
        """Return where the option at `path` was set, or that it has its default."""
        written = _written(self.values, path)
        return DEFAULT if written is None else str(self.position(written))


def _options(
    name: str, stage: StageSpec, point: Mapping[str, tuple[int, Any]], resolved: Resolved
) -> Options:
    """Put the values of one point of the matrix into the options of a stage."""
    tree = {"with": copy.deepcopy(dict(stage.with_))}
    axes: dict[KeyPath, KeyPath] = {}
    for axis, (index, value) in point.items():
        place = ("stages", name, "matrix", axis)
        path = numbered(tree["with"], axis.split("."))
        try:
            assign(tree, ("with", *path), value)
        except SpecError as error:
            raise problem_at(
                resolved, place, error.message, found=error.found, expected=error.expected, key=True
            ) from error
        axes[path] = (*place, index)
    chosen = {axis: value for axis, (_, value) in point.items()}
    return Options(tree["with"], name, chosen, axes, resolved)


def _config(plugin: Stage, options: Options, catalogue: Catalogue, base: Path) -> Any:
    """Validate a node's options and make its local source paths absolute."""
    try:
        config = validate_config(plugin.config, options.values, catalogue)
        sources = {path: str((base / str(value)).absolute()) for path, value in marked(config, SourceMark)}
        if not sources:
            return config
        complete = config.model_dump(mode="json")
        for path, value in sources.items():
            _set(complete, path, value)
        return validate_config(plugin.config, complete, catalogue)
    except ConfigProblems as several:
        raise SpecProblems(
            problem_at(
                options,
                problem.path,
                _told(problem, options),
                found=problem.found,
                expected=problem.expected,
                fix=problem.suggestion,
                key=problem.at_key,
            )
            for problem in several.problems
        ) from several


def _told(problem: ConfigProblem, options: Options) -> str:
    """Return what is wrong, and at which key path where the place is one of a file."""
    path = dotted(("stages", options.stage, "with", *problem.path))
    placed = str(options.position(problem.path, key=problem.at_key)) == path
    return problem.message if placed else f"{problem.message} (`{path}`)"


def _set(data: Any, path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value


def _written(data: Any, path: KeyPath) -> KeyPath | None:
    """Return the path that set an option, or None when nobody did; a bare component name sets its `name`."""
    for depth, part in enumerate(path):
        if isinstance(data, str) and part == "name":
            return path[:depth]
        data = step(data, part)
        if data is ABSENT:
            return None
    return path


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all single values; a list of them is a value too."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif path:
        yield path
