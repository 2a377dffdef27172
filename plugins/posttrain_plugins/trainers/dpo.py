"""Direct preference optimization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.loss import Family, Need, PreferenceBatch
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Finding, Inputs
from posttrain.contracts.trainer import Scores
from posttrain_plugins.trainers.pairs import PairTrainer
from posttrain_plugins.trainers.reference_free import WithoutDropout
from posttrain_plugins.trainers.referenced import ReferencedOptions, gap_problems, sync_findings
from posttrain_plugins.trainers.weighting import desensitized, policy_weights
from posttrain_plugins.training.objective import Losses, MixedOptions


class DpoOptions(MixedOptions, ReferencedOptions, WithoutDropout):
    """Options of `train.dpo`."""

    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    loss: Annotated[Losses, Uses(Group.LOSS, having=(("family", Family.PREFERENCE),))] = Field(
        default=Choice(name="sigmoid"),
        description="a loss over preference pairs, or a list of them whose weighted sum is learned",
    )
    ld_alpha: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="how much tokens of an answer beyond the length of the other one count (LD-DPO), so that length "
        "itself is not learned; unset: as all others",
    )
    weighting: Literal["wpo"] | None = Field(
        default=None,
        description="`wpo` multiplies each pair's values by how likely the policy itself is to say its answers",
    )


class Dpo(PairTrainer):
    """Train on preference pairs against the starting policy (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

    The reference is the exact starting policy, continued adapters included: its log-probs are computed once,
    before the first update. Dropout is off, so that policy and reference agree until then.
    """

    config = DpoOptions
    referenced = True

    def check(self, config: DpoOptions, inputs: Inputs) -> Iterable[Finding]:
        """Report what a reference that follows the policy does not go together with, beside what all trainers do."""
        yield from super().check(config, inputs)
        yield from sync_findings(self, config, inputs)

    def needs(self, config: DpoOptions) -> frozenset[Need]:
        """What is known of single tokens, where they do not count alike."""
        tokens = {Need.REFERENCE_TOKENS} if config.ld_alpha is not None else set()
        return frozenset(tokens | ({Need.SQUARES} if config.weighting is not None else set()))

    def batch(self, scores: Scores, config: DpoOptions) -> PreferenceBatch:
        """Weigh tokens and pairs as the options say."""
        batch = plain = super().batch(scores, config)
        if config.ld_alpha is not None:
            batch = desensitized(batch, config.ld_alpha)
        if config.weighting is not None:
            batch = replace(batch, weight=batch.weight * policy_weights(plain))
        return batch

    def invariants(self, metrics: Mapping[str, float], config: DpoOptions) -> Sequence[str]:
        """Before any update the policy is its own reference, so Δ = 0 and the sigmoid loss is ln 2."""
        return gap_problems(metrics, config.precision)
