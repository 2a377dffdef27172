"""What stages say about each other: references, needs, selections from a matrix, globs of defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from posttrain.errors import SpecError
from posttrain.keypath import ABSENT, KeyPath, at
from posttrain.planning.references import Ref, scalar_text
from posttrain.planning.source import Places, problem_at
from posttrain.planning.spec import PipelineSpec, StageSpec
from posttrain.wording import did_you_mean, listed


def cross_problems(
    stages: Mapping[str, StageSpec], names: Collection[str], places: Places
) -> Iterator[SpecError]:
    """Yield what is wrong with references, `needs` and matrices; `names` are all stages, valid or not."""
    for name, stage in stages.items():
        place = ("stages", name)
        for path, ref in stage.references():
            yield from _target_problems(name, ref.stage, place + path, names, places)
            if ref.stage in stages and ref.selector is not None:
                yield from _selector_problems(ref, stages[ref.stage], place + path, places)
        for index, needed in enumerate(stage.needs):
            yield from _target_problems(name, needed, (*place, "needs", index), names, places)
        for axis in stage.matrix:
            if at(stage.with_, axis.split(".")) is not ABSENT:
                yield problem_at(
                    places,
                    (*place, "with", *axis.split(".")),
                    f"`{axis}` is set under `with` and under `matrix`",
                    expected="one of them",
                    fix=f"remove it here, or the axis `{axis}` of the matrix",
                    key=True,
                )


def _target_problems(
    name: str, target: str, path: KeyPath, names: Collection[str], places: Places
) -> Iterator[SpecError]:
    if target == name:
        yield problem_at(places, path, f"the stage `{name}` depends on itself", found=target)
    elif target not in names:
        yield problem_at(
            places,
            path,
            f"there is no stage `{target}`",
            found=target,
            expected=f"one of {listed(known for known in names if known != name)}",
            fix=did_you_mean(target, [known for known in names if known != name]),
        )


def _selector_problems(ref: Ref, stage: StageSpec, path: KeyPath, places: Places) -> Iterator[SpecError]:
    if not stage.matrix:
        yield problem_at(
            places,
            path,
            f"the stage `{ref.stage}` has no matrix to select from",
            found=ref,
            fix=f"write {ref.stage}",
        )
        return
    for axis, text in ref.selector.items() if isinstance(ref.selector, dict) else ():
        values = [scalar_text(value) for value in stage.matrix.get(axis, [])]
        if axis not in stage.matrix:
            message, known, word = (
                f"the matrix of `{ref.stage}` has no axis `{axis}`",
                list(stage.matrix),
                axis,
            )
        elif text not in values:
            message, known, word = f"the axis `{axis}` of `{ref.stage}` has no value {text}", values, text
        else:
            continue
        yield problem_at(
            places,
            path,
            message,
            found=ref,
            expected=f"one of {listed(known)}",
            fix=did_you_mean(word, known),
        )


def unused_defaults(spec: PipelineSpec, places: Places) -> Iterator[SpecError]:
    """Yield the defaults that no stage would get."""
    used = list(dict.fromkeys(stage.uses for stage in spec.stages.values()))
    for glob in spec.defaults:
        if not any(fnmatchcase(uses, glob) for uses in used):
            yield problem_at(
                places,
                ("defaults", glob),
                f"the defaults for `{glob}` match no stage",
                found=glob,
                expected=f"a glob on `uses`: {listed(used)}",
                fix=did_you_mean(glob, used),
                key=True,
            )
