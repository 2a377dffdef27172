"""What losses over pairs without a reference share: log-probs themselves are the rewards, and one answer is learned.

They take the fields that `PreferenceBatch` and `ThreeWayBatch` have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Config
from posttrain.contracts.loss import PreferenceBatch, Term, ThreeWayBatch
from posttrain.contracts.reduction import RoleTokenMean

if TYPE_CHECKING:
    from torch import Tensor

Pairs = PreferenceBatch | ThreeWayBatch
LIKELIHOODS = frozenset({"logps/chosen", "logps/rejected"})
"""The metrics that `likelihoods` returns."""
TOLD = LIKELIHOODS | {"rewards/accuracy", "rewards/margin", "rewards/chosen", "rewards/rejected"}
"""The metrics that `told` returns."""
SMOOTHING = "assumed share of pairs whose preference is the wrong way round"


class MarginOptions(Config):
    """Options of losses that want a margin γ between mean log-probs: it has two spellings, one of which is given."""

    beta: float = Field(default=2.0, gt=0, description="scale of the difference of mean log-probs")
    gamma: float | None = Field(
        default=None, ge=0, description="target margin γ, absolute: as large as a difference times beta"
    )
    gamma_beta_ratio: float | None = Field(
        default=0.5,
        ge=0,
        description="the same margin as a share of beta, γ / beta, in nats a token; left out where `gamma` is given",
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description=SMOOTHING)

    @model_validator(mode="before")
    @classmethod
    def _absolute_alone(cls, data: Any) -> Any:
        absolute = isinstance(data, Mapping) and data.get("gamma") is not None
        return {"gamma_beta_ratio": None, **data} if absolute else data

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        if (self.gamma is None) == (self.gamma_beta_ratio is None):
            raise ValueError(
                "the margin needs exactly one of `gamma` (absolute) and `gamma_beta_ratio` (gamma / beta)"
            )
        return self

    @property
    def margin(self) -> float:
        """γ, absolute."""
        return self.beta * (self.gamma_beta_ratio or 0.0) if self.gamma is None else self.gamma


def widened(values: Tensor) -> Tensor:
    """Return values in float32 at least: exponentials and their differences need its digits."""
    import torch

    return values.to(torch.promote_types(values.dtype, torch.float32))


def expm1_until(exponent: Tensor, steepest: float) -> Tensor:
    """Return e^x − 1, and beyond a steepest x its tangent: finite, with a gradient of the right sign."""
    below = exponent.clamp(max=steepest)
    return below.expm1() + below.detach().exp() * (exponent - below)


def token_means(batch: Pairs) -> tuple[Tensor, Tensor]:
    """Return the mean log-prob of a token of each chosen and of each rejected answer, in nats, shape [P] each."""
    chosen, rejected = widened(batch.chosen), widened(batch.rejected)
    return chosen / batch.chosen_tokens, rejected / batch.rejected_tokens


def logistic(scaled: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return −(1−ε) log σ(x) − ε log σ(−x)."""
    from torch.nn.functional import logsigmoid

    values = -logsigmoid(scaled)
    return values if smoothing == 0 else (1 - smoothing) * values - smoothing * logsigmoid(-scaled)


def likelihood(batch: Pairs, role: str, weight: float) -> list[Term]:
    """Return `weight` times the negative log-likelihood of a token of one role's answers; no term for a weight of 0.

    The mean is over the tokens of these answers in the whole step, as supervised fine-tuning on them takes it.
    """
    if weight == 0:
        return []
    values = -widened(getattr(batch, role)) * batch.weight
    return [Term(values, RoleTokenMean(role), weight)]


def told(batch: Pairs, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of pairs whose answers have these rewards, shape [P] each."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/accuracy": (chosen > rejected).to(chosen.dtype),
        "rewards/margin": chosen - rejected,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        **likelihoods(batch),
    }


def likelihoods(batch: Pairs) -> dict[str, Tensor]:
    """Σ log π of both answers, shape [P] each."""
    return {"logps/chosen": batch.chosen.detach(), "logps/rejected": batch.rejected.detach()}
