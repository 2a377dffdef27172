"""Training on rows with images, through the stages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import train, weights
from helpers.vision import FAMILIES, write_model
from helpers.vision_runs import PROCESSOR_FILES, context, rows, sft_rows

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input, Level
from posttrain.errors import StageError
from posttrain_plugins.models.adapters import merged
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.policy import load_model, open_policy
from posttrain_plugins.templates.vision import expansion_of
from posttrain_plugins.training.adapters import with_adapter
from posttrain_plugins.training.peft_options import Lora
from posttrain_plugins.training.vision import Vision


def seeing(names: Iterable[str]) -> list[str]:
    """The weights of tower and projector."""
    return [name for name in names if re.search("vision|visual|connector|projector", name)]


def dpo_rows(directory: Path) -> list[dict[str, Any]]:
    chosen, rejected = {"role": "assistant", "content": "A cat"}, {"role": "assistant", "content": "two dogs"}
    return [{**row, "chosen": [chosen], "rejected": [rejected]} for row in rows(directory)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = write_model(tmp_path_factory.mktemp(request.param), request.param)
    return as_artifact(directory, facts_of(directory))


def test_sft_moves_the_weights_and_saves_a_whole_model(model: Artifact, tmp_path: Path) -> None:
    given = context(
        tmp_path, "train.sft", model, sft_rows(tmp_path / "data"), "prompt_completion", max_steps=4
    )
    outcome = train(given)
    assert outcome.steps == 4
    assert len(given.losses) == 4 and given.losses[-1] < given.losses[0]
    before, after = weights(model.path), weights(given.output("model"))
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert seeing(before) and not seeing(moved), "what sees stays frozen, bit for bit"
    assert any("embed_tokens" in name for name in moved)
    assert any("what sees stays frozen: " in note for note in given.notes)
    for name in PROCESSOR_FILES:
        assert (given.output("model") / name).read_bytes() == (model.path / name).read_bytes()
    opened = open_policy(given.result("model"), given)
    assert type(opened.model) is type(load_model(model.path, "float32"))
    assert expansion_of(given.output("model")) is not None


TOWER = ["vision_tower", "vision_model", "visual"]

PROJECTOR = ["multi_modal_projector", "connector", "merger"]
"""What they are called in the families."""


def of(model: Artifact, names: Sequence[str]) -> list[str]:
    """Those of the names that the model has."""
    return [name for name in names if any(f".{name}." in f".{key}" for key in weights(model.path))]


CUTS: Sequence[Mapping[str, Any]] = (
    {"micro_batch_tokens": 1, "layout": "padded"},
    {"micro_batch_tokens": 4096, "layout": "padded"},
    {"micro_batch_tokens": 4096, "layout": "packed"},
    {"micro_batch_tokens": 4096, "layout": "packed", "gradient_checkpointing": True},
)


def test_every_cut_is_the_same_step(model: Artifact, tmp_path: Path) -> None:
    """Micro-batches of one row with an image, or of texts alone, give the gradient that the whole step gives."""
    before, trained = weights(model.path), []
    for number, options in enumerate(CUTS):
        root = tmp_path / str(number)
        rows = sft_rows(root / "data")
        step = {
            "max_steps": 1,
            "batch_size": 8,
            "optim": "sgd",
            "learning_rate": 1.0,
            "unfreeze": of(model, TOWER),
        }
        given = context(root, "train.sft", model, rows, "prompt_completion", **step, **options)
        train(given)
        trained.append(weights(given.output("model")))
    first, *others = trained
    tower = [name for name in first if "vision" in name or "visual" in name]
    assert max(float((first[name] - before[name]).abs().max()) for name in tower) > 1e-3
    for other in others:
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": {"r": 2}}, pytest.param({"lora": {"r": 2, "bias": "all"}}, marks=pytest.mark.slow)],
    ids=str,
)
def test_dpo(model: Artifact, tmp_path: Path, options: Mapping[str, Any]) -> None:
    """The policy is its own reference before step 1, images included: ln 2, or the stage would refuse."""
    given = context(
        tmp_path,
        "train.dpo",
        model,
        dpo_rows(tmp_path / "data"),
        "preference",
        max_steps=3,
        batch_size=8,
        **options,
    )
    train(given)
    assert given.losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert given.losses[-1] < given.losses[0]
    before, after = weights(model.path), whole_weights(given, model)
    assert all(torch.equal(before[name], after[name]) for name in seeing(before))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def whole_weights(given: FakeContext, base: Artifact) -> Mapping[str, torch.Tensor]:
    """The weights of what was trained, by their names in a file; an adapter is merged for it."""
    trained = given.result("model")
    if trained.kind is Kind.MODEL:
        return weights(trained.path)
    given.known[base.digest] = base
    merged(open_policy(trained, given).model).save_pretrained(given.directory / "merged")
    return weights(given.directory / "merged")


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 2, "target_modules": "all-linear"}}], ids=str)
def test_a_projector_is_trained_by_name(model: Artifact, tmp_path: Path, options: Mapping[str, Any]) -> None:
    projector = of(model, PROJECTOR)
    given = context(
        tmp_path,
        "train.sft",
        model,
        sft_rows(tmp_path / "data"),
        "prompt_completion",
        max_steps=2,
        unfreeze=projector,
        **options,
    )
    train(given)
    before, after = weights(model.path), whole_weights(given, model)
    moved = [name for name in seeing(before) if not torch.equal(before[name], after[name])]
    assert moved and all(any(f".{name}." in f".{each}" for name in projector) for each in moved)


def test_an_adapter_goes_to_the_language_part(model: Artifact, tmp_path: Path) -> None:
    """Also where its modules are called like those of the tower, and with others that get none."""
    policy = open_policy(model, FakeContext(tmp_path, None, None, {"model": [model]}))
    lora = Lora(r=2, target_modules=["q_proj", "k_proj", "v_proj"], exclude_modules=["k_proj"])
    adapted = with_adapter(policy.model, lora, vision=Vision.of(policy.model)).model
    placed = {name.partition(".lora_")[0] for name, each in adapted.named_parameters() if each.requires_grad}
    assert not seeing(placed)
    assert {name.rpartition(".")[2] for name in placed} == {"q_proj", "v_proj"}


def test_names_of_what_does_not_see_are_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "llava")
    model = as_artifact(directory, facts_of(directory))
    given = context(
        tmp_path,
        "train.sft",
        model,
        sft_rows(tmp_path / "data"),
        "prompt_completion",
        max_steps=1,
        unfreeze=["language_model"],
    )
    with pytest.raises(StageError, match="`language_model` in unfreeze names no module that sees"):
        train(given)


@pytest.mark.parametrize(
    ("kind", "sees", "unfreeze", "level", "said"),
    [
        (Kind.MODEL, True, [], Level.NOTE, "stays frozen"),
        (Kind.MODEL, False, ["visual"], Level.ERROR, "takes no images"),
        (Kind.ADAPTER, True, ["visual"], Level.ERROR, "trained where it already is"),
        (Kind.MODEL, True, ["visual"], None, ""),
        (Kind.MODEL, None, ["visual"], None, ""),
        (Kind.MODEL, False, [], None, ""),
    ],
)
def test_a_plan_says_what_stays_frozen(
    kind: Kind, sees: bool | None, unfreeze: list[str], level: Level | None, said: str
) -> None:
    stage = catalogue().stage("train.sft")
    inputs = {
        "model": [Input("base.model", kind, PolicyFacts(sees=sees))],
        "data": [Input("rows.data", Kind.DATASET, DatasetFacts())],
    }
    found = list(stage.check(configured(stage, unfreeze=unfreeze), inputs))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all(said in finding.message for finding in found)


def test_lora(model: Artifact, tmp_path: Path) -> None:
    given = context(
        tmp_path,
        "train.sft",
        model,
        sft_rows(tmp_path / "data"),
        "prompt_completion",
        max_steps=2,
        lora={"r": 2},
    )
    train(given)
    for name in PROCESSOR_FILES:
        assert (given.output("model") / name).is_file()
    given.known[model.digest] = model
    opened = open_policy(given.result("model"), given)
    assert opened.base is not None and opened.encoder.expansion is not None
