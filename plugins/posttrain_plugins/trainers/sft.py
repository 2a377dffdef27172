"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.loss import Absent, Family, Need, TokenBatch
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Scores, Supervise
from posttrain_plugins.training.offline import OfflineTrainer
from posttrain_plugins.training.options import TrainingOptions

if TYPE_CHECKING:
    from torch import Tensor


class SftOptions(TrainingOptions):
    """Options of `train.sft`."""

    learning_rate: float = Field(default=2e-5, gt=0, description="peak learning rate")
    supervise: Supervise = Field(
        default=Supervise.ANSWERS,
        description="what is learned: the completion or every assistant turn (`answers`), the last assistant turn"
        " alone, or everything, prompts too; of a tokenized dataset, `data.tokenize` has decided it",
    )
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.TOKEN),))] = Field(
        default=Choice(name="nll"), description="a loss over supervised tokens"
    )


class Sft(OfflineTrainer):
    """Train on completions: every assistant turn of `messages`, the completion of a pair, all of a `text`."""

    config = SftOptions
    family = Family.TOKEN
    diagnostics = True
    formats = frozenset({"text", "messages", "prompt_completion", "tokens"})

    def supervise(self, config: Any) -> Supervise:
        """What the options say."""
        learned: Supervise = config.supervise
        return learned

    def batch(self, scores: Scores, config: Any) -> TokenBatch:
        """Hand the tokens on as they are; a sequence is an example here."""
        told = {"squares": scores.squares, "mean_logp": scores.mean_logp}
        return TokenBatch(
            logp=scores.logp,
            entropy=scores.entropy if Need.ENTROPY in scores.needs else _for_metrics(scores.entropy),
            top1=scores.top1,
            example=scores.sequence,
            weight=scores.weight[scores.sequence],
            **{name: value for name, value in told.items() if value is not None},
        )


def _for_metrics(entropy: Tensor) -> Tensor:
    """Return numbers that no term may depend on: they have no gradient that reaches the policy."""
    import torch

    if not torch.is_grad_enabled():
        return entropy
    watched = entropy.detach().requires_grad_()
    watched.register_hook(_refuse)
    return watched


def _refuse(gradient: Tensor) -> None:
    raise Absent(Need.ENTROPY, "entropy").error()
