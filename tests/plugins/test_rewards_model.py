"""Rewards that judge with a model: an input of the stage, known to the plan, with the numbers that training sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.evaluation import dataset
from helpers.judges import SCORES, judge_artifact
from helpers.training import model_artifact

from posttrain import ModelReward, Sample
from posttrain.artifacts.kinds import Kind, PolicyFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Input
from posttrain.contracts.trainer import Judge
from posttrain.errors import DataError, StageError
from posttrain.pipeline import Pipeline
from posttrain.registry.validation import faults
from posttrain_plugins.data.best_of_n import run
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.evaluation.rewards import values_of
from posttrain_plugins.models.valued import open_valued
from posttrain_plugins.preparation.dataset import named_format
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.rewards.judging import opened
from posttrain_plugins.rewards.process import ProcessScorer, answered
from posttrain_plugins.testing.rewards import RewardSubject
from posttrain_plugins.testing.suites import Nonconformance
from posttrain_plugins.trainers.reward import Reward

PLAIN = [{"prompt": f"say {i}:"} for i in range(4)]
CHATS = [{"prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(4)]
STAGE = "data.best_of_n"


def context(
    directory: Path, reward: Any, judge: Artifact | None, rows: Sequence[Mapping[str, Any]] = CHATS
) -> FakeContext:
    options = {"reward": reward, "n": 4, "max_new_tokens": 6, "allow_truncated": True}
    stage = catalogue().stage(STAGE)
    inputs = {
        "model": [model_artifact(directory / "model", initializer_range=0.3)],
        "prompts": [dataset(directory / "data", rows, "prompt")],
        **({} if judge is None else {"reward": [judge]}),
    }
    return FakeContext(directory, stage, configured(stage, **options), inputs)


@pytest.mark.parametrize("rows", [PLAIN, CHATS], ids=["strings", "messages"])
def test_the_reward_of_an_answer_is_what_training_sees_of_its_row(tmp_path: Path, rows: Any) -> None:
    judge = judge_artifact(tmp_path)
    given = context(tmp_path / "run", "model", judge, rows)
    run(given)
    pairs = read_rows(given.output("pairs"))
    policy = open_valued(judge, given, Kind.REWARD_MODEL)
    prepared = prepare(
        Reward(), pairs, policy.encoder, named_format(given, "preference"),
        max_length=None, truncation="error", weight_column=None, supervise=Judge.END,
    )  # fmt: skip
    values = values_of(policy.model, prepared.examples, 4096)
    assert pairs and len(values) == len(pairs)
    for place, row in enumerate(pairs):
        assert [row["chosen_reward"], row["rejected_reward"]] == pytest.approx(values[place], abs=1e-5)
        assert row["chosen_reward"] > row["rejected_reward"]


@pytest.mark.parametrize("aggregation", ["min", "log_product"])
def test_the_steps_of_an_answer_make_up_its_reward(tmp_path: Path, aggregation: str) -> None:
    judge = judge_artifact(tmp_path, Kind.PROCESS_REWARD_MODEL)
    given = context(tmp_path / "run", {"name": "process", "aggregation": aggregation}, judge)
    texts = ["Step 1: a b\nStep 2: c", "ab", "", "1. x\n2. y\n3. z"]
    prompt = CHATS[0]["prompt"]
    found = opened(given, given.config.reward)([Sample(prompt, text, CHATS[0]) for text in texts])
    rows = [answered(prompt, [{"role": "assistant", "content": text}]) for text in texts]
    assert [len(row["completions"]) for row in rows] == [2, 1, 0, 3]
    said = ProcessScorer.open(judge, given).score([row for row in rows if row["completions"]])
    expected = iter(each.reward(aggregation) for each in said if each is not None)
    assert found[2] is None, "there is no step"
    assert [found[place] for place in (0, 1, 3)] == pytest.approx(list(expected), abs=1e-5)


def test_standardized_rewards_are_of_one_size(tmp_path: Path) -> None:
    judge = judge_artifact(tmp_path)
    samples = [Sample(CHATS[0]["prompt"], text, CHATS[0]) for text in ("ab", "cd e")]
    plain, sized = (
        opened(given, given.config.reward)(samples)
        for given in (
            context(tmp_path / str(way), {"name": "model", "standardize": way}, judge)
            for way in (False, True)
        )
    )
    assert sized == pytest.approx([(each - SCORES.mean) / SCORES.deviation for each in plain])


def test_what_is_too_long_for_the_model_has_no_reward(tmp_path: Path) -> None:
    judge = judge_artifact(tmp_path)
    given = context(tmp_path / "run", "model", judge)
    long = "a" * (judge.facts.context + 1)
    found = opened(given, given.config.reward)([Sample((), text) for text in ("ab", long)])
    assert found[0] is not None and found[1] is None


def test_what_the_chat_template_of_the_model_refuses_is_told(tmp_path: Path) -> None:
    judge = judge_artifact(tmp_path)
    (judge.path / "chat_template.jinja").write_text("{{ raise_exception('users only') }}", encoding="utf-8")
    given = context(tmp_path / "run", "model", judge)
    with pytest.raises(DataError, match="users only"):
        opened(given, given.config.reward)([Sample(CHATS[0]["prompt"], "ab", CHATS[0])])


@pytest.mark.parametrize("name", ["model", "process"])
def test_what_cannot_be_encoded_has_no_reward(tmp_path: Path, name: str) -> None:
    """One such completion does not end a stage that has sampled many."""
    judge = judge_artifact(tmp_path, Kind.REWARD_MODEL if name == "model" else Kind.PROCESS_REWARD_MODEL)
    given = context(tmp_path / "run", name, judge)
    template = judge.path / "chat_template.jinja"
    refusing = "{% for m in messages %}{% if '!' in m.content %}{{ raise_exception('shouts') }}{% endif %}{% endfor %}"
    template.write_text(refusing + template.read_text(encoding="utf-8"), encoding="utf-8")
    good, bad = (Sample([{"role": "user", "content": text}], "ab", CHATS[0]) for text in ("q", "q!"))
    found = opened(given, given.config.reward)([good, bad, good, bad])
    assert [each is None for each in found] == [False, True, False, True]
    (warning,) = given.warnings
    assert warning.startswith("2 of 4 completions have no reward") and "shouts" in warning
    with pytest.raises(DataError, match="shouts"):
        opened(given, given.config.reward)([bad, bad])


@pytest.mark.parametrize("name", ["model", "process"])
def test_a_model_that_can_judge_nothing_is_an_error(tmp_path: Path, name: str) -> None:
    judge = judge_artifact(tmp_path, Kind.REWARD_MODEL if name == "model" else Kind.PROCESS_REWARD_MODEL)
    facts = judge.facts.model_copy(update={"context": 3})
    short = replace(judge, manifest=judge.manifest.model_copy(update={"facts": facts}))
    given = context(tmp_path / "run", name, short)
    with pytest.raises(DataError, match="abstained on every completion"):
        run(given)
    (warning,) = given.warnings
    assert "completions have no reward" in warning and "longer than 3 tokens" in warning


def told(kind: Kind, scores: ScoreFacts | None) -> Input:
    return Input("rm.model", kind, PolicyFacts(scores=scores))


@pytest.mark.parametrize(
    ("reward", "model", "message"),
    [
        ("model", None, "judges with a model, and none is connected"),
        ("process", None, "none is connected"),
        ("exact", told(Kind.REWARD_MODEL, SCORES), "would be ignored"),
        ("model", told(Kind.PROCESS_REWARD_MODEL, SCORES), "judges with a reward-model, but rm.model is"),
        ("process", told(Kind.REWARD_MODEL, SCORES), "judges with a process-reward-model, but rm.model is"),
        ("process", told(Kind.PROCESS_REWARD_MODEL, ScoreFacts()), "what ended the steps"),
        ({"name": "model", "standardize": True}, told(Kind.REWARD_MODEL, ScoreFacts()), "spread"),
        ("exact", None, None),
        ("model", told(Kind.REWARD_MODEL, None), None),
        ({"name": "model", "standardize": True}, told(Kind.REWARD_MODEL, None), None),
        ("process", told(Kind.PROCESS_REWARD_MODEL, None), None),
        ({"name": "process", "step_separator": ";"}, told(Kind.PROCESS_REWARD_MODEL, ScoreFacts()), None),
    ],
)
def test_the_plan_knows_whether_a_reward_has_its_model(
    reward: Any, model: Input | None, message: str | None
) -> None:
    stage = catalogue().stage(STAGE)
    inputs = {} if model is None else {"reward": [model]}
    found = [finding.message for finding in stage.check(configured(stage, reward=reward), inputs)]
    assert len(found) == (message is not None)
    assert all(message in text for text in found)


def test_a_stage_that_gets_no_model_stops(tmp_path: Path) -> None:
    given = context(tmp_path, "model", None)
    with pytest.raises(StageError, match="judges with a model"):
        opened(given, given.config.reward)


PIPELINE = """
stages:
  rows: {uses: data.load, with: {path: pairs.jsonl}}
  base: {uses: model.init, inputs: {data: rows}}
  rm: {uses: train.reward, inputs: {model: base, data: rows}, with: {max_steps: 1}}
  prompts: {uses: data.convert, inputs: {data: rows}, with: {to: prompt}}
  pairs:
    uses: data.best_of_n
    inputs: {model: base, prompts: prompts, reward: rm}
    with: {reward: REWARD, n: 2, max_new_tokens: 4, allow_truncated: true}
