"""What stages that score with a reward share: the port of its model, what the plan says of it, and scores that hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Choice
from posttrain.contracts.registration import Group
from posttrain.contracts.reward import ModelReward, Sample, Scorer
from posttrain.contracts.stage import Certainty, Finding, Inputs, Level, Port, StageContext
from posttrain.errors import StageError
from posttrain.registry.fields import BoundChoice
from posttrain.wording import listed
from posttrain_plugins.preparation.accounts import Account

JUDGE = Port("reward", frozenset({Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL}), optional=True)
"""Where a stage gets the model of a reward that judges with one."""
_RULE = "reward"


def judge_findings(choice: Choice, inputs: Inputs) -> Iterable[Finding]:
    """Report a reward without its model, a model without use, and one that does not suit the reward.

    Args:
        choice: The reward that the stage's options name.
        inputs: The stage's inputs; the model is on port `reward`.
    """
    if not isinstance(choice, BoundChoice) or choice.plugin is None:
        return
    reward = choice.plugin
    judges = isinstance(reward, type) and issubclass(reward, ModelReward)
    given = inputs.get(JUDGE.name, ())
    if judges and not given:
        message = f"reward `{choice.name}` judges with a model, and none is connected"
        fix = f"add `{JUDGE.name}: STAGE` under `inputs:`, a stage that puts out a {_kinds(reward)}"
        yield Finding(_RULE, Level.ERROR, Certainty.VERIFIED, message, port=JUDGE.name, fix=fix)
    for model in given:
        if not judges:
            message = f"{model.origin} would be ignored: reward `{choice.name}` judges without a model"
            fix = "leave the port unconnected, or use a reward such as `model`"
        elif model.kind not in reward.models:
            message = (
                f"reward `{choice.name}` judges with a {_kinds(reward)}, but {model.origin} is a {model.kind}"
            )
            fix = "use `reward: model` with a reward model, and `reward: process` with one that judges steps"
        else:
            yield from reward().check(model, choice.config)
            continue
        # What is connected, and of which kind it is, the pipeline says itself.
        yield Finding(_RULE, Level.ERROR, Certainty.VERIFIED, message, port=JUDGE.name, fix=fix)


def opened(context: StageContext, choice: Choice) -> Scorer:
    """Return what scores completions as a stage's options say; every score is checked.

    Args:
        context: The stage's; it holds the model, if the reward judges with one.
        choice: The reward.

    Raises:
        StageError: The reward judges with a model and there is none, or another than one.
    """
    component = context.component(choice, Group.REWARD)
    name, reward, config = component.name, component.plugin, component.config

    def asked(samples: Sequence[Sample]) -> list[float | None]:
        return list(reward(samples, config))

    scorer: Scorer = asked
    if isinstance(reward, ModelReward):
        given = context.inputs.get(JUDGE.name, ())
        if len(given) != 1:
            raise StageError(
                f"reward `{name}` judges with a model",
                where=f"input port `{JUDGE.name}`",
                found=f"{len(given)} models",
                expected="one",
            )
        scorer = reward.open(given[0], context, config)
    return lambda samples: _checked(name, scorer(samples), len(samples))


def tell_abstained(context: StageContext, account: Account) -> None:
    """Tell on how many completions a reward that judges with a model abstains, and why.

    Args:
        context: The stage's.
        account: What became of the completions.

    Raises:
        DataError: None of them can be encoded.
    """
    counts = account.left_out.counts + account.refused.groups.counts
    reasons = [f"{count}: {text}" for text, count in counts.most_common()]
    if not reasons:
        return
    if account.refused.count == account.rows:
        account.refused.check(account.rows)
    share = f"{counts.total()} of {account.rows} completions"
    context.note(
        f"{share} have no reward, as its model cannot judge them ({'; '.join(reasons)})", Level.WARNING
    )


def as_row(sample: Sample) -> dict[str, Any]:
    """Return a sample as the row of a dataset that it would become, `prompt` and `completion` set.

    Where the prompt of its row is a string, both are, without a chat template.
    """
    prompt, answer = sample.row.get("prompt"), sample.completion
    texts: dict[str, Any] = {"prompt": prompt, "completion": answer}
    if not isinstance(prompt, str):
        turns = [{"role": "assistant", "content": answer}]
        texts = {"prompt": list(sample.prompt), "completion": turns}
    return {**sample.row, **texts}


def _checked(name: str, found: Sequence[Any], asked: int) -> list[float | None]:
    """Refuse an answer that is not one finite number or None for each sample."""
    if len(found) != asked:
        raise StageError(
            "the reward did not return one score for each sample",
            where=f"reward {name}",
            found=f"{len(found)} scores",
            expected=f"{asked}",
        )
    for score in found:
        if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
            raise StageError(
                "a reward must be a finite number, or None to abstain",
                where=f"reward {name}",
                found=repr(score),
            )
    return [None if score is None else float(score) for score in found]


def _kinds(reward: type[ModelReward]) -> str:
    return listed(sorted(kind.value for kind in reward.models))
