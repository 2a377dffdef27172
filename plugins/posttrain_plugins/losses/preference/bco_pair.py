"""Binary classifier optimization on pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.contracts.loss import LossOutput, PreferenceBatch, State, Stats
from posttrain_plugins.losses.likelihood import TOLD
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss, log_ratios

if TYPE_CHECKING:
    from torch import Tensor


class BcoPair(ReferencedLoss):
    """L = −log σ(s_c − δ) − log σ(−(s_r − δ)).

    s_c = β log π(chosen)/π_ref(chosen) and s_r the same of the rejected answer; δ is the mean of all rewards, of
    both answers of every pair of every step up to this one, weighted as rows are. It is kept from step to step, and
    an evaluation uses the last one. At the start all are 0 and L = 2 ln 2.

    When to use: where each answer is good or bad for itself: rewards become the log-odds of a classifier, and δ
    keeps these from drifting together.

    Reduction: mean over pairs.

    Source: Jung et al. 2024 (https://arxiv.org/abs/2404.04656). With δ = 0 it is the pair loss that others call by
    this name.

    Example:
        s_c = 0.5 · 4 = 2, s_r = 0, δ = 1: 2 · ln(1 + e⁻¹) = 0.6265:

        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(BcoPair, {"beta": 0.5}, chosen=[-1.0], rejected=[-3.0],
        ...        reference_chosen=[-5.0], reference_rejected=[-3.0])
        0.6265
    """

    metrics = TOLD | {"rewards/shift"}

    def begin(self, config: BetaOptions) -> State:
        """Return the mean of no rewards."""
        return {"mean": 0.0, "weight": 0.0}

    def measure(self, batch: PreferenceBatch, config: BetaOptions, state: State) -> Mapping[str, Tensor]:
        """Return the weighted sum of all rewards, and the weights."""
        chosen, rejected = (ratio.detach() for ratio in log_ratios(batch))
        weight = batch.weight.double()
        return {"rewards": (config.beta * weight * (chosen + rejected)).sum(), "weight": 2 * weight.sum()}

    def advance(self, state: State, stats: Stats, config: BetaOptions) -> State:
        """Return the mean of the rewards of all steps, this one included."""
        added = float(stats["weight"])
        if added == 0:
            return state
        weight = state["weight"] + added
        mean = state["mean"] + (float(stats["rewards"]) - added * state["mean"]) / weight
        return {"mean": mean, "weight": weight}

    def __call__(self, batch: PreferenceBatch, config: BetaOptions, stats: Stats, state: State) -> LossOutput:
        """Return one term with a value for each pair, in nats."""
        output = super().__call__(batch, config, stats, state)
        shift = batch.weight.new_full((1,), state["mean"])
        return replace(output, metrics={**output.metrics, "rewards/shift": shift})

    def values(self, batch: PreferenceBatch, config: BetaOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P], in nats."""
        from torch.nn.functional import logsigmoid

        chosen, rejected = (config.beta * ratio - state["mean"] for ratio in log_ratios(batch))
        return -logsigmoid(chosen) - logsigmoid(-rejected)
