from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.evaluation import Context, dataset
from helpers.training import model_artifact

from posttrain import NoOptions, Sample
from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.contracts.stage import Input
from posttrain.errors import DataError, Interrupted, StageError
from posttrain_plugins.data.best_of_n import BestOfN, BestOfNConfig, Scored, choose_pairs, run
from posttrain_plugins.data.rows import prompt_hash, read_rows
from posttrain_plugins.rewards.exact import Exact

PLAIN = [{"prompt": f"say {i}:", "level": i} for i in range(5)]
CHATS = [
    {"prompt": [{"role": "user", "content": f"q{i}"}], "completion": "x", "answer": "x"} for i in range(3)
]


class Letters:
    """Scores by the number of lower-case letters."""

    config = NoOptions

    def __call__(self, samples: Sequence[Sample], config: Any) -> list[float | None]:
        return [float(sum(c.islower() for c in sample.completion)) for sample in samples]


class Fixed:
    """Answers with a fixed list, whatever it is asked."""

    config = NoOptions

    def __init__(self, scores: Sequence[Any]) -> None:
        self.scores = scores

    def __call__(self, samples: Sequence[Sample], config: Any) -> list[Any]:
        return list(self.scores) if len(self.scores) != 1 else list(self.scores) * len(samples)


def context_for(
    directory: Path,
    rows: Sequence[Any] = PLAIN,
    format: str = "prompt",
    reward: Any = Letters,
    **options: Any,
) -> Context:
    config = BestOfNConfig(**{"reward": "r", "n": 4, "max_new_tokens": 6, "allow_truncated": True, **options})
    inputs = {
        "model": [model_artifact(directory / "model", initializer_range=0.3)],
        "prompts": [dataset(directory / "data", rows, format)],
    }
    return Context(directory, config, inputs, {"r": reward})


def rows_of(context: Context) -> list[dict[str, Any]]:
    return read_rows(context.output("pairs"))


def test_pairs_are_the_best_and_the_worst_of_what_the_policy_says(tmp_path: Path) -> None:
    context = context_for(tmp_path)
    outcome = run(context)
    rows = rows_of(context)
    assert outcome.figures["pairs"] == len(rows) > 0
    for row in rows:
        assert row["chosen_reward"] == sum(c.islower() for c in row["chosen"])
        assert row["rejected_reward"] == sum(c.islower() for c in row["rejected"])
        assert row["chosen_reward"] > row["rejected_reward"]
        assert row["level"] == int(row["prompt"][4]), "other columns travel along"
    kind, facts = context.described["pairs"]
    assert (kind, facts.format, facts.rows) == (Kind.DATASET, "preference", len(rows))
    assert facts.policy == context.input("model").digest
    prompts = (context.output("pairs") / "prompts.txt").read_text().split()
    assert set(prompts) <= {prompt_hash(row, "prompt") for row in PLAIN}


def test_the_same_pairs_in_any_batching_and_others_with_another_seed(tmp_path: Path) -> None:
    contexts = [
        context_for(tmp_path / str(i), **options)
        for i, options in enumerate([{"batch_tokens": 1}, {"batch_tokens": 10_000}, {"seed": 1}])
    ]
    for context in contexts:
        run(context)
    one, together, other = map(rows_of, contexts)
    assert one == together
    assert one != other


def test_chats_give_chats(tmp_path: Path) -> None:
    context = context_for(tmp_path, CHATS, "prompt_completion")
    run(context)
    for row in rows_of(context):
        assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"
        assert "completion" not in row
        assert row["answer"] == "x"


def test_a_reward_that_abstains_everywhere_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the reward abstained on every completion") as caught:
        run(context_for(tmp_path, reward=Exact))
    assert caught.value.found == "no score for any completion of 5 prompts"


def test_ties_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run(context_for(tmp_path, reward=Fixed([0.5])))
    assert caught.value.found == "5 prompts tied"


