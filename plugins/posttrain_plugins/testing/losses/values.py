"""Checks of what a loss returns: terms, metrics, and finite numbers under every load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import Family, Term
from posttrain.contracts.reduction import Reduction
from posttrain_plugins.testing.draws import Draw
from posttrain_plugins.testing.losses.subject import LossSubject, gradients, shown
from posttrain_plugins.testing.stepping import Shown, take_step

__tracebackhide__ = True

EXTREME = 1e4
"""The largest log-ratio, reward or log-odds that a loss has to bear."""
PRECISIONS = {torch.bfloat16: 0.06, torch.float16: 0.01}
"""How far values may be from those in float32 on the same inputs, relative to them or to 1."""
_METRIC = re.compile(r"[a-z][a-z0-9_]*(/[a-z][a-z0-9_]*)?")


def terms(subject: LossSubject) -> None:
    """Every term holds unreduced values with a gradient, as many as its reduction takes."""
    drawn = subject.draw().with_leaves()[0]
    output = subject.called(drawn)
    if not output.terms:
        raise subject.refuse(
            f"it must return a LossOutput with at least one term, but returned {output!r:.80}"
        )
    sizes = drawn.part().sizes
    for number, term in enumerate(output.terms):
        for problem in _term_faults(term, sizes):
            raise subject.refuse(f"term {number} {problem}")


def _term_faults(term: Any, sizes: dict[str, int]) -> Iterator[str]:
    if not isinstance(term, Term) or not isinstance(term.reduction, Reduction):
        yield f"must be a Term with a Reduction, but is {term!r:.80}"
        return
    allowed = {unit: sizes[unit] for unit in term.reduction.over}
    if tuple(term.values.shape) not in [(size,) for size in allowed.values()]:
        wanted = " or ".join(f"{size} {unit}" for unit, size in allowed.items())
        yield f"has values of shape {tuple(term.values.shape)}; {term.reduction} takes {wanted}"
    if not term.values.requires_grad:
        yield "has no gradient: it is detached from what the policy says"
    if not math.isfinite(term.weight):
        yield f"has the weight {term.weight}"


def finite(subject: LossSubject) -> None:
    """Values and gradients are finite on ordinary numbers, and something is learned."""
    for dtype in (torch.float64, torch.float32):
        drawn = subject.draw(seed=1, examples=6, dtype=dtype)
        found = _require_finite(subject, drawn, f"on ordinary numbers in {dtype}")
        if not any(bool((slope != 0).any()) for slope in found):
            raise subject.refuse("every gradient is zero on ordinary numbers: nothing would be learned")


def _require_finite(subject: LossSubject, drawn: Draw, where: str) -> tuple[Tensor, ...]:
    taken, found = subject.slopes(drawn)
    for number, term in enumerate(taken.outputs[0].terms):
        bad = ~term.values.isfinite()
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise subject.refuse(f"value {at} of term {number} is {term.values[at].item()} {where}")
    for name, slope in zip(drawn.learned, found, strict=True):
        bad = ~slope.isfinite()
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            row = int(drawn.owner[drawn.sequence[at]])
            raise subject.refuse(
                f"the gradient of `{name}` is {float(slope[at])} {where}, at token {at} of row {row}"
            )
    if not bool(taken.total.isfinite()):
        raise subject.refuse(f"the loss is {taken.total.item()} {where}")
    return found


def edges(subject: LossSubject) -> None:
    """A step of one row, of one class, or of ties has finite values and gradients."""
    drawn = subject.draw(seed=2)
    for row in range(min(drawn.size, 2)):
        _require_finite(subject, drawn.take([row]), "in a step of one row")
    for good in (True, False) if subject.family is Family.UNPAIRED else ():
        rows = torch.full_like(drawn.rows["desirable"], good)
        told = "desirable" if good else "undesirable"
        _require_finite(subject, drawn.with_rows(desirable=rows), f"where every answer is {told}")
    if subject.family is Family.UNPAIRED:
        alone = torch.zeros_like(drawn.rows["matched"])
        _require_finite(subject, drawn.with_rows(matched=alone), "where no row has another row's answer")
    if subject.family is Family.REWARD:
        tied = torch.ones_like(drawn.sequences["score"])
        _require_finite(subject, drawn.with_sequences(score=tied), "where all answers have one score")
    same = {name: torch.full_like(drawn.tokens[name], -0.5) for name in ("logp", "reference")}
    _require_finite(subject, drawn.with_tokens(**same), "where the policy is its own reference")


def extremes(subject: LossSubject) -> None:
    """Log-ratios, rewards and log-odds of ±1e4, and probabilities of 1, have finite values and gradients in float32."""
    for seed in range(2):
        _require_finite(subject, extreme(subject, seed), f"with numbers of ±{EXTREME:g}")


def extreme(subject: LossSubject, seed: int) -> Draw:
    """Return every combination of the largest and the smallest number of each answer, its reference and its label."""
    one = subject.draw(seed, examples=1, dtype=torch.float32)
    width = len(one.owner)
    patterns = list(product((0.0, 1.0), repeat=2 * width + 1))
    drawn = subject.draw(seed, examples=1, dtype=torch.float32).take([0] * len(patterns))
    bits = torch.tensor(patterns)
    own, reference = bits[:, :width].flatten(), bits[:, width : 2 * width].flatten()
    each = drawn.sequence
    share = -EXTREME / drawn.lengths[each]
    return drawn.with_tokens(
        logp=own[each] * share,
        reference=reference[each] * share,
        value=(2 * own[each] - 1) * EXTREME,
        label=reference[each],
        entropy=own[each] * 12,
        squares=1 - own[each],
        mean_logp=own[each] * share - 1,
    ).with_rows(
        desirable=bits[:, -1] == 1,
        mismatched=-EXTREME * bits[:, 0],
        reference_mismatched=-EXTREME * bits[:, 1],
    )


def low_precision(subject: LossSubject) -> None:
    """Values in bfloat16 and float16 are close to those in float32 on the same inputs."""
    for dtype, tolerance in PRECISIONS.items():
        drawn, leaves = subject.draw(seed=3, dtype=dtype).with_leaves()
        (low,) = shown([drawn])
        high = Shown(_in_float32(low.batch), low.part, _in_float32(low.measured))
        found, expected = (take_step(subject.plugin, subject.config, [each]) for each in (low, high))
        for number, (term, exact) in enumerate(
            zip(found.outputs[0].terms, expected.outputs[0].terms, strict=True)
        ):
            error = (term.values.float() - exact.values).abs() / exact.values.abs().clamp(min=1)
            if not bool((error <= tolerance).all()):
                raise subject.refuse(
                    f"term {number} in {dtype} is off by {error.max().item():.3g} of its value in float32; "
                    f"at most {tolerance:g} are expected"
                )
        if not all(bool(slope.isfinite().all()) for slope in gradients(found.total, leaves)):
            raise subject.refuse(f"a gradient in {dtype} is not finite")


def _in_float32(batch: Any) -> Any:
    """Return a batch with the same numbers in float32, those of its parts included."""
    given: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            given[field.name] = value.float() if value.is_floating_point() else value
        elif is_dataclass(value):
            given[field.name] = _in_float32(value)
    return replace(batch, **given)


def metrics(subject: LossSubject) -> None:
    """Metrics are detached, unreduced or scalar, finite (NaN where one does not apply), named like `a/b`, declared."""
    output = subject.called(subject.draw(seed=4).with_leaves()[0])
    for name, values in output.metrics.items():
        for problem in _metric_faults(name, values):
            raise subject.refuse(f"the metric {name!r} {problem}")
    declared = subject.loss.metrics
    if declared is not None and declared != output.metrics.keys():
        odd = ", ".join(sorted(declared ^ output.metrics.keys()))
        raise subject.refuse(f"`metrics` has to name what it tells, and differs in {odd}")


def _metric_faults(name: Any, values: Any) -> Iterator[str]:
    if not isinstance(name, str) or not _METRIC.fullmatch(name):
        yield "needs a name of lower-case words such as `rewards/chosen`"
    if not isinstance(values, Tensor):
        yield f"must be a tensor, but is {values!r:.80}"
        return
    if values.requires_grad:
        yield "is not detached"
    if values.dim() > 1 or not values.is_floating_point():
        yield f"must be floating-point numbers, one for each token, sequence or example, or a single one; it has the \
shape {tuple(values.shape)} and holds {values.dtype}"
    if bool(values.isinf().any()) or not bool(values.isfinite().any()):
        yield f"is not finite on ordinary numbers: {values.tolist()}"
