"""Which head a model gets: the fastest that agrees with the model as its authors wrote it.

Models differ in what follows the head: some scale the logits, some bound them, some do either in ways that no
configuration tells. So nothing is believed: what the configuration suggests is tried on logits of all sizes, and
then every log-prob of a probe is compared with the plain model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import StageError
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.training.batches import Budget
from posttrain_plugins.training.head.fused import MEMORY
from posttrain_plugins.training.head.paths import (
    AnalyticHead,
    FullHead,
    GenericHead,
    KeepHead,
    parts_of,
    unwrapped,
)
from posttrain_plugins.training.head.scores import Head, Tail, Wanted
from posttrain_plugins.training.microbatch import MicroBatch

TOLERANCE = {False: 1e-4, True: 0.05}
"""Largest difference in nats between a log-prob computed the fast and the plain way, by `bf16`."""

LOGITS = 1 << 30
"""Bytes of float32 logits that a model makes in one forward pass; their gradient takes as much again."""

SCALES = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
"""Options that scale logits: some models multiply by theirs, others divide."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Options that bound logits."""


def choose_head(
    model: Any, probe: MicroBatch, tolerance: float, memory: int = MEMORY
) -> tuple[Head, str | None]:
    """Try the heads from the fastest to the plainest and take the first that agrees with the plain model.

    The values are compared, not the gradients. Equal values at every probed token leave no room for others: the
    decoder and its gradient are the model's own, what is fused is tested apart from any model, and the tail is
    tried on logits far larger and smaller than the probe's.

    Args:
        model: The policy, wrapped or not; it is put into evaluation mode for the trial.
        probe: Right-padded rows of different lengths with supervised tokens.
        tolerance: Largest acceptable difference of a log-prob, in nats.
        memory: Bytes of logits that may be kept for the backward pass.

    Returns:
        The head, and what to tell the user when logits are left to the model.

    Raises:
        StageError: The probe has no supervised token, or the plain model's log-probs are not finite.
    """
    if not len(probe.targets):
        raise StageError("a probe of the model's head needs supervised tokens")
    reasons: list[str] = []
    with evaluating(model):
        expected = FullHead()(model, probe, Wanted()).logp
        if not bool(expected.isfinite().all()):
            raise StageError(
                "the model's log-probs are not finite",
                where="probe of the head",
                fix="look at where the model comes from: its weights are broken, or its precision is too low",
            )
        for head in _candidates(model, probe, memory, reasons):
            problem = _disagreement(head, model, probe, expected, tolerance)
            if problem is None:
                return head, None if isinstance(head, AnalyticHead | GenericHead) else _told(head, reasons)
            reasons.append(problem)
    return FullHead(), _told(FullHead(), reasons)


def vocabulary_of(model: Any) -> int:
    """Return how many logits a position has."""
    return int(unwrapped(model).config.get_text_config().vocab_size)


def budget_of(model: Any, head: Head, tokens: int, memory: int | None = None) -> Budget:
    """Bound a micro-batch by tokens, and by logits where the head bounds none itself.

    Args:
        model: The policy.
        head: What computes its log-probs.
        tokens: Tokens of a micro-batch, padding included.
        memory: Bytes of float32 logits of one forward pass, `LOGITS` unless given; one example may exceed it.
    """
    if head.bounded:
        return Budget(tokens)
    positions = max(1, (LOGITS if memory is None else memory) // (4 * vocabulary_of(model)))
    return Budget(min(tokens, positions)) if head.full else Budget(tokens, positions)


def _candidates(model: Any, probe: MicroBatch, memory: int, reasons: list[str]) -> Iterator[Head]:
    """Yield heads to try; note why one is not even tried."""
    try:
        _, head = parts_of(model)
    except (AttributeError, NotImplementedError):
        reasons.append("the model names no decoder and head")
    else:
        tail = _tail_of(model, head, probe)
        if tail is None:
            reasons.append("the model does something unknown with its head's output")
        elif AnalyticHead.fits(head):
            yield AnalyticHead(tail, memory)
        if tail is not None:
            yield GenericHead(tail, memory, vocabulary_of(model))
    yield KeepHead()


def _disagreement(
    head: Head, model: Any, probe: MicroBatch, expected: Tensor, tolerance: float
) -> str | None:
    """Say how a head differs from the plain one, or None."""
    try:
        found = head(model, probe, Wanted()).logp
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        # Whatever a foreign forward makes of such a call, it is no way to call it; the plain one worked.
        return f"{type(head).__name__} cannot run: {error}".splitlines()[0]
    if found.shape != expected.shape:
        return (
            f"{type(head).__name__} gives {tuple(found.shape)} instead of {tuple(expected.shape)} log-probs"
        )
    gap = float((found - expected).abs().max())
    return None if gap <= tolerance else f"log-probs of {type(head).__name__} differ by {gap:.2g} nats"


def _told(head: Head, reasons: Sequence[str]) -> str:
    cost = (
        "all logits are computed, which takes more time and memory"
        if head.full
        else ("logits are left to the model, which takes more memory")
    )
    return f"{cost} ({'; '.join(reasons)})"


def _tail_of(model: Any, head: nn.Module, probe: MicroBatch) -> Tail | None:
    """Find what the model does with its head's output, or None where nothing that is known fits.

    The head's output is replaced by made-up logits between 1e-2 and 1e3, so that a bound which the model's own
    logits are far from shows, and the weights do not matter.
    """
    made: list[Tensor] = []

    def loud(_: Any, __: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(len(made))
        size = 10 ** torch.empty(output.shape).uniform_(-2, 3, generator=generator)
        sign = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        made.append((size * sign).to(output.dtype).to(output.device))
        return made[-1]

    hook = head.register_forward_hook(loud)
    try:
        inputs = {**probe.inputs, "attention_mask": probe.real.long()}
        found = model(**inputs).logits
    finally:
        hook.remove()
    if len(made) != 1 or made[0].shape != found.shape:
        return None
    return next((tail for tail in _tails(unwrapped(model).config) if _is(tail, made[0], found)), None)


def _is(tail: Tail, raw: Tensor, found: Tensor) -> bool:
    """Tell whether a model's logits are a tail's, to a few roundings of the model's type."""
    exact = tail(raw.double())
    rounding = 3 * max(torch.finfo(kind.dtype).eps for kind in (raw, found))
    return bool(((found.double() - exact).abs() <= rounding * exact.abs() + 1e-6).all())


def _tails(config: Any) -> Iterator[Tail]:
    """Yield what a configuration lets one suspect, the plainest first."""
    options = config.get_text_config()
    scales = [1.0]
    for value in _numbers(options, SCALES):
        scales += [value, 1 / value]
    for cap in [None, *_numbers(options, CAPS)]:
        for scale in scales:
            yield Tail(scale, cap)


def _numbers(options: Any, names: Sequence[str]) -> list[float]:
    values = [getattr(options, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float) and value]