@pytest.mark.parametrize(
    ("scores", "problem"),
    [([1.0, 2.0], "one score for each"), ([float("nan")], "finite"), (["good"], "finite")],
)
def test_a_reward_that_breaks_its_contract_is_refused(
    tmp_path: Path, scores: list[Any], problem: str
) -> None:
    with pytest.raises(StageError, match=problem):
        run(context_for(tmp_path, reward=Fixed(scores)))


def test_limit_and_stopping(tmp_path: Path) -> None:
    context = context_for(tmp_path, limit=2)
    outcome = run(context)
    assert "from 2 prompts" in outcome.summary
    context = context_for(tmp_path / "b")
    context.stop = True
    with pytest.raises(Interrupted):
        run(context)


def scored(*completions: tuple[str, float | None], finished: bool = True) -> list[Scored]:
    return [Scored(text, reward, 1, finished) for text, reward in completions]


def chosen(completions: Sequence[Scored], **options: Any) -> list[tuple[str, str]]:
    config = BestOfNConfig(reward="r", **options)
    return [(best.text, worst.text) for best, worst in choose_pairs(completions, config, "row")]


def test_pairs_go_from_the_outside_in() -> None:
    five = scored(("c", 3.0), ("a", 1.0), ("e", 5.0), ("b", 2.0), ("d", 4.0), ("?", None))
    assert chosen(five) == [("e", "a")]
    assert chosen(five, pairs_per_prompt=9) == [("e", "a"), ("d", "b")]
    assert chosen(five, pairs_per_prompt=9, min_gap=3) == [("e", "a")]
    assert chosen(five, min_gap=4.5) == []


def test_equal_rewards_never_pair_and_are_ordered_by_the_seed() -> None:
    assert chosen(scored(("a", 1.0), ("b", 1.0))) == []
    assert sorted(*chosen(scored(("a", 1.0), ("b", 1.0)), allow_ties=True)) == ["a", "b"]
    assert chosen(scored(("a", 1.0)), allow_ties=True) == []
    four = chosen(scored(*((letter, 1.0) for letter in "abcd")), allow_ties=True, pairs_per_prompt=4)
    assert sorted(text for pair in four for text in pair) == ["a", "b", "c", "d"], "no text is used twice"
    tied = scored(*((letter, 1.0) for letter in "abcdefgh"), ("z", 0.0))
    assert chosen(tied) == chosen(tied[::-1])
    assert len({chosen(tied, seed=seed)[0] for seed in range(20)}) > 2


def test_cut_off_completions_are_neither_chosen_nor_rejected() -> None:
    cut = [*scored(("long", 3.0), finished=False), *scored(("short", 2.0), ("bad", 1.0))]
    assert chosen(cut) == [("short", "bad")]
    assert chosen(cut, allow_truncated=True) == [("long", "bad")]
    worst = [*scored(("long", 0.0), finished=False), *scored(("short", 2.0), ("bad", 1.0))]
    assert chosen(worst) == [("short", "bad")]
    assert chosen(worst, allow_truncated=True) == [("short", "long")]
    assert chosen([*scored(("long", 0.0), finished=False), *scored(("short", 2.0))]) == []


def test_empty_completions_are_left_out() -> None:
    assert chosen(scored((" ", 9.0), ("a", 2.0), ("b", 1.0), ("", 0.0))) == [("a", "b")]


def test_prediction_says_which_policy_once_it_is_known(tmp_path: Path) -> None:
    config = BestOfNConfig(reward="r")
    artifact = model_artifact(tmp_path / "m")
    for source, policy in (
        (Input("sft.model", Kind.MODEL, PolicyFacts()), None),
        (Input("sft.model", Kind.MODEL, artifact.facts, artifact), artifact.digest),
    ):
        facts = BestOfN().predict(config, {"model": [source]})["pairs"].facts
        assert (facts.format, facts.policy, facts.conversational) == ("preference", policy, None)
    prompts = Input("chats.prompts", Kind.DATASET, DatasetFacts(format="messages", conversational=True))
    assert BestOfN().predict(config, {"prompts": [prompts]})["pairs"].facts.conversational is True
