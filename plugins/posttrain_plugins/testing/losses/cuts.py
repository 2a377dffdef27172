"""Checks that neither the order of rows, nor the cut of a step, nor a resume changes what a loss comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain_plugins.testing.draws import Draw
from posttrain_plugins.testing.losses.subject import LossSubject, gradients, shown
from posttrain_plugins.testing.stepping import Taken, measured

__tracebackhide__ = True

_ORDER = (3, 0, 5, 2, 4, 1)
_CUTS = ((0, 1), (2,), (3, 4, 5))


def row_order(subject: LossSubject) -> None:
    """Rows in another order have the same loss, the same gradients and the same metrics."""
    drawn = subject.draw(seed=20, examples=len(_ORDER))
    taken, expected = subject.slopes(drawn)
    mixed, found = subject.slopes(drawn.take(_ORDER))
    _, places = drawn.places(_ORDER)
    back = tuple(slope[places] for slope in expected)
    _require_same(subject, (taken, back), (mixed, found), "in another order of rows")


def split(subject: LossSubject) -> None:
    """Parts of a step, with the denominators of the whole, add up to the whole: loss, gradients, metrics and sums."""
    drawn = subject.draw(seed=21, examples=sum(map(len, _CUTS)))
    taken, expected = subject.slopes(drawn)
    parts, leaves = [], []
    for rows in _CUTS:
        part, own = drawn.take(rows).with_leaves()
        parts.append(part)
        leaves.append(own)
    _require_additive(subject, drawn, parts)
    cut = subject.take(*parts)
    found = [gradients(cut.total, own) for own in leaves]
    joined = tuple(torch.cat(slopes) for slopes in zip(*found, strict=True))
    _require_same(subject, (taken, expected), (cut, joined), "where the step is cut into parts")


def _require_additive(subject: LossSubject, whole: Draw, parts: list[Draw]) -> None:
    plugin, config = subject.plugin, subject.config
    state = plugin.begin(config)
    batches = [each.measured() for each in (whole, *parts)]
    found = [_shapes(plugin.measure(each, config, state)) for each in batches if each is not None]
    if any(each != found[0] for each in found):
        raise subject.refuse(f"`measure` returns other names or shapes in other parts: {found}")
    expected = measured(plugin, config, shown([whole]), state)
    sums = measured(plugin, config, shown(parts), state)
    for name, value in expected.items():
        if not torch.allclose(sums[name], value, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise subject.refuse(
                f"what `measure` returns as {name!r} does not add up: {sums[name].tolist()} over parts, "
                f"{value.tolist()} over the whole"
            )


def _shapes(sums: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in sorted(sums.items())}


Step = tuple[Taken, tuple[Tensor, ...]]


def _require_same(subject: LossSubject, expected: Step, found: Step, where: str) -> None:
    (one, slopes), (other, moved) = expected, found
    if not torch.isclose(one.total, other.total, rtol=1e-10, atol=1e-12):
        raise subject.refuse(f"the loss is {other.total.item()} and not {one.total.item()} {where}")
    for before, after in zip(slopes, moved, strict=True):
        if not torch.allclose(before, after, rtol=1e-8, atol=1e-12):
            error = float((before - after).abs().max())
            raise subject.refuse(f"gradients differ by up to {error:.3g} {where}")
    told, again = one.metrics, other.metrics
    for name in sorted({*told, *again}):
        if abs(told.get(name, 0.0) - again.get(name, 0.0)) > 1e-7 * max(1.0, abs(told.get(name, 0.0))):
            raise subject.refuse(
                f"the metric {name!r} is {again.get(name)} and not {told.get(name)} {where}; the loop averages metrics "
                "over the step, so return one value for each token, sequence or example"
            )


def resume(subject: LossSubject) -> None:
    """The state is a JSON object: read back from a checkpoint it goes on to the same loss."""
    state: Any = None
    for step in range(3):
        drawn = subject.draw(seed=22 + step)
        state = dict(subject.take(drawn, state=state).state)
        _require_json(subject, state)
    drawn = subject.draw(seed=30)
    kept, again = (subject.take(drawn, state=each) for each in (state, json.loads(json.dumps(state))))
    if not torch.equal(kept.total, again.total):
        raise subject.refuse(
            f"read back from JSON, its state gives the loss {again.total.item()}, not {kept.total.item()}"
        )


def _require_json(subject: LossSubject, state: Any) -> None:
    try:
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError) as error:
        raise subject.refuse(f"its state is no JSON: {error}; it holds {state!r:.120}") from error
    if not same:
        raise subject.refuse(
            f"its state does not survive JSON: {state!r:.120}; names are strings, tuples are lists"
        )
