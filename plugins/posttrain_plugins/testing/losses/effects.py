"""The check that every option of a loss does something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic.fields import FieldInfo
from torch import Tensor

from posttrain.registry.problems import ConfigProblems
from posttrain_plugins.testing.losses.subject import LossSubject
from posttrain_plugins.testing.losses.values import extreme

__tracebackhide__ = True

STEPS = 3
"""Steps that are taken one after the other, so that what is remembered shows."""
SEEDS = (50, 60)


def effects(subject: LossSubject) -> None:
    """Every option, set to another value, changes what the loss comes to, or what it asks for."""
    fields = type(subject.config).model_fields
    unknown = sorted({*subject.others, *subject.idle} - fields.keys())
    if unknown:
        raise subject.refuse(f"it has no option {', '.join(unknown)}; it has {', '.join(fields) or 'none'}")
    for name, field in fields.items():
        moved = _moves(subject, name, field)
        if not moved and name not in subject.idle:
            raise subject.refuse(
                f"the option {name!r} has no effect: no other value changes values, gradients, reductions, metrics or "
                f"needs; take it out, refuse it where it is ignored, or excuse it with `idle={{{name!r}: reason}}`"
            )
        if moved and name in subject.idle:
            raise subject.refuse(f"the option {name!r} is excused as idle, and has an effect")


def _moves(subject: LossSubject, name: str, field: FieldInfo) -> bool:
    found = False
    for before, after in _changes(subject, name, field):
        found = True
        if _differ(before, after):
            return True
    if not found:
        raise subject.refuse(
            f"no other value of the option {name!r} was found that validates; name one with `others={{{name!r}: …}}`"
        )
    return False


def _changes(subject: LossSubject, name: str, field: FieldInfo) -> Iterator[tuple[LossSubject, LossSubject]]:
    """Yield the loss with and without another value of an option; beside another option, where it is refused alone."""
    alone = False
    for changed in _with_others(subject, name, field):
        alone = True
        yield subject, changed
    if alone:
        return
    for other, beside in type(subject.config).model_fields.items():
        if other != name:
            for base in _with_others(subject, other, beside):
                yield from ((base, each) for each in _with_others(base, name, field))


def _with_others(subject: LossSubject, name: str, field: FieldInfo) -> Iterator[LossSubject]:
    """Yield the loss with each other value of an option that validates."""
    current = getattr(subject.config, name)
    given = [subject.others[name]] if name in subject.others else samples(field, current)
    for value in given:
        changed = replace(subject, options={**subject.options, name: value})
        try:
            if changed.config != subject.config:
                yield changed
        except ConfigProblems:
            continue


def samples(field: FieldInfo, current: Any) -> list[Any]:
    """Return values that an option may have beside its own; they need not validate."""
    return [value for kind in _kinds(field.annotation) for value in _of_kind(kind, current)]


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation]


def _of_kind(kind: Any, current: Any) -> list[Any]:
    if kind is NoneType:
        return [None]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [not current]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)
    if kind not in (int, float):
        return []
    near = current if isinstance(current, int | float) else 1
    numbers = [near * 2, near / 2, near + 1, near - 1, near + 0.1, near - 0.1, 0, 0.3, 1, 2, 10]
    return numbers if kind is float else sorted({round(number) for number in numbers})


@dataclass(frozen=True)
class _Trace:
    """What some steps came to."""

    plain: list[Any]
    tensors: list[Tensor]

    def equals(self, other: _Trace) -> bool:
        """Whether all of it is the same."""
        return self.plain == other.plain and all(
            torch.equal(one.nan_to_num(), two.nan_to_num())
            for one, two in zip(self.tensors, other.tensors, strict=True)
        )


def _differ(one: LossSubject, other: LossSubject) -> bool:
    """Whether two settings of a loss need other things, or come to something else on some steps."""
    if one.needs != other.needs:
        return True
    traces = zip(_traces(one), _traces(other), strict=True)
    return any(not before.equals(after) for before, after in traces)


def _traces(subject: LossSubject) -> Iterator[_Trace]:
    for seed in SEEDS:
        state: Mapping[str, Any] | None = None
        for step in range(STEPS):
            trace, state = _trace(subject, subject.draw(seed + step, examples=6), state)
            yield trace
    yield _trace(subject, extreme(subject, 0), None)[0]


def _trace(
    subject: LossSubject, drawn: Any, state: Mapping[str, Any] | None
) -> tuple[_Trace, Mapping[str, Any]]:
    taken, slopes = subject.slopes(drawn, state)
    terms = [term for output in taken.outputs for term in output.terms]
    told = [metric for output in taken.outputs for metric in output.metrics.items()]
    tensors = [*(term.values for term in terms), *(values for _, values in told), taken.total, *slopes]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    plain = [[(str(term.reduction), term.weight) for term in terms], [name for name, _ in told], shapes]
    return _Trace(plain, [tensor.detach() for tensor in tensors]), taken.state
