"""The stage `data.best_of_n`: a policy's own best and worst completions as preference pairs.

Stiennon et al., arXiv 2009.01325, and Nakano et al., arXiv 2112.09332, choose the best of n by a reward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from posttrain.artifacts.kinds import POLICY, DatasetFacts, Kind
from posttrain.artifacts.manifest import digest_of
from posttrain.contracts.component import Choice, Uses
from posttrain.contracts.registration import Group
from posttrain.contracts.reward import Sample, Scorer
from posttrain.contracts.stage import (
    Finding,
    Inputs,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageConfig,
    StageContext,
    VolatileMark,
)
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import as_messages
from posttrain_plugins.data.rows import SHARED, read_rows, write_rows
from posttrain_plugins.data.tasks import FORMATS, Task, tasks_of
from posttrain_plugins.rewards.judging import JUDGE, judge_findings, opened
from posttrain_plugins.stopping import pauses

if TYPE_CHECKING:
    from posttrain_plugins.models.policy import Policy
    from posttrain_plugins.rollouts.generation import Generation

_REPLACED = frozenset({"messages", "completion"})
"""Columns of the prompts' rows that a pair does not carry along."""


class BestOfNConfig(StageConfig):
    """Options of `data.best_of_n`."""

    reward: Annotated[Choice, Uses(Group.REWARD)] = Field(description="scores the completions")
    n: int = Field(default=4, ge=2, description="completions of each prompt")
    temperature: float = Field(default=1.0, gt=0, description="divides the logits")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="sample from the smallest set of tokens whose probability reaches this",
    )
    max_new_tokens: int = Field(default=128, ge=1, description="longest completion")
    pairs_per_prompt: int = Field(
        default=1,
        ge=1,
        description="the best with the worst, the second best with the second worst, and so on",
    )
    min_gap: float = Field(default=0.0, ge=0, description="least difference of the two rewards")
    allow_ties: bool = Field(
        default=False,
        description="let completions of equal reward make a pair, in an order set by the seed; for smoke runs",
    )
    allow_truncated: bool = Field(
        default=False,
        description="use completions that were cut off by `max_new_tokens` too; trained on, they end where "
        "the policy did not end them",
    )
    limit: int | None = Field(
        default=None, ge=1, description="use this many prompts, chosen by their content"
    )
    seed: int = Field(
        default=0, ge=0, description="seeds the samples, the choice between equal rewards and that of `limit`"
    )
    batch_tokens: Annotated[int, VolatileMark()] = Field(
        default=16384, ge=1, description="tokens in one batch, padding included; bounds the memory"
    )


