"""Adapters of models that give numbers become models that give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.training import ROWS, context_for, format_of, model_artifact, train

from posttrain.artifacts.kinds import Kind, PolicyFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input
from posttrain_plugins.models import merging
from posttrain_plugins.models.valued import numbers, open_valued
from posttrain_plugins.models.valued_record import Probe, probes_of

TRAINERS = {"train.reward": Kind.REWARD_MODEL, "train.prm": Kind.PROCESS_REWARD_MODEL}
PROBES = [Probe((5, 6, 7, 8, 9), (0, 1, 2, 3, 4)), Probe((9, 5, 3), (0, 1, 2))]
EXACT = 1e-5


def flat(values: list[list[float]]) -> list[float]:
    return [value for each in values for value in each]


def trained(directory: Path, uses: str, **options: Any) -> tuple[Artifact, Artifact]:
    """An adapter with its head after some steps, and its base."""
    base = model_artifact(directory / "base")
    format = format_of(uses)
    options = {"lora": {"r": 2}, "max_steps": 3, "batch_size": 4, **options}
    context = context_for(directory / "run", uses, base, ROWS[format](6), format, **options)
    train(context)
    return context.result("model"), base


def merge(directory: Path, adapter: Artifact, base: Artifact, **options: Any) -> FakeContext:
    stage = catalogue().stage("model.merge")
    config = configured(stage, kind=adapter.kind.value, **options)
    context = FakeContext(directory, stage, config, {"adapter": [adapter]})
    context.known[base.digest] = base
    context.outcome = merging.run(context)
    return context


@pytest.mark.parametrize("uses", ["train.reward", pytest.param("train.prm", marks=pytest.mark.slow)])
def test_a_merged_judge_gives_the_numbers_of_its_adapter(tmp_path: Path, uses: str) -> None:
    adapter, base = trained(tmp_path, uses)
    context = merge(tmp_path / "merge", adapter, base)
    whole = context.result("model")
    kind = TRAINERS[uses]
    assert whole.kind is kind and whole.facts.base is None and whole.facts.adapter is None
    assert whole.facts.scores == adapter.facts.scores and whole.facts.head == adapter.facts.head
    before = flat(numbers(open_valued(adapter, context, kind).model, PROBES))
    after = flat(numbers(open_valued(whole, context, kind).model, PROBES))
    assert after == pytest.approx(before, abs=EXACT)
    plain = flat(numbers(open_valued(base, context, kind).model, PROBES))
    assert plain != pytest.approx(before, abs=100 * EXACT), "the adapter changes what the model says"
    assert len(probes_of(whole.path)) == len(probes_of(adapter.path)) > 0
    assert context.outcome is not None and "adapter_effect" not in context.outcome.figures
    assert whole.facts.merge.effect is None, "a policy has no head to compare with"


@pytest.mark.slow
def test_in_sixteen_bits_it_keeps_what_it_says_itself(tmp_path: Path) -> None:
    adapter, base = trained(tmp_path, "train.reward")
    context = merge(tmp_path / "merge", adapter, base, dtype="bfloat16")
    whole = context.result("model")
    assert whole.facts.dtype == "bfloat16"
    open_valued(whole, context, Kind.REWARD_MODEL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("into", ["base", "dequantized"])
def test_what_was_trained_in_four_bits(tmp_path: Path, into: str) -> None:
    adapter, base = trained(tmp_path, "train.prm", quantization={"bits": 4})
    whole = merge(tmp_path / "merge", adapter, base, into=into).result("model")
    known = adapter.facts.scores if into == "dequantized" else ScoreFacts(separator="\n")
    assert whole.facts.scores == known


@pytest.mark.parametrize(
    ("kind", "given", "base", "message"),
    [
        ("model", Kind.REWARD_MODEL, "b", "set `kind: reward-model`"),
        ("reward-model", Kind.ADAPTER, "b", "set `kind: model`"),
        ("reward-model", Kind.PROCESS_REWARD_MODEL, "b", "set `kind: process-reward-model`"),
        ("reward-model", Kind.REWARD_MODEL, "b", None),
        ("process-reward-model", Kind.PROCESS_REWARD_MODEL, None, None),
        ("model", Kind.ADAPTER, "b", None),
    ],
)
def test_the_plan_knows_what_comes_out(kind: str, given: Kind, base: str | None, message: str | None) -> None:
    stage = catalogue().stage("model.merge")
    config = configured(stage, kind=kind)
    inputs = {"adapter": [Input("rm.model", given, PolicyFacts(base=base))]}
    assert [finding.fix for finding in stage.check(config, inputs)] == ([message] if message else [])
    (port,) = stage.outputs(config)
    assert port.kinds == {Kind(kind)} == {stage.predict(config, inputs)["model"].kind}


def test_a_whole_reward_model_has_nothing_to_merge(tmp_path: Path) -> None:
    made, _ = trained(tmp_path, "train.reward", lora=None, max_steps=1)
    stage = catalogue().stage("model.merge")
    found = stage.check(
        configured(stage, kind="reward-model"),
        {"adapter": [Input("rm.model", made.kind, made.facts, made)]},
    )
    assert [finding.fix for finding in found] == ["use it as it is"]
