"""Process reward models against trl 1.13.0, whose numbers `generate_prm.py` has written down.

Same model, head, rows, order and options; the differences are those of docs/parity-losses.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.prm_runs import CASES, rows, start
from helpers.tokenizers_of_all_kinds import write
from helpers.training import Context, context_for, dataset_artifact, train, weights
from helpers.trl_runs import RATE, SHARED, STEPS, tokenizer

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.trainer import Example
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.trainers.prm import Prm, PrmOptions

RUNS = json.loads(Path(__file__).with_name("prm_of_trl.json").read_text(encoding="utf-8"))["runs"]
IGNORED = -100

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return start(tmp_path_factory.mktemp("model"))


def examples(encoder: Encoder, data: list[dict[str, Any]], **options: Any) -> list[Example]:
    config = PrmOptions(**options)
    return prepare(
        Prm(),
        data,
        encoder,
        format_of("stepwise"),
        max_length=config.max_length,
        truncation=config.truncation,
        weight_column=None,
        supervise=Prm().supervise(config),
    ).examples


def labels_of(example: Example) -> list[int]:
    (sequence,) = example.sequences
    said = iter(example.verdicts)
    found = [int(next(said)) if asked else IGNORED for asked in sequence.supervised]
    assert next(said, None) is None
    return found


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_labels(case: str, model: Artifact) -> None:
    found = examples(Encoder.open(model.path), rows(), **CASES[case])
    assert [list(each.sequences[0].tokens) for each in found] == RUNS[case]["tokens"]
    assert [labels_of(each) for each in found] == RUNS[case]["labels"]


@pytest.mark.parametrize("kind", ["byte-level", "word-piece"])
def test_tokens_of_other_tokenizers(kind: str, tmp_path: Path) -> None:
    """trl's own way, put together here: prompt, steps and separators tokenized apart, a BOS before all."""
    directory = write(tmp_path, kind, "", (), eos="</s>")
    encoder, theirs = Encoder.open(directory), tokenizer(Artifact("", None, directory))  # type: ignore[arg-type]
    data = [
        {
            "prompt": "The quick brown fox?\n",
            "completions": ["It said:", "look it up!", "да"],
            "labels": [1, 0, 1],
        },
        {"prompt": "user:", "completions": ["jumps over"], "labels": [True]},
    ]
    for row, each in zip(data, examples(encoder, data), strict=True):
        separator = theirs.encode("\n", add_special_tokens=False)
        steps = [theirs.encode(step, add_special_tokens=False) + separator for step in row["completions"]]
        prompt = [theirs.bos_token_id, *theirs.encode(row["prompt"], add_special_tokens=False)]
        assert list(each.sequences[0].tokens) == [*prompt, *(token for step in steps for token in step)]
        wanted = [IGNORED] * len(prompt)
        for step, label in zip(steps, row["labels"], strict=True):
            wanted += [IGNORED] * (len(step) - 1) + [int(label)]
        assert labels_of(each) == wanted


def run(directory: Path, model: Artifact, **options: Any) -> Context:
    given = {
        **SHARED,
        "learning_rate": RATE.get("train.prm", 1e-3),
        "batch_size": 4,
        "shuffle": False,
        **options,
    }
    context = context_for(directory, "train.prm", model, rows(), "stepwise", micro_batch_tokens=100, **given)
    context.inputs = {**context.inputs, "eval": [dataset_artifact(directory / "eval", rows(), "stepwise")]}
    train(context)
    return context


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(case: str, model: Artifact, tmp_path: Path) -> None:
    expected = RUNS[case]
    context = run(tmp_path, model, eval_steps=STEPS, **CASES[case])
    assert len(expected["losses"]) == STEPS
    assert context.losses == pytest.approx(expected["losses"], abs=1e-5)
    last = context.seen_metrics[STEPS]
    assert [last["eval/loss"], last["eval/accuracy"]] == pytest.approx(expected["end"], abs=1e-5)
    for name, tensor in weights(tmp_path / "out-model").items():
        assert tensor.abs().sum().item() == pytest.approx(expected["weights"][name], rel=1e-4, abs=1e-4)


def test_training_changed_something() -> None:
    for expected in RUNS.values():
        assert expected["end"][0] < expected["start"][0] - 0.05
