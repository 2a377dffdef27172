"""The reward `process`: what a trained process reward model says of the steps of a completion, as one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.reward import ModelReward, Sample, Scorer
from posttrain.contracts.stage import Finding, Input, StageContext
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.rewards.judging import JUDGE, as_row, tell_abstained
from posttrain_plugins.rewards.step_options import StepOptions, unseparated
from posttrain_plugins.stopping import pauses


class Process(ModelReward):
    """How likely the steps of a completion are right, after a process reward model, put together to one number.

    The steps are found in the text. It abstains on a completion without any, on one that is longer than the model can
    take, and on one that cannot be encoded (Lightman et al. 2023, https://arxiv.org/abs/2305.20050).
    """

    config = StepOptions
    models = frozenset({Kind.PROCESS_REWARD_MODEL})

    def check(self, model: Input, config: StepOptions) -> Iterable[Finding]:
        """Report a model of which nothing tells what ended its steps."""
        return unseparated(model, config.step_separator, "reward", JUDGE.name)

    def open(self, model: Artifact, context: StageContext, config: StepOptions) -> Scorer:
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
