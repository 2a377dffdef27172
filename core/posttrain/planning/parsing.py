"""From a source to a checked spec with its defaults merged.

`parse(load(path))` reports everything that is wrong together, with places. `resolved` merges the defaults;
every option still knows where it was written. `snapshot` and `spec_digest` are what is recorded: the same for
YAML, `--set` and Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError

from posttrain.artifacts.manifest import digest_of
from posttrain.errors import PosttrainError
from posttrain.keypath import KeyPath
from posttrain.planning.connections import cross_problems, unused_defaults
from posttrain.planning.layers import Origins, origin_of, overlay
from posttrain.planning.problems import SpecProblems, from_validation
from posttrain.planning.source import Position, Source
from posttrain.planning.spec import Part, PipelineSpec, Resources, Runtime, StageDefaults, StageSpec

_HINTS = {
    "config": "options of the stage go under `with`",
    "options": "options of the stage go under `with`",
    "params": "options of the stage go under `with`",
    "args": "options of the stage go under `with`",
    "depends_on": "use `needs` for order alone, `inputs` for data",
    "after": "use `needs` for order alone, `inputs` for data",
    "env": "write it under `runtime`",
    "python": "write it under `runtime`",
    "cpus": "write it under `resources`",
    "gpus": "write it under `resources`",
    "memory": "write it under `resources`",
}

_LEVELS: dict[KeyPath, type[Part]] = {
    (): PipelineSpec,
    ("stages",): StageSpec,
    ("stages", "resources"): Resources,
    ("stages", "runtime"): Runtime,
    ("defaults",): StageDefaults,
    ("defaults", "resources"): Resources,
    ("defaults", "runtime"): Runtime,
}


def _keys_at(path: KeyPath) -> Sequence[str]:
    model = _LEVELS[path[:1] + path[2:]]
    return [name.rstrip("_") for name in model.model_fields]


def parse(source: Source) -> PipelineSpec:
    """Validate a source as a whole.

    Raises:
        SpecProblems: Everything that is wrong with it.
    """
    try:
        spec = PipelineSpec.model_validate(source.data, by_alias=True, by_name=False)
    except ValidationError as error:
        problems = list(from_validation(error, source, _keys_at, _HINTS))
        stages = source.data.get("stages") if isinstance(source.data, dict) else None
        if isinstance(stages, dict):
            problems.extend(cross_problems(dict(_valid_stages(stages)), stages.keys(), source))
        raise SpecProblems(sorted(problems, key=_place)) from None
    check(spec, source)
    return spec


def _valid_stages(stages: Mapping[str, Any]) -> Iterator[tuple[str, StageSpec]]:
    for name, data in stages.items():
        try:
            yield name, StageSpec.model_validate(data, by_alias=True, by_name=False)
        except ValidationError:
            continue  # reported as part of the whole


def _place(problem: PosttrainError) -> tuple[int, int]:
    match = re.search(r":(\d+):(\d+)$", problem.where or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check(spec: PipelineSpec, source: Source | None = None) -> None:
    """Check what concerns several parts of a spec: references, needs, matrices, globs.

    Raises:
        SpecProblems: Everything that is wrong.
    """
    places = source or _nowhere()
    problems = [*cross_problems(spec.stages, spec.stages.keys(), places), *unused_defaults(spec, places)]
    if problems:
        raise SpecProblems(sorted(problems, key=_place))


def _nowhere() -> Source:
    return Source("pipeline", None)


@dataclass(frozen=True)
class Resolved:
    """A spec with its defaults merged into the stages.

    Args:
        spec: The spec; its `defaults` are empty.
        source: Where the original was written.
        origins: Merged key paths to key paths of the original, where they may differ.
    """

    spec: PipelineSpec
    source: Source
    origins: Origins = field(default_factory=dict)

    def position(self, path: KeyPath, *, key: bool = False) -> Position:
        """Return where the value at `path` was written, be it under `defaults`."""
        return self.source.position(origin_of(path, self.origins), key=key)


def resolved(spec: PipelineSpec, source: Source | None = None) -> Resolved:
    """Merge the defaults into the stages: matching globs from first to last, then the stage's own.

    Raises:
        SpecProblems: The parts of the spec do not fit (see `check`).
    """
    check(spec, source)
    origins: Origins = {}
    stages = {name: _merged(name, stage, spec.defaults, origins) for name, stage in spec.stages.items()}
    return Resolved(spec.model_copy(update={"defaults": {}, "stages": stages}), source or _nowhere(), origins)


def _merged(
    name: str, stage: StageSpec, defaults: Mapping[str, StageDefaults], origins: Origins
) -> StageSpec:
    layers: list[tuple[KeyPath, StageDefaults | StageSpec]] = [
        (("defaults", glob), default) for glob, default in defaults.items() if fnmatchcase(stage.uses, glob)
    ]
    layers.append((("stages", name), stage))
    merged: dict[str, dict[str, Any]] = {"with": {}, "resources": {}, "runtime": {}}
    for at, layer in layers:
        written = layer.model_dump(by_alias=True, exclude_unset=True)
        for part, target in merged.items():
            where, path = (*at, part), ("stages", name, part)
            overlay(target, written.get(part, {}), where, path, origins, components=part == "with")
    return stage.model_copy(
        update={
            "with_": merged["with"],
            "resources": Resources(**merged["resources"]),
            "runtime": Runtime(**merged["runtime"]),
        }
    )


def snapshot(spec: PipelineSpec) -> dict[str, Any]:
    """Return the resolved spec as JSON data: every field present, keys sorted, secrets only as references."""
    data = resolved(spec).spec.model_dump(mode="json", by_alias=True, exclude={"defaults"})
    ordered: dict[str, Any] = _sorted(data)
    return ordered


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def spec_digest(spec: PipelineSpec) -> str:
    """Return the digest of the spec's snapshot."""
    return digest_of(snapshot(spec))
