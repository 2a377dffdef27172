"""Losses of every kind that the contract allows, two of each, for tests of the loop."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import logsigmoid

from posttrain.contracts.component import Component, NoOptions
from posttrain.contracts.loss import (
    Family,
    Loss,
    LossOutput,
    Need,
    PreferenceBatch,
    Scope,
    State,
    Stats,
    Term,
    TokenBatch,
)
from posttrain.contracts.reduction import (
    EXAMPLE_MEAN,
    MEAN_OF_SEQUENCE_MEANS,
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    Constant,
    Reduction,
)
from posttrain_plugins.losses.mixture import Mixture
from posttrain_plugins.losses.preference.aot import Aot
from posttrain_plugins.losses.preference.bco_pair import BcoPair
from posttrain_plugins.losses.preference.sft import Sft

REDUCTIONS: tuple[Reduction, ...] = (
    TOKEN_MEAN,
    SEQUENCE_MEAN,
    EXAMPLE_MEAN,
    MEAN_OF_SEQUENCE_MEANS,
    Constant(50.0),
)


class Reduced(Loss):
    """−log π under any reduction."""

    family = Family.TOKEN

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        values = -batch.logp * batch.weight
        return LossOutput([Term(values, self.reduction)], {"value": values.detach()})


class EntropyBonus(Loss):
    """Two terms with two reductions; the gradient of the entropy counts."""

    family = Family.TOKEN
    needs = frozenset({Need.ENTROPY})

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        bonus = Term(-batch.entropy * batch.weight, MEAN_OF_SEQUENCE_MEANS, 0.3)
        return LossOutput([Term(-batch.logp * batch.weight, TOKEN_MEAN), bonus])


class Squares(Loss):
    """Σp² with its gradient."""

    family = Family.TOKEN
    needs = frozenset({Need.SQUARES})

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        assert batch.squares is not None
        values = (0.5 * batch.squares - batch.logp.exp()) * batch.weight
        return LossOutput([Term(values, SEQUENCE_MEAN)])


class Surprising(Loss):
    """Only tokens whose surprise is above the mean of the whole step count."""

    family = Family.TOKEN

    def measure(self, batch: TokenBatch, config: NoOptions, state: State) -> Any:
        return {"surprise": -batch.logp.double().sum(), "tokens": batch.logp.new_full((), len(batch.logp))}

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        mean = float(stats["surprise"] / stats["tokens"])
        values = -batch.logp * batch.weight * (-batch.logp.detach() > mean)
        return LossOutput([Term(values, TOKEN_MEAN)])


class Baseline(Loss):
    """Each side against the mean reward of the step, as KTO does with its estimate of the KL divergence."""

    family = Family.PREFERENCE
    needs = frozenset({Need.REFERENCE})

    def measure(self, batch: PreferenceBatch, config: NoOptions, state: State) -> Any:
        rewards = batch.chosen - batch.reference_chosen + batch.rejected - batch.reference_rejected
        return {"rewards": rewards.sum(), "sides": rewards.new_full((), 2 * len(rewards))}

    def __call__(self, batch: PreferenceBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        mean = float(stats["rewards"] / stats["sides"])
        good = 1 - (0.1 * (batch.chosen - batch.reference_chosen - mean)).sigmoid()
        bad = 1 - (0.1 * (mean - batch.rejected + batch.reference_rejected)).sigmoid()
        return LossOutput([Term((good + bad) * batch.weight, EXAMPLE_MEAN)])


class Adaptive(Loss):
    """A coefficient that follows the surprise of the step."""

    family = Family.TOKEN

    def begin(self, config: NoOptions) -> State:
        return {"coefficient": 1.0}

    def measure(self, batch: TokenBatch, config: NoOptions, state: State) -> Any:
        return {"surprise": -batch.logp.double().sum(), "tokens": batch.logp.new_full((), len(batch.logp))}

    def advance(self, state: State, stats: Stats, config: NoOptions) -> State:
        mean = float(stats["surprise"] / stats["tokens"])
        return {"coefficient": state["coefficient"] * (1.1 if mean > 3 else 0.9)}

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        return LossOutput([Term(-batch.logp * batch.weight, TOKEN_MEAN, state["coefficient"])])


class RunningMean(Baseline):
    """A running mean of the rewards over steps, as BCO keeps."""

    def begin(self, config: NoOptions) -> State:
        return {"mean": 0.0, "steps": 0}

    def advance(self, state: State, stats: Stats, config: NoOptions) -> State:
        mean, steps = float(stats["rewards"] / stats["sides"]), state["steps"] + 1
        return {"mean": state["mean"] + (mean - state["mean"]) / steps, "steps": steps}

    def __call__(self, batch: PreferenceBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        values = -logsigmoid(0.1 * (batch.chosen - batch.reference_chosen - state["mean"]))
        return LossOutput([Term(values * batch.weight, EXAMPLE_MEAN)])


class Sorted(Loss):
    """The i-th best chosen against the i-th best rejected of the step, as AOT compares distributions."""

    family = Family.PREFERENCE
    needs = frozenset({Need.REFERENCE})
    scope = Scope.STEP

    def __call__(self, batch: PreferenceBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        chosen = (batch.chosen - batch.reference_chosen).sort().values
        rejected = (batch.rejected - batch.reference_rejected).sort().values
        values = -logsigmoid(0.1 * (chosen - rejected))
        return LossOutput([Term(values, EXAMPLE_MEAN)], {"margin": (chosen - rejected).detach()})


class Centred(Loss):
    """The squared distance of each log-prob from the mean over all tokens of the step."""

    family = Family.TOKEN
    scope = Scope.STEP

    def measure(self, batch: TokenBatch, config: NoOptions, state: State) -> Any:
        return {"tokens": batch.logp.new_full((), len(batch.logp))}

    def __call__(self, batch: TokenBatch, config: NoOptions, stats: Stats, state: State) -> LossOutput:
        assert int(stats["tokens"]) == len(batch.logp)
        values = (batch.logp - batch.logp.mean()) ** 2 * batch.weight
        return LossOutput([Term(values, TOKEN_MEAN), Term(-batch.logp, SEQUENCE_MEAN, 0.1)])


def mixture(*parts: type[Loss]) -> Mixture:
    """Several losses with their default options and weights of 1, 2, …"""
    made = [Component(each.__name__.lower(), each(), each.config()) for each in parts]
    return Mixture(made, [float(place + 1) for place in range(len(made))])


KINDS: dict[str, Loss] = {
    **{f"reduced-{each}": Reduced(each) for each in REDUCTIONS},
    "entropy": EntropyBonus(),
    "squares": Squares(),
    "surprising": Surprising(),
    "baseline": Baseline(),
    "adaptive": Adaptive(),
    "running-mean": RunningMean(),
    "sorted": Sorted(),
    "centred": Centred(),
    "mixture": mixture(BcoPair, Sft),
    "mixture-of-the-step": mixture(BcoPair, Aot),
}
"""By name; a trainer of the same family drives them."""
