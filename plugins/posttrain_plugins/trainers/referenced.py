"""What trainers against a reference share: before the first update, the policy is its own reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Config
from posttrain.contracts.loss import REFERENCES
from posttrain.contracts.stage import Certainty, Finding, Inputs, Level
from posttrain.contracts.trainer import Trainer
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.training.objective import known_needs
from posttrain_plugins.training.options import LOG_PROBS, Precision, TrainingOptions

_WHOLE = ("single", "ddp")
"""Backends under which every rank holds all weights."""

GAP: Mapping[Precision, float] = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}
"""Largest difference between policy and reference before the first update, in nats a token."""


class ReferenceSync(Config):
    """A reference that follows the policy (TR-DPO, https://arxiv.org/abs/2404.09656)."""

    steps: int = Field(default=512, ge=1, description="steps between two moves of the reference (τ)")
    alpha: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="how far it moves: α · policy + (1 − α) · reference; 1: all the way",
    )


class ReferencedOptions(TrainingOptions):
    """Options of trainers against a reference."""

    reference_sync: ReferenceSync | None = Field(
        default=None,
        description="let the reference follow the policy, such as `{steps: 512, alpha: 0.6}`, instead of staying the "
        "starting policy; takes the memory of a second copy of the weights",
    )

    @model_validator(mode="after")
    def _whole_weights(self) -> Self:
        if self.reference_sync is None:
            return self
        if self.adapter is not None:
            raise ValueError(
                "reference_sync needs all weights trained: a mean of the factors of two adapters is no mean of what "
                "they compute"
            )
        if self.backend.name not in _WHOLE:
            raise ValueError(
                f"reference_sync needs a backend that keeps all weights on every rank ({', '.join(_WHOLE)}), not "
                f"{self.backend.name}"
            )
        return self

    @property
    def copies(self) -> int:
        """A reference that follows the policy is one."""
        return 0 if self.reference_sync is None else 1


def sync_findings(trainer: Trainer, config: ReferencedOptions, inputs: Inputs) -> Iterable[Finding]:
    """Report what does not go together with a reference that follows the policy."""
    if config.reference_sync is None:
        return
    needs = known_needs(trainer, config)
    if needs is not None and not needs & REFERENCES:
        message, fix = "reference_sync would be ignored: no loss compares with a reference", "leave it out"
        yield Finding("trainer", Level.ERROR, Certainty.VERIFIED, message, fix=fix)
    model = inputs["model"][0]
    if model.kind is Kind.ADAPTER:
        message = f"reference_sync needs all weights trained, but {model.origin} is an adapter"
        fix = "merge it with `model.merge` first, or leave reference_sync out"
        yield Finding("trainer", Level.ERROR, certainty(model), message, port="model", fix=fix)
    for told in inputs.get(LOG_PROBS, ()):
        message = f"{told.origin} would be ignored: the log-probs of a reference that moves are not known beforehand"
        fix = "leave reference_sync out, or connect nothing to `log_probs`"
        yield Finding("trainer", Level.ERROR, certainty(told), message, port=LOG_PROBS, fix=fix)


def gap_problems(metrics: Mapping[str, float], precision: Precision) -> Sequence[str]:
    """Say so where the first step's forward passes differ from the reference."""
    gap = metrics.get("reference/gap", 0.0)
    if gap <= GAP[precision]:
        return ()
    return (
        f"the policy differs from its reference by {gap:.3g} nats a token before the first update;"
        " dropout that stays active, or a model whose output depends on how rows are batched, would do that",
    )