class BestOfN(Stage):
    """Samples n completions of each prompt, scores them and pairs the best with the worst."""

    config = BestOfNConfig
    shared = SHARED
    inputs = (
        Port("model", POLICY),
        Port("prompts", frozenset({Kind.DATASET}), formats=FORMATS),
        JUDGE,
    )
    target = "posttrain_plugins.data.best_of_n:run"
    preload = ("torch", "transformers")
    tiny: ClassVar[Mapping[str, Any]] = {
        "limit": 16,
        "max_new_tokens": 16,
        "min_gap": 0.0,
        "allow_ties": True,
        "allow_truncated": True,
    }

    def outputs(self, config: BestOfNConfig) -> tuple[Port, ...]:
        """Return the pairs."""
        return (Port("pairs", frozenset({Kind.DATASET}), formats=frozenset({"preference"})),)

    def predict(self, config: BestOfNConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict preference data; the policy is known once the model is."""
        digests = [model.artifact.digest for model in inputs.get("model", ()) if model.artifact is not None]
        turns = [each.facts.conversational for each in inputs.get("prompts", ())]
        facts = DatasetFacts(
            format="preference",
            policy=digests[0] if digests else None,
            conversational=turns[0] if turns else None,
        )
        return {"pairs": Prediction(Kind.DATASET, facts)}

    def check(self, config: BestOfNConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a reward whose model is not connected, or is another than it judges with."""
        return judge_findings(config.reward, inputs)


@dataclass(frozen=True)
class Scored:
    """One distinct completion of a prompt.

    Args:
        text: What was sampled.
        reward: Its score; None when the reward abstained.
        count: How often it was sampled.
        finished: Whether the policy ended it by itself.
    """

    text: str
    reward: float | None
    count: int
    finished: bool


def run(context: StageContext) -> Outcome:
    """Sample, score, choose and write the pairs."""
    config: BestOfNConfig = context.config
    model, prompts = context.input("model"), context.input("prompts")
    tasks = tasks_of(read_rows(prompts), prompts.facts.format, config.limit, config.seed)
    scored = _score(_samples(context, tasks), tasks, opened(context, config.reward))
    rows: list[dict[str, Any]] = []
    reasons: Counter[str] = Counter()
    for task, completions in zip(tasks, scored, strict=True):
        pairs = list(choose_pairs(completions, config, task.identity))
        rows.extend(_row(task, chosen, rejected) for chosen, rejected in pairs)
        reasons[_without_pair(completions, config) if not pairs else "paired"] += 1
    if not rows:
        raise _nothing(reasons, config)
    facts = write_rows(context.output("pairs"), rows, "preference", policy=model.digest)
    context.describe("pairs", Kind.DATASET, facts)
    figures = _figures(rows, reasons, scored)
    told = ", ".join(
        f"{count} prompts {reason}" for reason, count in sorted(reasons.items()) if reason != "paired"
    )
    summary = f"{len(rows)} pairs from {len(tasks)} prompts, mean reward {figures['mean_reward']:.3f}"
    return Outcome(figures=figures, summary=f"{summary} ({told})" if told else summary)


def choose_pairs(
    completions: Sequence[Scored], config: BestOfNConfig, identity: str
) -> Iterator[tuple[Scored, Scored]]:
    """Yield (chosen, rejected) of one prompt: the i-th best with the i-th worst, while the gap is enough.

    Equal rewards are ordered by a hash of seed, row and text, so the choice does not favour a position or a
    length.
    """
    usable = [
        each
        for each in completions
        if each.reward is not None and each.text.strip() and (each.finished or config.allow_truncated)
    ]
    usable.sort(key=lambda each: digest_of([config.seed, identity, each.text]))
    best = sorted(usable, key=lambda each: -(each.reward or 0.0))
    used: set[str] = set()
    for chosen, rejected in list(zip(best, best[::-1], strict=True))[: config.pairs_per_prompt]:
        gap = (chosen.reward or 0.0) - (rejected.reward or 0.0)
        pair = {chosen.text, rejected.text}
        if len(pair) < 2 or pair & used or not _enough(gap, config):
            return
        used |= pair
        yield chosen, rejected


def _samples(context: StageContext, tasks: Sequence[Task]) -> list[list[tuple[str, Generation]]]:
    """Return the text and the generation of each sample of each task."""
    from posttrain_plugins.models.policy import open_policy, usable_device
    from posttrain_plugins.rollouts.generation import generate

    config: BestOfNConfig = context.config
    policy: Policy = open_policy(context.input("model"), context, device=usable_device())

    generations = generate(
        policy,
        [policy.encoder.encode_prompt(task.prompt, task.tools, task.arguments) for task in tasks],
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        samples=config.n,
        seed=config.seed,
        batch_tokens=config.batch_tokens,
        progress=pauses(context, "prompts", "sampling"),
    )
    return [[(policy.encoder.decode(one.tokens), one) for one in group] for group in generations]


def _score(
    samples: Sequence[Sequence[tuple[str, Generation]]], tasks: Sequence[Task], scorer: Scorer
) -> list[list[Scored]]:
    """Score every distinct completion once; a text that ended by itself in any sample counts as finished."""
    distinct: list[dict[str, tuple[int, bool]]] = []
    for group in samples:
        found: dict[str, tuple[int, bool]] = {}
        for text, generation in group:
            count, finished = found.get(text, (0, False))
            found[text] = (count + 1, finished or generation.finished)
        distinct.append(found)
    asked = [
        Sample(as_messages(task.prompt), text, task.row, finished)
        for task, found in zip(tasks, distinct, strict=True)
        for text, (_, finished) in found.items()
    ]
    rewards = iter(scorer(asked))
    return [
        [Scored(text, next(rewards), count, finished) for text, (count, finished) in found.items()]
        for found in distinct
    ]


def _row(task: Task, chosen: Scored, rejected: Scored) -> dict[str, Any]:
    """Return a preference row; completions are strings where the prompt is one, else assistant turns."""
    plain = isinstance(task.prompt, str)
    others = {name: value for name, value in task.row.items() if name not in _REPLACED}
    return others | {
        "prompt": task.prompt,
        "chosen": chosen.text if plain else [{"role": "assistant", "content": chosen.text}],
        "rejected": rejected.text if plain else [{"role": "assistant", "content": rejected.text}],
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
    }


def _without_pair(completions: Sequence[Scored], config: BestOfNConfig) -> str:
    """Say why a prompt gave no pair."""
    rewards = [completion.reward for completion in completions if completion.reward is not None]
    if not rewards:
        return "abstained"
    gap = max(rewards) - min(rewards)
    return "tied" if len(rewards) < 2 or not _enough(gap, config) else "truncated or empty"


def _enough(gap: float, config: BestOfNConfig) -> bool:
    return gap >= config.min_gap and (gap > 0 or config.allow_ties)


def _figures(
    rows: Sequence[Any], reasons: Mapping[str, int], scored: Sequence[Sequence[Scored]]
) -> dict[str, float]:
    every = [completion for group in scored for completion in group if completion.reward is not None]
    total = sum(completion.count for completion in every)
    return {
        "pairs": float(len(rows)),
        "ties": float(reasons.get("tied", 0)),
        "abstained": float(reasons.get("abstained", 0)),
        "unusable": float(reasons.get("truncated or empty", 0)),
        "mean_reward": math.fsum((completion.reward or 0.0) * completion.count for completion in every)
        / total,
    }


def _nothing(reasons: Mapping[str, int], config: BestOfNConfig) -> DataError:
    if reasons.keys() == {"abstained"}:
        return DataError(
            "the reward abstained on every completion",
            where=f"reward {config.reward.name}",
            found=f"no score for any completion of {sum(reasons.values())} prompts",
            fix="look at the completions and at what the stage noted of them, or use a reward that can judge them",
        )
    counts = ", ".join(f"{count} prompts {reason}" for reason, count in sorted(reasons.items()))
    return DataError(
        "no prompt gave a pair of a better and a worse completion",
        where=f"reward {config.reward.name}",
        found=counts or "no prompts",
        expected="two completions of one prompt with different rewards",
        fix="raise `n`, `temperature` or `max_new_tokens`, or use a reward that tells completions apart",
    )
