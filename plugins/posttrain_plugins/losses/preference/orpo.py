"""Odds ratio preference optimization."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss, LossOutput, PreferenceBatch, State, Stats, Term
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain_plugins.losses.likelihood import TOLD, likelihood, logistic, token_means, told

if TYPE_CHECKING:
    from torch import Tensor

SUREST = -1e-12
"""Log-prob above which an answer counts as just that likely: the odds of a certain one are infinite."""


class OrpoOptions(Config):
    """Options of the loss `orpo`."""

    beta: float = Field(default=0.1, gt=0, description="weight of the odds ratio (λ in the paper)")


class Orpo(Loss):
    """L = NLL(c) − β log σ(log odds(c) − log odds(r)) with odds(y) = p(y) / (1 − p(y)).

    p(y) is the geometric mean of the probabilities of the tokens of an answer, so log p is their mean log-prob.
    NLL(c) is the negative log-likelihood of the chosen answers a token: supervised fine-tuning on them. Computed in
    float32 whatever the model is in, and without cancellation where p is nearly 1.

    When to use: a base model that learns to answer and to prefer at once; no reference.

    Reduction: the NLL over the chosen tokens of the step, the rest over pairs.

    Source: Hong et al. 2024, eq. 6 and 7 (https://arxiv.org/abs/2403.07691).

    Example:
        p is ½ and ¼, so odds are 1 and ⅓, and −log σ(ln 3) = ln(4/3); L = ln 2 + 0.1 ln(4/3):

        >>> from math import log
        >>> from posttrain_plugins.testing.worked import worked
        >>> worked(Orpo, {"beta": 0.1}, chosen=[log(0.5)], rejected=[log(0.25)])
        0.7219
    """

    family = Family.PREFERENCE
    config = OrpoOptions
    metrics = TOLD | {"odds/log_ratio", "nll/chosen"}

    def __call__(self, batch: PreferenceBatch, config: OrpoOptions, stats: Stats, state: State) -> LossOutput:
        """Return the likelihood of the chosen answers, and a value for each pair."""
        chosen, rejected = token_means(batch)
        ratio = log_odds(chosen) - log_odds(rejected)
        pairs = Term(logistic(ratio, 0.0) * batch.weight, EXAMPLE_MEAN, config.beta)
        metrics = told(batch, config.beta * chosen, config.beta * rejected)
        metrics |= {"odds/log_ratio": ratio.detach(), "nll/chosen": -chosen.detach()}
        return LossOutput([*likelihood(batch, "chosen", 1.0), pairs], metrics)


def log_odds(logp: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of log-probs, shape [any]."""
    return logp - log1mexp(logp)


def log1mexp(logp: Tensor) -> Tensor:
    """Return log(1 − e^x): log(−expm1(x)) above −ln 2 and log1p(−e^x) below (Mächler 2012), x below `SUREST`."""
    import torch

    held, half = logp.clamp(max=SUREST), -log(2)
    likely = held > half
    # Each branch sees only what it is good for: the gradient of the other would be NaN times 0.
    above, below = held.clamp(min=half), held.clamp(max=half)
    return torch.where(likely, (-above.expm1()).log(), torch.log1p(-below.exp()))
