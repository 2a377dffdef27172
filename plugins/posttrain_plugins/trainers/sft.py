"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.loss import Family, TokenBatch
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, Scores, TokenSequence
from posttrain_plugins.data.conversation import tools_of
from posttrain_plugins.training.offline import OfflineTrainer
from posttrain_plugins.training.options import TrainingOptions

_ENCODE: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "messages": lambda encoder, row: encoder.encode_messages(row["messages"], tools_of(row)),
    "prompt_completion": lambda encoder, row: encoder.encode_pair(
        row["prompt"], row["completion"], tools_of(row)
    ),
    "text": lambda encoder, row: encoder.encode_text(row["text"]),
}


class SftOptions(TrainingOptions):
    """Options of `train.sft`."""

    learning_rate: float = Field(default=2e-5, gt=0, description="peak learning rate")
    loss: Annotated[Choice, Uses(Group.LOSS, having=(("family", Family.TOKEN),))] = Field(
        default=Choice(name="nll"), description="a loss over supervised tokens"
    )


class Sft(OfflineTrainer):
    """Train on completions: every assistant turn of `messages`, the completion of a pair, all of a `text`."""

    config = SftOptions
    family = Family.TOKEN
    diagnostics = True
    formats = frozenset(_ENCODE)

    def example(self, row: Mapping[str, Any], index: int, encoder: Any, format: str) -> Example | str:
        """Encode one row as one sequence."""
        encoded = _ENCODE[format](encoder, row)
        sequence = TokenSequence(encoded.tokens, encoded.supervised, "completion", encoded.straddling)
        return Example(index, (sequence,))

    def batch(self, scores: Scores) -> TokenBatch:
        """Hand the tokens on as they are; a sequence is an example here."""
        return TokenBatch(
            logp=scores.logp,
            entropy=scores.entropy,
            top1=scores.top1,
            example=scores.sequence,
            weight=scores.weight[scores.sequence],
            squares=scores.squares,
        )
