"""Smoke runs: `--tiny` overlays what every stage says makes it small."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.keypath import ABSENT, KeyPath, at
from posttrain.planning.expansion import expanded
from posttrain.planning.layers import Origins, origin_of
from posttrain.planning.nodes import Node
from posttrain.planning.parsing import Resolved
from posttrain.planning.questions import shrinkage
from posttrain.planning.source import Position
from posttrain.registry.catalogue import Catalogue

ORIGIN = Position("--tiny")


def shrunk(resolved: Resolved, catalogue: Catalogue, base: Path) -> Resolved:
    """Return the spec with every stage's smoke-run options.

    They beat the file, but neither `--set` nor a matrix. An option that a stage shrinks to `None` is taken away.

    Raises:
        SpecProblems: Everything that is wrong with the options as they are.
    """
    origins, places = dict(resolved.origins), dict(resolved.source.origins)
    stages = {}
    for name, drafts in expanded(resolved, catalogue, base).items():
        stage = resolved.spec.stages[name]
        options = copy.deepcopy(dict(stage.with_))
        for path, value in _changes(shrinkage(drafts[0], catalogue)):
            if _held(path, drafts[0], options, resolved):
                continue
            _put(options, path, value)
            _move((*("stages", name, "with"), *path), origins, places)
        stages[name] = stage.model_copy(update={"with_": options})
    return Resolved(
        resolved.spec.model_copy(update={"stages": stages}), replace(resolved.source, origins=places), origins
    )


def _changes(over: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in over.items():
        if isinstance(value, Mapping) and value:
            yield from _changes(value, (*path, key))
        else:
            yield (*path, key), value


def _held(path: KeyPath, node: Node, options: Mapping[str, Any], resolved: Resolved) -> bool:
    """Whether an axis of the matrix or the command line decides on the option."""
    axes = [tuple(axis.split(".")) for axis in node.matrix]
    if any(_related(path, axis) for axis in axes):
        return True
    original = origin_of(("stages", node.stage, "with", *path), resolved.origins)
    return at(options, path) is not ABSENT and any(
        _related(original, place) for place in resolved.source.origins
    )


def _related(one: KeyPath, other: KeyPath) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _put(options: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set or take away one option; a bare component name on the way becomes a mapping."""
    for part in path[:-1]:
        inner = options.get(str(part))
        opened = {"name": inner} if isinstance(inner, str) else inner if isinstance(inner, dict) else {}
        options[str(part)] = opened
        options = opened
    if value is None:
        options.pop(str(path[-1]), None)
    else:
        options[str(path[-1])] = copy.deepcopy(value)


def _move(path: KeyPath, origins: Origins, places: dict[KeyPath, Position]) -> None:
    """Remember that the option at `path` comes from here now."""
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
    origins[path] = path
    places[path] = ORIGIN
