"""Nash mirror descent by policy gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from posttrain.contracts.loss import Need, PreferenceBatch, State, held
from posttrain_plugins.losses.likelihood import widened
from posttrain_plugins.losses.preference.referenced import BetaOptions, ReferencedLoss

if TYPE_CHECKING:
    from torch import Tensor


class NashMdOptions(BetaOptions):
    """Options of the loss `nash_md`."""

    beta: float = Field(
        default=0.1, gt=0, description="τ of the paper: strength of the pull to the reference policy"
    )
    kl: Literal["sequence", "token"] = Field(
        default="sequence",
        description="`sequence` weighs the answer by the log-ratio of all of it, as the paper does; `token` weighs "
        "each token by its own, which varies less, and leaves out what a token does to later ones",
    )


class NashMd(ReferencedLoss):
    """L = −(P − ½ − β sg[log π(y)/π_ref(y)]) · log π(y).

    y is that answer of the pair which the policy wrote, P is how likely it is preferred to the other one, which a
    mixture of policy and reference wrote, and sg has no gradient. The gradient of L is that of a policy which is paid
    P and kept near the reference; its value means nothing. The column `chosen_by` tells which answer is the policy's,
    and `preference` how likely the chosen one is preferred: P is that, or 1 minus that. ½ is what an answer as good as
    the other has: it takes variance away and no more.

    When to use: on answers of the policy as it is, with a model of preferences that may go round in circles. Its
    gradient is right for the policy's own answers alone, so a round is a few steps.

    Reduction: mean over pairs.

    Source: Munos et al. 2023, section 7 (https://arxiv.org/abs/2312.00886).

    Example:
        log π/π_ref of the policy's answer is 1 and β = 0.1: (P − ½ − 0.1) · 2 with P = 0.9, and with P = 1 − 0.9 where
        the other answer was chosen:

        >>> from posttrain_plugins.testing.worked import worked
        >>> own = {"chosen": [-2.0], "rejected": [-2.0], "reference_chosen": [-3.0], "reference_rejected": [-3.0]}
        >>> worked(NashMd, {"beta": 0.1}, **own, own=[True], preference=[0.9])
        0.6
        >>> worked(NashMd, {"beta": 0.1}, **own, own=[False], preference=[0.9])
        -1.0
    """

    config = NashMdOptions
    needs = frozenset({Need.REFERENCE, Need.AUTHORS, Need.PREFERENCE})

    def needs_of(self, config: NashMdOptions) -> frozenset[Need]:
        """Log-ratios of single tokens, where these are weighed."""
        return self.needs | ({Need.REFERENCE_TOKENS} if config.kl == "token" else frozenset())

    def values(self, batch: PreferenceBatch, config: NashMdOptions, state: State) -> Tensor:
        """Return the value of each pair, shape [P]."""
        own = held(batch.own, Need.AUTHORS, "own")
        preference = held(batch.preference, Need.PREFERENCE, "preference")
        logp = widened(batch.chosen.where(own, batch.rejected))
        wins = preference.where(own, 1 - preference)
        return config.beta * _pull(batch, own, logp, config.kl) - (wins - 0.5) * logp


def _pull(batch: PreferenceBatch, own: Tensor, logp: Tensor, kl: str) -> Tensor:
    """Return what has the gradient of the divergence from the reference, by the score function, shape [P]."""
    if kl == "sequence":
        reference = batch.reference_chosen.where(own, batch.reference_rejected)
        return (logp - reference).detach() * logp
    tokens = batch.tokens
    assert tokens is not None, "trainers hand on the tokens of both answers"
    mine = own[tokens.example] == (tokens.answer == 0)
    each = widened(tokens.logp)
    weighed = (each - tokens.reference).detach() * each * mine
    return logp.new_zeros(len(logp)).index_add(0, tokens.example, weighed)
