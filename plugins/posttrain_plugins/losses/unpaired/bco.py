"""The loss of binary classifier optimization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.contracts.loss import Family, Loss, LossOutput, Need, State, Stats, Term, UnpairedBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.preference.referenced import BetaOptions
from posttrain_plugins.losses.unpaired.metrics import DIAGNOSTICS, diagnostics

if TYPE_CHECKING:
    from torch import Tensor


class Bco(Loss):
    """L = −log σ(β r − δ) for good answers, −log σ(δ − β r) for bad ones, averaged over answers.

    r = log π(y|x)/π_ref(y|x). δ is the mean of β r over all answers that training has seen up to this step, this
    step's with it; it has no gradient and is part of a checkpoint. It takes out what all rewards have in common, so
    that the classifier is left with what tells good answers from bad ones. Each answer counts once in it, whatever its
    row weighs: the weights that belong to this loss are density ratios of prompts, by which the loss is corrected and
    not the mean of the rewards (in `bco_pair` a pair of weight 2 is two pairs, and δ is weighted).

    When to use: as an alternative to KTO where answers are judged one by one: its gradient does not vanish for answers
    that are far on the wrong side. Where good and bad answers come from different prompts, weigh the bad ones by how
    likely their prompts are among the good ones: `data.match_prompts` makes such a `weight_column`.

    Source: Jung et al. 2024 (https://arxiv.org/abs/2404.04656): the loss with its reward shift δ; that weight is their
    density ratio, by which underlying distributions are matched.

    Example:
        Rewards of 1 and −1, so δ = 0 in the first step, and both are on the right side by 1: ln(1 + 1/e)

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Bco, {"beta": 1.0}, logp=[1.0, -1.0], desirable=[True, False])
        0.3133
    """

    family = Family.UNPAIRED
    config = BetaOptions
    needs = frozenset({Need.REFERENCE})
    metrics = DIAGNOSTICS | {"delta"}

    def begin(self, config: BetaOptions) -> State:
        """No answer has been seen."""
        return {"mean": 0.0, "answers": 0}

    def measure(self, batch: UnpairedBatch, config: BetaOptions, state: State) -> Mapping[str, Tensor]:
        """Sum the rewards, and count them."""
        rewards = config.beta * batch.log_ratio.double()
        return {"rewards": rewards.sum(), "answers": rewards.new_full((), len(rewards))}

    def advance(self, state: State, stats: Stats, config: BetaOptions) -> State:
        """Take the step's rewards into the mean of all so far."""
        answers = state["answers"] + int(stats["answers"])
        change = float(stats["rewards"]) - state["mean"] * int(stats["answers"])
        return {"mean": state["mean"] + change / answers, "answers": answers}

    def __call__(self, batch: UnpairedBatch, config: BetaOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each answer, in nats."""
        from torch.nn.functional import logsigmoid

        rewards, delta = config.beta * batch.log_ratio, state["mean"]
        sign = 2 * batch.desirable.to(batch.logp) - 1
        values = -logsigmoid(sign * (rewards - delta))
        metrics = {**diagnostics(batch, rewards, delta), "delta": rewards.new_full((len(rewards),), delta)}
        return LossOutput(terms=[Term(values * batch.weight, EXAMPLE_MEAN)], metrics=metrics)
