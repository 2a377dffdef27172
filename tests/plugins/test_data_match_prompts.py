from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.training import context_for as training_context
from helpers.training import dataset_artifact, model_artifact, train

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input
from posttrain.errors import DataError
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.data.similarity.prompt_classes import (
    density_ratio,
    embeddings,
    fitted,
    probabilities,
    run,
    standardized,
)
from posttrain_plugins.models.policy import open_policy

STAGE = catalogue().stage("data.match_prompts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


def rows_of(kinds: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    """Prompts of sums and of names, with good or bad answers."""
    made = {"sum": "1+{0}=?", "name": "WHO IS MR {0}"}
    return [
        {"prompt": made[kind].format(number % 2), "completion": f"a{number}", "label": label}
        for number, (kind, label) in enumerate(kinds)
    ]


def context(directory: Path, model: Artifact, rows: list[dict[str, Any]], **options: Any) -> FakeContext:
    data = dataset_artifact(directory / "data", rows, "unpaired_preference")
    return FakeContext(directory, STAGE, configured(STAGE, **options), {"data": [data], "model": [model]})


MIXED = [("sum", True)] * 8 + [("sum", False)] * 3 + [("name", False)] * 9


def test_bad_answers_to_prompts_without_good_ones_weigh_less(tmp_path: Path, model: Artifact):
    made = context(tmp_path, model, rows_of(MIXED))
    outcome = run(made)
    rows = read_rows(made.output("data"))
    assert [{name: row[name] for name in ("prompt", "completion", "label")} for row in rows] == rows_of(MIXED)
    weights = [row["weight"] for row in rows]
    assert weights[:8] == [1.0] * 8
    assert min(weights[8:11]) > 1 > max(weights[11:])
    assert min(weights) == 0.5
    assert outcome.figures["accuracy"] > 0.8
    assert outcome.figures["weight"] == pytest.approx(sum(weights[8:]) / 12)
    (_, facts) = made.described["data"]
    assert (facts.format, facts.rows) == ("unpaired_preference", 20)
    assert "weight" in facts.columns


def test_training_takes_the_weights(tmp_path: Path, model: Artifact):
    made = context(tmp_path / "match", model, rows_of(MIXED))
    run(made)
    rows = read_rows(made.output("data"))
    options = {"max_steps": 1, "loss": "bco", "weight_column": "weight", "batch_size": 20}
    weighed = training_context(tmp_path / "train", "train.kto", model, rows, "unpaired_preference", **options)
    train(weighed)
    expected = math.log(2) * sum(row["weight"] for row in rows) / 20
    assert weighed.losses == [pytest.approx(expected, rel=1e-4)]


def test_embeddings_are_means_over_each_prompt_alone(model: Artifact, tmp_path: Path):
    policy = open_policy(model, FakeContext(tmp_path, STAGE, None, {}))
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [4, 4]]
    seen: list[int] = []
    found = embeddings(policy, prompts, 8, seen.append)
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            hidden = policy.model.model(torch.tensor([prompt]))[0][0]
            assert torch.allclose(found[row], hidden.mean(0), atol=1e-6)
    assert len(seen) > 1 and seen[-1] == 4


def test_the_classifier_has_its_one_minimum():
    # Two rows at ±1 of either side: 2 softplus(−w) + w²/2 is least where w = 2 σ(−w).
    weight, bias = fitted(
        torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([True, False])
    ).tolist()
    assert weight == pytest.approx(2 / (1 + math.exp(weight)), abs=1e-6)
    assert bias == pytest.approx(0, abs=1e-6)


def test_both_sides_count_alike():
    features = torch.zeros(10, 2, dtype=torch.float64)
    good = torch.tensor([True] * 9 + [False])
    assert probabilities(features, good, 100, 0).tolist() == pytest.approx([0.5] * 10, abs=1e-6)
    assert fitted(features, good).tolist() == pytest.approx([0.0] * 3, abs=1e-6)


def test_the_seed_draws_the_rows_that_are_looked_at():
    features = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    good = torch.arange(60) % 3 == 0
    first, again, other = (probabilities(features, good, 10, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_weights_are_odds_within_bounds():
    likely = torch.tensor([0.9, 0.5, 0.75, 0.999, 0.01], dtype=torch.float64)
    found = density_ratio(likely, torch.tensor([True, False, False, False, False]), 0.2, 10.0)
    assert found.tolist() == pytest.approx([1, 1, 3, 10, 0.2], rel=1e-6)


def test_a_feature_that_never_changes_is_left_out():
    found = standardized(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert found.tolist() == [[-1, 0], [1, 0]]


def test_rows_of_one_side_are_refused(tmp_path: Path, model: Artifact):
    with pytest.raises(DataError, match="cannot be compared"):
        run(context(tmp_path, model, rows_of([("sum", True)] * 4)))


def test_a_column_that_is_there_already_is_refused_at_plan(tmp_path: Path, model: Artifact):
    rows = [{**row, "weight": 1.0} for row in rows_of(MIXED)]
    made = context(tmp_path, model, rows)
    inputs = {port: [Input(port, each.kind, each.facts, each)] for port, (each,) in made.inputs.items()}
    (finding,) = STAGE.check(made.config, inputs)
    assert "column `weight` already" in finding.message
    with pytest.raises(DataError, match="column `weight` already"):
        run(made)
    assert list(STAGE.check(configured(STAGE, column="w"), inputs)) == []


@pytest.mark.parametrize("options", [{"min_ratio": 2, "max_ratio": 1}, {"sample": 1}, {"min_ratio": -1}])
def test_impossible_options_are_refused(options: dict[str, Any]):
    with pytest.raises(Exception, match=r"ratio|sample"):
        configured(STAGE, **options)
