"""Direct preference optimization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.loss import Family
from posttrain.contracts.registration import Group
from posttrain_plugins.trainers.pairs import PairTrainer
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


class Dpo(PairTrainer):
    """Train on preference pairs against the starting policy (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

    The reference is the exact starting policy, continued adapters included: its log-probs are computed once,
    before the first update. Dropout is off, so that policy and reference agree until then.
    """

    config = DpoOptions

    def invariants(self, metrics: Mapping[str, float], config: DpoOptions) -> Sequence[str]:
        """Before any update the policy is its own reference, so Δ = 0 and the sigmoid loss is ln 2."""
        gap = metrics.get("reference/gap", 0.0)
        if gap <= GAP[config.precision]:
            return ()
        return (
            f"the policy differs from its reference by {gap:.3g} nats a token before the first update;"
            " dropout that stays active, or a model whose output depends on how rows are batched, would do that",
        )
