"""The reward `process`: what a trained process reward model says of the steps of a completion, as one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.component import Config
from posttrain.contracts.reward import ModelReward, Sample, Scorer
from posttrain.contracts.stage import Finding, Input, Level, StageContext, VolatileMark
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.rewards.aggregation import Aggregation
from posttrain_plugins.rewards.judging import JUDGE, as_row, tell_abstained
from posttrain_plugins.rewards.steps import Style
from posttrain_plugins.stopping import pauses


class ProcessOptions(Config):
    """Options of the reward `process`."""

    aggregation: Aggregation = Field(
        default="min",
        description="how the steps make up the reward: the least likely one, the product (that all are right), its "
        "logarithm in nats, the mean, or the last one",
    )
    style: Style | None = Field(
        default=None,
        description="how steps are told in a text: `\\item`s, `Step 1:`, `1.`, paragraphs or lines; unset: the first "
        "of these that finds more than one",
    )
    step_separator: str | None = Field(
        default=None,
        description="what ends every step that is a string; unset: what the model was trained with",
    )
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


class Process(ModelReward):
    """How likely the steps of a completion are right, after a process reward model, put together to one number.

    The steps are found in the text. It abstains on a completion without any, on one that is longer than the model can
    take, and on one that cannot be encoded (Lightman et al. 2023, https://arxiv.org/abs/2305.20050).
    """

    config = ProcessOptions
    models = frozenset({Kind.PROCESS_REWARD_MODEL})

    def check(self, model: Input, config: ProcessOptions) -> Iterable[Finding]:
        """Report a model of which nothing tells what ended its steps."""
        scores = model.facts.scores
        if config.step_separator is None and scores is not None and scores.separator is None:
            message = f"{model.origin} does not say what ended the steps that it was trained on"
            fix = "name it in `step_separator`"
            yield Finding("reward", Level.ERROR, certainty(model), message, port=JUDGE.name, fix=fix)

    def open(self, model: Artifact, context: StageContext, config: ProcessOptions) -> Scorer:
        """Open the model."""
        from posttrain_plugins.models.policy import usable_device
        from posttrain_plugins.rewards.process import ProcessScorer, answered

        scorer = ProcessScorer.open(
            model,
            context,
            separator=config.step_separator,
            batch_tokens=config.batch_tokens,
            device=usable_device(),
        )
        pause = pauses(context, "completions", "scoring")

        def score(samples: Sequence[Sample]) -> list[float | None]:
            rows = [
                {**row, **answered(row["prompt"], row["completion"], config.style)}
                for row in map(as_row, samples)
            ]
            asked = [place for place, row in enumerate(rows) if row["completions"]]
            empty = [place for place, row in enumerate(rows) if not row["completions"]]
            said = scorer.score(
                [rows[place] for place in asked],
                lambda done: pause(done, len(asked)),
                lambda account: tell_abstained(context, _with_empty(account, empty)),
            )
            found: list[float | None] = [None] * len(rows)
            for place, scores in zip(asked, said, strict=True):
                found[place] = None if scores is None else scores.reward(config.aggregation)
            return found

        return score


def _with_empty(account: Account, empty: Sequence[int]) -> Account:
    """Count the completions that the model is not asked about."""
    account.rows += len(empty)
    for place in empty:
        account.left_out.add(place, "no step")
    return account