"""


def written(directory: Path, reward: str) -> Pipeline:
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (directory / "pairs.jsonl").write_text(pair * 8)
    file = directory / "pipeline.yaml"
    file.write_text(PIPELINE.replace("REWARD", reward))
    return Pipeline.from_file(file)


@pytest.mark.parametrize(("reward", "refused"), [("model", False), ("process", True), ("exact", True)])
def test_a_pipeline_hands_a_reward_model_to_its_reward(tmp_path: Path, reward: str, refused: bool) -> None:
    plan = written(tmp_path, reward).plan(tmp_path)
    errors = [finding for finding in plan.refused if finding.rule == "reward"]
    assert bool(errors) == refused
    assert all(finding.node == "pairs" and finding.port == "reward" for finding in errors)


@pytest.mark.slow
def test_a_pipeline_runs_with_its_own_reward_model(tmp_path: Path) -> None:
    report = written(tmp_path, "model").run(tmp_path / ".posttrain", runner="inline")
    assert report.require_completed().results["pairs"].figures["pairs"] >= 1


class NoKinds(ModelReward):
    """Says not with what it judges."""

    def open(self, model: Any, context: Any, config: Any) -> Any:
        """Return nothing of use."""


class NotOpened(ModelReward):
    """Defines no way to open its model."""

    models = frozenset({Kind.REWARD_MODEL})


@pytest.mark.parametrize(
    ("reward", "said"), [(NoKinds, "`models` must be a frozenset"), (NotOpened, "does not define open")]
)
def test_a_faulty_reward_is_refused_where_it_is_registered(reward: Any, said: str) -> None:
    assert any(said in fault for fault in faults(Group.REWARD, reward))


def test_the_suite_of_a_reward_with_a_model_asks_how_it_gets_one() -> None:
    with pytest.raises(Nonconformance, match="say with `opener` how it gets one"):
        RewardSubject("model", catalogue().load(Group.REWARD, "model"), {}).scores([])
