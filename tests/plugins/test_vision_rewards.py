"""Reward models that see: trained on pairs with images, saved, opened again and evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import dataset_artifact, train
from helpers.vision import FAMILIES, picture, write_model
from transformers import AutoConfig

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.evaluation.pairs import run as evaluate
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.policy import open_policy
from posttrain_plugins.models.seeing import class_with_head
from posttrain_plugins.models.valued import open_valued

SIZES = ((40, 30), (28, 28))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = write_model(tmp_path_factory.mktemp(request.param), request.param)
    return as_artifact(directory, facts_of(directory))


def rows(directory: Path) -> list[dict[str, Any]]:
    """The same question and the same answers beside two pictures: which answer is better, the picture alone tells."""
    gallery = Gallery(directory)
    names = [gallery.take(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    answers = [[{"role": "assistant", "content": text}] for text in ("A cat", "two dogs")]
    return [
        {"prompt": [question], "images": [name], "chosen": answers[side], "rejected": answers[1 - side]}
        for side, name in enumerate(names)
    ]


def context(root: Path, model: Artifact, given: Sequence[Mapping[str, Any]], **options: Any) -> FakeContext:
    data = dataset_artifact(root / "data", given, "preference")
    stage = catalogue().stage("train.reward")
    plain = {"logging_steps": 1, "learning_rate": 1e-2, "batch_size": 2, "max_steps": 12}
    config = configured(stage, **{**plain, **options})
    return FakeContext(root, stage, config, {"model": [model], "data": [data]})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lora": {"r": 2}}, {"trunk": "frozen"}], ids=str)
def test_a_reward_model_that_sees(model: Artifact, tmp_path: Path, options: Mapping[str, Any]) -> None:
    given = context(tmp_path, model, rows(tmp_path / "data"), **options)
    train(given)
    if not options:
        assert given.losses[-1] < 0.5, "what does not look at the picture cannot get below ln 2"
    given.known[model.digest] = model
    judge = given.result("model")
    assert judge.kind is Kind.REWARD_MODEL and judge.facts.sees
    opened = open_valued(judge, given, Kind.REWARD_MODEL)
    before = open_policy(model, given).model.base_model.state_dict()
    seen = [name for name in before if "vision" in name or "visual" in name]
    if opened.base is None:
        assert judge.facts.head.endswith("ForSequenceClassification")
        after = opened.model.base_model.state_dict()
        assert seen and all(torch.equal(before[name], after[name]) for name in seen)
    stage = catalogue().stage("evaluate.preferences")
    asked = FakeContext(
        tmp_path / "report", stage, configured(stage), {"models": [judge], "data": given.inputs["data"]}
    )
    asked.known[model.digest] = model
    assert evaluate(asked).figures["pair_accuracy"] == judge.facts.scores.accuracy


def test_a_head_on_a_model_that_sees(model: Artifact, tmp_path: Path) -> None:
    """The trunk is that of the policy, whatever names its weights have in the file; the head depends on the seed."""
    given = FakeContext(tmp_path, None, None, {"model": [model]})
    first, again, other = (
        open_valued(model, given, Kind.REWARD_MODEL, seed=seed).model for seed in (1, 1, 2)
    )
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    trunk = open_policy(model, given).model.base_model.state_dict()
    found = first.base_model.state_dict()
    assert trunk.keys() == found.keys() and all(torch.equal(trunk[name], found[name]) for name in trunk)


def test_models_that_do_not_see_have_classes_of_their_own(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    assert class_with_head(LlamaConfig(), "ForSequenceClassification") is None
    write_model(tmp_path, "llava")
    made = class_with_head(AutoConfig.from_pretrained(tmp_path), "ForTokenClassification")
    assert made is not None and made.__name__ == "LlavaForTokenClassification"
