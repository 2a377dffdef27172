"""Hand-off rules on the manifests that reward models really have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.models import as_artifact
from helpers.sites import data, findings, site
from helpers.training import context_for, model_artifact, preference_rows, train

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.rule import Site
from posttrain.contracts.stage import Certainty, Input, Level
from posttrain_plugins.handoffs.evaluations import JudgedOther, Leakage
from posttrain_plugins.handoffs.templates import TemplateMissing
from posttrain_plugins.handoffs.tokenizers import EmbeddingsShort, RewardTokenizer
from posttrain_plugins.handoffs.weights import HeadWrong, WeightsMissing
from posttrain_plugins.models.artifact import facts_of

REWARD = Kind.REWARD_MODEL


def given(artifact: Artifact, origin: str = "rm.model") -> Input:
    return Input(origin, artifact.kind, artifact.facts, artifact)


def trained(directory: Path, **options: Any) -> Artifact:
    policy = model_artifact(directory / "policy")
    context = context_for(
        directory / "run", "train.reward", policy, preference_rows(4), "preference", max_steps=1, **options
    )
    train(context)
    kind, facts = context.described["model"]
    return as_artifact(context.output("model"), facts, kind)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return trained(tmp_path_factory.mktemp("adapted"), lora={"r": 2})


RULES = (HeadWrong, WeightsMissing, EmbeddingsShort, RewardTokenizer, TemplateMissing)


def test_a_reward_model_of_this_library_is_at_fault_nowhere(
    tmp_path: Path, whole: Artifact, adapted: Artifact
):
    policy = Input("sft.model", Kind.MODEL, model_artifact(tmp_path).facts)
    for judge in (whole, adapted):
        for uses in ("score", "train"):
            at = site(uses, model=policy, reward=given(judge))
            assert [found for rule in RULES for found in findings(rule, at)] == []


def test_a_reward_model_that_is_taken_for_a_policy(whole: Artifact, adapted: Artifact):
    for judge in (whole, adapted):
        facts = facts_of(judge.path)
        (found,) = findings(HeadWrong, site("train", model=Input("rm.model", Kind.MODEL, facts), data=data()))
        assert (found.level, found.port) == (Level.ERROR, "model")
        assert "LlamaForSequenceClassification" in found.message


def test_a_policy_that_is_taken_for_a_reward_model(tmp_path: Path, whole: Artifact):
    policy = model_artifact(tmp_path)
    at = site("score", model=given(policy, "sft.model"), reward=Input("rm.model", REWARD, policy.facts))
    (found,) = findings(HeadWrong, at)
    assert "LlamaForCausalLM" in found.message and found.port == "reward"


def test_a_reward_model_that_lost_its_head(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    judge = trained(tmp_path)
    file = judge.path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "score" not in n}, file, metadata={"format": "pt"})
    at = site(
        "score",
        model=given(model_artifact(tmp_path / "p")),
        reward=Input("rm.model", REWARD, facts_of(judge.path)),
    )
    (found,) = findings(WeightsMissing, at)
    assert "score.weight" in found.message and found.level is Level.ERROR


def test_a_reward_model_with_another_tokenizer_than_the_policy(tmp_path: Path, whole: Artifact):
    other = model_artifact(tmp_path, alphabet="abcdefghijklmnopqrstuvwxyz \n?")
    for uses, level in (("score", Level.WARNING), ("train", Level.ERROR)):
        at = site(uses, model=given(other, "sft.model"), reward=given(whole))
        (found,) = findings(RewardTokenizer, at)
        assert (found.level, found.certainty) == (level, Certainty.VERIFIED)


def test_conversations_for_a_reward_model_without_a_template(tmp_path: Path):
    bare = model_artifact(tmp_path, template=None)
    judge = Input("rm.model", REWARD, bare.facts, bare)
    chats = data("pairs.test", format="preference", conversational=True)
    (found,) = findings(TemplateMissing, _evaluation(judge, chats))
    assert found.port == "models"


def _evaluation(judge: Input, pairs: Input, *upstream: Site) -> Site:
    stage = catalogue().stage("evaluate.preferences")
    makers = {maker.node: maker for maker in upstream}
    made = {judge.origin: makers["rm"]} if "rm" in makers else {}
    inputs = {"models": [judge], "data": [pairs]}
    return Site("eval", "evaluate.preferences", stage, configured(stage), inputs, made)


def test_pairs_that_a_reward_model_was_trained_on_do_not_evaluate_it(whole: Artifact):
    stage = catalogue().stage("train.reward")
    pairs = data("pairs.train", format="preference", prompts=["a", "b"])
    policy = Input("base.model", Kind.MODEL, whole.facts)
    training = Site("rm", "train.reward", stage, configured(stage), {"model": [policy], "data": [pairs]}, {})
    held_out = data("pairs.test", format="preference", prompts=["b", "c"])
    (found,) = findings(Leakage, _evaluation(given(whole), held_out, training))
    assert found.level is Level.ERROR and "rm" in found.message
    clean = data("pairs.test", format="preference", prompts=["c"])
    assert findings(Leakage, _evaluation(given(whole), clean, training)) == []


def test_a_gate_on_a_report_about_another_reward_model(whole: Artifact, adapted: Artifact):
    from posttrain.artifacts.kinds import ReportFacts

    stage = catalogue().stage("gate")
    report = Input("eval.report", Kind.REPORT, ReportFacts(report="evaluation", subjects=(whole.digest,)))
    inputs = {"candidate": [given(adapted)], "report": [report]}
    config = configured(stage, threshold=0.6, metric="pair_accuracy")
    assert [each for each in stage.check(config, inputs) if "does not cover" in each.message]
    assert not list(stage.check(config, {**inputs, "candidate": [given(whole)]}))
    assert (
        findings(
            JudgedOther, Site("gate", "gate", stage, config, {**inputs, "candidate": [given(whole)]}, {})
        )
        == []
    )
