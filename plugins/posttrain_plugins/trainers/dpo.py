"""Direct preference optimization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.format import Format
from posttrain.contracts.loss import Family, PreferenceBatch
from posttrain.contracts.passage import Passage
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Scores
from posttrain_plugins.training.offline import OfflineTrainer
from posttrain_plugins.training.options import Precision, TrainingOptions

GAP: Mapping[Precision, float] = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}
"""Largest difference between policy and reference before the first update, in nats a token."""


class DpoOptions(TrainingOptions):
    """Options of `train.dpo`."""

    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.PREFERENCE),))] = Field(
        default=Choice(name="sigmoid"), description="a loss over preference pairs"
    )

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        if self.lora is not None and self.lora.dropout > 0:
            raise ValueError(
                "lora.dropout would be ignored: train.dpo trains without dropout, as its reference is scored"
            )
        return self


class Dpo(OfflineTrainer):
    """Train on preference pairs against the starting policy (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

    The reference is the exact starting policy, continued adapters included: its log-probs are computed once,
    before the first update. Dropout is off, so that policy and reference agree until then.
    """

    config = DpoOptions
    family = Family.PREFERENCE
    formats = frozenset({"preference", "token_pairs"})
    dropout = False
    sequences = 2

    def passages(self, row: Mapping[str, Any], format: Format) -> Sequence[Passage] | str:
        """The two answers to one prompt, unless they are the same."""
        if row["chosen"] == row["rejected"]:
            return "chosen and rejected are the same"
        return format.passages(row)

    def batch(self, scores: Scores) -> PreferenceBatch:
        """Sum the log-probs of each side."""
        chosen, rejected = scores.totals(scores.logp).unbind(1)
        chosen_tokens, rejected_tokens = scores.lengths.to(chosen).view(-1, 2).unbind(1)
        reference = scores.logp.new_zeros(len(scores.examples), 2)
        if scores.reference is not None:
            reference = scores.reference.view(-1, 2)
        return PreferenceBatch(
            chosen=chosen,
            rejected=rejected,
            reference_chosen=reference[:, 0],
            reference_rejected=reference[:, 1],
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            weight=scores.weight,
        )

    def invariants(self, metrics: Mapping[str, float], config: DpoOptions) -> Sequence[str]:
        """Before any update the policy is its own reference, so Δ = 0 and the sigmoid loss is ln 2."""
        gap = metrics.get("reference/gap", 0.0)
        if gap <= GAP[config.precision]:
            return ()
        return (
            f"the policy differs from its reference by {gap:.3g} nats a token before the first update;"
            " dropout that stays active, or a model whose output depends on how rows are batched, would do that",
        )
