"""Several losses with weights: one loss whose parts keep what is theirs."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from helpers.contexts import catalogue, configured
from helpers.losses import Adaptive, Surprising, mixture
from helpers.stepping import assert_same, examples, gradient, stepper
from helpers.training import Context, context_for, model_artifact, preference_rows, train, weights

from posttrain.contracts.component import Component
from posttrain.contracts.loss import REFERENCES, Family, LossOutput, Need, Scope
from posttrain.contracts.registration import Group
from posttrain.errors import Interrupted
from posttrain.registry.components import ConfigProblems, choices, config_schema, semantic
from posttrain.registry.options import describe
from posttrain_plugins.losses.mixture import Mixture
from posttrain_plugins.losses.preference.aot import Aot
from posttrain_plugins.losses.preference.bco_pair import BcoPair
from posttrain_plugins.losses.preference.sft import Sft
from posttrain_plugins.losses.preference.sigmoid import Sigmoid
from posttrain_plugins.testing.batches import batch_of, part_of
from posttrain_plugins.training.objective import objective

MPO: dict[str, Any] = {
    "loss": ["sigmoid", {"name": "bco_pair", "beta": 0.2}, "sft"],
    "loss_weights": [0.8, 0.2, 1.0],
}


def reduced(output: LossOutput, batch: Any) -> float:
    """What the loop makes of a step of one part."""
    part = part_of(batch)
    return float(sum(term.weight * term.reduction.total(term.values, part) for term in output.terms))


def test_it_is_the_weighted_sum_of_its_parts():
    loss = Mixture(
        [Component("sigmoid", Sigmoid(), Sigmoid.config()), Component("sft", Sft(), None)], [2, 0.5]
    )
    batch = batch_of(
        Family.PREFERENCE, chosen=[-3.0], rejected=[-3.0], chosen_tokens=[4], reference_chosen=[-3.0],
        reference_rejected=[-3.0],
    )  # fmt: skip
    found = reduced(loss(batch, loss.config(), {}, loss.begin(loss.config())), batch)
    assert found == pytest.approx(2 * 0.693147 + 0.5 * 3 / 4, abs=1e-6)


def registered() -> dict[Family, list[Component]]:
    """Every registered loss with its default options, by family."""
    known = catalogue()
    found: dict[Family, list[Component]] = {}
    for name in known.names(Group.LOSS):
        plugin = known.make(Group.LOSS, name)
        found.setdefault(plugin.family, []).append(Component(name, plugin, plugin.config()))
    return found


@pytest.mark.parametrize("family", list(Family))
def test_it_declares_whatever_a_part_declares(family: Family):
    parts = registered()[family]
    for one, other in combinations_with_replacement(parts, 2):
        made = Mixture([one, other], [1, 1])
        needs = [each.plugin.needs_of(each.config) for each in (one, other)]
        assert made.needs_of(made.config()) == made.needs == needs[0] | needs[1]
        assert made.needs_reference == bool(made.needs & REFERENCES)
        assert made.measures == any(each.plugin.measures for each in (one, other))
        assert (made.scope is Scope.STEP) == any(each.plugin.scope is Scope.STEP for each in (one, other))


def test_it_needs_and_sees_what_any_part_does():
    assert mixture(Sigmoid, Sft).needs_of(None) == {Need.REFERENCE}
    assert mixture(Sft).needs_of(None) == frozenset()
    assert mixture(Sigmoid, Sft).scope is Scope.MICRO_BATCH
    assert mixture(Sft, Aot).scope is Scope.STEP
    assert not mixture(Sigmoid, Sft).measures
    assert mixture(Sft, BcoPair).measures


def test_parts_keep_their_stats_and_states_apart():
    loss = mixture(Adaptive, Surprising)
    batch = batch_of(Family.TOKEN, logp=[-1.0, -4.0])
    stats = loss.measure(batch, None, loss.begin(None))
    state = loss.advance(loss.begin(None), stats, None)
    assert set(stats) == {
        f"{part}/{n}" for part in ("adaptive", "surprising") for n in ("surprise", "tokens")
    }
    assert state == {"adaptive": {"coefficient": 0.9}, "surprising": {}}
    assert json.loads(json.dumps(state)) == state
    # Adaptive: 0.9 · (1 + 4) / 2; surprising, above the mean of 2.5: 2 · 4 / 2.
    assert reduced(loss(batch, None, stats, state), batch) == pytest.approx(0.9 * 2.5 + 2 * 2)


def test_metrics_of_one_name_are_told_apart():
    batch = batch_of(Family.PREFERENCE, chosen=[2.0], rejected=[0.0])
    parts = [Component("sigmoid", Sigmoid(), Sigmoid.config(beta=beta)) for beta in (0.5, 1.5, 2.5)]
    metrics = Mixture(parts, [1, 1, 1])(
        batch, None, {}, {"sigmoid": {}, "sigmoid:2": {}, "sigmoid:3": {}}
    ).metrics
    margins = {name: float(values) for name, values in metrics.items() if name.endswith("rewards/margin")}
    assert margins == {
        "rewards/margin": 1.0, "sigmoid:2/rewards/margin": 3.0, "sigmoid:3/rewards/margin": 5.0
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 60])
def test_its_gradient_is_the_sum_of_its_parts_gradients(tokens: int):
    rows = examples("train.dpo")
    whole, _, found = gradient(stepper("train.dpo", "both", tokens, plugin=mixture(Sft, Aot)), rows)
    first, _, one = gradient(stepper("train.dpo", "sft"), rows)
    second, _, other = gradient(stepper("train.dpo", "aot"), rows)
    assert whole == pytest.approx(first + 2 * second, rel=1e-5)
    assert_same(found, [a + 2 * b for a, b in zip(one, other, strict=True)])


def test_options_name_several_losses():
    config = configured(catalogue().stage("train.dpo"), **MPO)
    named = [(path, choice.name) for path, choice, group in choices(config) if group == "loss"]
    assert named == [(("loss", 0), "sigmoid"), (("loss", 1), "bco_pair"), (("loss", 2), "sft")]
    assert semantic(config)["loss"][1] == {"name": "bco_pair", "beta": 0.2}
    assert semantic(config)["loss_weights"] == [0.8, 0.2, 1.0]


def test_the_schema_and_the_options_say_so():
    schema = config_schema(catalogue().stage("train.dpo").config, catalogue())
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert valid(MPO) and valid({"loss": "ipo"}) and valid({"loss": {"beta": 0.2}})
    assert not valid({"loss": ["sigmoid", {"name": "ipo", "label_smoothing": 0.1}]})
    assert not valid({"loss": []}) and not valid({"loss": ["no_such_loss"]})
    (about,) = [each for each in describe(catalogue().stage("train.dpo").config) if each["name"] == "loss"]
    assert about["type"] == "loss | list[loss]"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": []}, "at least 1"),
    ({"loss": 3}, "a mapping or a list"),
    ({"loss": ["sigmoid", "nll"]}, "loss.1"),
    ({"loss": ["sigmoid", {"name": "ipo", "label_smoothing": 0.1}]}, "loss.1.label_smoothing"),
    ({"loss": ["sigmoid", {"beta": 0.1}]}, "loss.1.name: the option 'name' is required"),
    ({"loss": {"beta": 0}}, "loss.beta"),
    ({"loss_weights": [1.0]}, "would be ignored"),
    ({"loss": ["sigmoid", "sft"], "loss_weights": [1.0]}, "equally long, but hold 2 and 1"),
    ({"loss": ["sigmoid", "sft"], "loss_weights": [1.0, -1.0]}, "loss_weights.1"),
    ({"loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0]}, "loss_weights.1"),
    ({"ld_alpha": 1}, "ld_alpha"),
    ({"ld_alpha": -0.1}, "ld_alpha"),
    ({"weighting": "none"}, "'wpo'"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, Any], said: str):
    with pytest.raises(ConfigProblems) as refused:
        configured(catalogue().stage("train.dpo"), **options)
    assert said in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_artifact(tmp_path_factory.mktemp("model"))


def make(directory: Path, model: Any, **options: Any) -> Context:
    given = {"max_steps": 4, "batch_size": 3, **MPO, **options}
    return context_for(directory, "train.dpo", model, preference_rows(6), "preference", **given)


def test_training_with_several_losses_resumes_bit_equal(tmp_path: Path, model: Any):
    whole = make(tmp_path / "whole", model)
    train(whole)
    first = make(tmp_path / "parts", model)
    first.stop_at = 2
    with pytest.raises(Interrupted):
        train(first)
    second = make(tmp_path / "parts", model)
    train(second)
    assert first.losses + second.losses == whole.losses
    one, other = (weights(tmp_path / where / "out-model") for where in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {"rewards/margin", "rewards/shift", "bco_pair/rewards/margin"} <= set(whole.seen_metrics[4])


def test_one_loss_stays_what_it_is_and_weights_default_to_one(tmp_path: Path, model: Any):
    alone = objective(make(tmp_path / "alone", model, loss="ipo", loss_weights=None))
    assert alone.name == "ipo" and not isinstance(alone.plugin, Mixture)
    several = objective(make(tmp_path / "several", model, loss_weights=None))
    assert several.name == "sigmoid+bco_pair+sft"
    assert several.plugin.weights == (1.0, 1.0, 1.0)
