"""The reward `model`: what a trained reward model says of a completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field

from posttrain.artifacts.kinds import Kind, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Config
from posttrain.contracts.passage import Passage
from posttrain.contracts.reward import ModelReward, Sample, Scorer
from posttrain.contracts.stage import Finding, Input, Level, StageContext, VolatileMark
from posttrain.contracts.trainer import Judge
from posttrain.errors import StageError
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.rewards.judging import JUDGE, as_row, tell_abstained
from posttrain_plugins.stopping import pauses


class ModelOptions(Config):
    """Options of the reward `model`."""

    standardize: bool = Field(
        default=False,
        description="subtract the mean and divide by the deviation that the model's numbers had where it was trained, "
        "so that rewards of different models are of one size",
    )
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


class Model(ModelReward):
    """The number of a reward model, read at the last token of the completion.

    The completion is judged as the chat template of the reward model shows it, whatever the policy's is. It abstains
    on one that is longer than the model can take, on one without any token to judge, and on one that cannot be encoded.
    """

    config = ModelOptions
    models = frozenset({Kind.REWARD_MODEL})

    def check(self, model: Input, config: ModelOptions) -> Iterable[Finding]:
        """Report a model without the statistics that `standardize` needs."""
        scores = model.facts.scores
        unknown = scores is None and not model.verified
        if config.standardize and not unknown and not _spread(scores):
            message = (
                f"standardize needs the spread of the model's numbers, which {model.origin} does not tell"
            )
            yield Finding(
                "reward",
                Level.ERROR,
                certainty(model),
                message,
                port=JUDGE.name,
                fix="leave `standardize` out",
            )

    def open(self, model: Artifact, context: StageContext, config: ModelOptions) -> Scorer:
        """Open the model."""
        from posttrain_plugins.evaluation.rewards import values_of
        from posttrain_plugins.models.policy import usable_device
        from posttrain_plugins.models.valued import open_valued
        from posttrain_plugins.preparation.accounts import Account
        from posttrain_plugins.preparation.examples import Preparation

        mean, deviation = _scale(model) if config.standardize else (0.0, 1.0)
        policy = open_valued(model, context, Kind.REWARD_MODEL, device=usable_device())
        ready = Preparation(_passages, policy.encoder, model.facts.context, "drop", supervise=Judge.END)
        pause = pauses(context, "completions", "scoring")

        def score(samples: Sequence[Sample]) -> list[float | None]:
            account = Account()
            examples = list(ready.examples(map(as_row, samples), account))
            tell_abstained(context, account)
            said = values_of(policy.model, examples, config.batch_tokens, pause)
            return [(said[row][0] - mean) / deviation if row in said else None for row in range(len(samples))]

        return score


def _passages(row: Any) -> tuple[Passage]:
    from posttrain_plugins.data.formats.passages import passage_of

    return (passage_of(row, "completion", row["prompt"], row["completion"]),)


def _spread(scores: ScoreFacts | None) -> bool:
    return scores is not None and scores.mean is not None and bool(scores.deviation)


def _scale(model: Artifact) -> tuple[float, float]:
    scores: ScoreFacts | None = model.facts.scores
    if scores is None or scores.mean is None or not scores.deviation:
        raise StageError(
            "standardize needs the spread of the model's numbers",
            where=model.ref,
            found="a manifest without it",
            fix="leave `standardize` out",
        )
    return scores.mean, scores.deviation
