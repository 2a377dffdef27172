from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.stepping import assert_same, encoder, gradient, stepper
from helpers.training import (
    Context,
    context_for,
    model_artifact,
    train,
    unpaired_rows,
)

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.loss import Loss, LossOutput, Need, Scope, Term, UnpairedBatch
from posttrain.contracts.reduction import EXAMPLE_MEAN
from posttrain.errors import DataError
from posttrain_plugins.data import formats
from posttrain_plugins.losses.unpaired.kto import Kto as KtoLoss
from posttrain_plugins.preparation.examples import Prepared, prepare
from posttrain_plugins.preparation.mismatched import COLUMN, with_mismatched

FORMAT = formats.format_of("unpaired_preference")
TRAINER = catalogue().stage("train.kto")


def rows_of(count: int, prompts: int | None = None, answers: int | None = None) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"q{i % (prompts or count)}",
            "completion": f"a{i % (answers or count)}",
            "label": i % 2 == 0,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_every_answer_is_given_to_another_row_once(count: int):
    rows = rows_of(count)
    given = with_mismatched(rows, seed=3)
    assert [row[COLUMN] for row in given] != [row["completion"] for row in rows]
    assert all(row[COLUMN] != row["completion"] for row in given)
    assert Counter(row[COLUMN] for row in given) == Counter(row["completion"] for row in rows)
    assert [{name: value for name, value in row.items() if name != COLUMN} for row in given] == rows


def test_the_seed_decides_who_is_given_what():
    rows = rows_of(20)
    assert with_mismatched(rows, 1) == with_mismatched(rows, 1) != with_mismatched(rows, 2)


@pytest.mark.parametrize(
    ("prompts", "answers"), [(20, 40), (40, 20), (2, 40), (40, 2), (3, 4), (20, 20)], ids=str
)
def test_neither_ones_own_prompt_nor_ones_own_answer(prompts: int, answers: int):
    rows = rows_of(40, prompts, answers)
    asked: dict[str, set[str]] = {}
    for row in rows:
        asked.setdefault(row["completion"], set()).add(row["prompt"])
    for row in with_mismatched(rows, seed=0):
        assert row[COLUMN] != row["completion"]
        assert asked[row[COLUMN]] - {row["prompt"]}, "it answers another prompt"


def test_most_rows_may_say_the_same():
    rows = [{"prompt": f"q{i}", "completion": "no" if i == 7 else "yes", "label": True} for i in range(50)]
    given = with_mismatched(rows, seed=0)
    assert [row[COLUMN] for row in given] == ["yes" if i == 7 else "no" for i in range(50)]


def test_a_single_prompt_still_has_other_answers():
    given = with_mismatched(rows_of(9, prompts=1), seed=0)
    assert all(row[COLUMN] != row["completion"] for row in given)


def test_messages_are_told_apart_by_what_they_say():
    rows = [
        {"prompt": f"q{i}", "completion": [{"role": "assistant", "content": f"a{i % 2}"}], "label": True}
        for i in range(6)
    ]
    assert all(row[COLUMN] != row["completion"] for row in with_mismatched(rows, seed=0))


@pytest.mark.parametrize(
    "rows", [rows_of(5, answers=1), rows_of(1), []], ids=["one answer", "one row", "none"]
)
def test_where_there_is_no_other_answer_rows_stay_as_they_are(rows: list[dict[str, Any]]):
    assert list(with_mismatched(rows, seed=0)) == rows


def prepared(rows: list[dict[str, Any]], needs: frozenset[Need] = KtoLoss.needs, **options: Any) -> Prepared:
    chosen = {"max_length": None, "truncation": "keep_start", "weight_column": None, **options}
    return prepare(TRAINER, TRAINER.rows(rows, FORMAT, needs, 0), encoder(), FORMAT, **chosen)


def test_answers_of_other_rows_follow_the_same_prompt():
    for example in prepared(unpaired_rows(6)).examples:
        own, other = example.sequences
        assert (own.role, other.role, own.measured, other.measured) == (
            "completion",
            "mismatched",
            False,
            True,
        )
        first = list(own.supervised).index(True)
        assert list(own.tokens[:first]) == list(other.tokens[:first])
        assert example.prefix >= first
        assert example.learned.sequences == (own,) and example.measured.sequences == (other,)
        assert example.verdicts == (float(example.row % 3 > 0),)


def test_a_loss_that_does_not_ask_gets_no_answers_of_other_rows():
    (width,) = {len(each.sequences) for each in prepared(unpaired_rows(6), frozenset()).examples}
    assert width == 1


LONG = {"prompt": "0123456789", "completion": "x" * 30, "label": True}
SHORT = {"prompt": "9876543210", "completion": "yes", "label": False}


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "drop", "error"])
def test_another_rows_answer_decides_nothing(truncation: str):
    alone = prepared([SHORT], frozenset(), max_length=25, truncation=truncation).examples[0]
    rows = [{**SHORT, COLUMN: LONG["completion"]}]
    both = prepared(rows, frozenset(), max_length=25, truncation=truncation)
    (example,) = both.examples
    assert list(example.sequences[0].tokens) == list(alone.sequences[0].tokens)
    assert len(example.sequences[1].tokens) == 25
    assert (both.truncated, both.lost) == (0, 0)


def test_another_rows_answer_loses_the_same_of_its_prompt():
    rows = [{**LONG, COLUMN: "no"}]
    (example,) = prepared(rows, frozenset(), max_length=35, truncation="keep_end").examples
    own, other = example.sequences
    start = list(own.supervised).index(True)
    assert len(own.tokens) == 35 and list(own.tokens[:start]) == list(other.tokens[:start])
    assert list(other.supervised).index(True) == start


def test_an_answer_that_is_the_same_once_shortened_drops_no_row():
    rows = [{**LONG, COLUMN: "x" * 40}]
    (example,) = prepared(rows, frozenset(), max_length=20).examples
    assert list(example.sequences[0].tokens) == list(example.sequences[1].tokens)


def test_a_label_that_is_no_boolean_names_its_row():
    with pytest.raises(DataError, match="label") as caught:
        prepared([*unpaired_rows(2), {"prompt": "q", "completion": "a", "label": 1}])
    assert caught.value.where == "row 3"


class Together(KtoLoss):
    """The same loss where nothing is measured apart: as a function of the whole step."""

    scope = Scope.STEP


@pytest.mark.parametrize("tokens", [1, 70, 10_000])
def test_measuring_apart_is_exact(tokens: int):
    rows = [replace(each, weight=0.5 + each.row % 2) for each in prepared(unpaired_rows(7)).examples]
    apart, together = (
        stepper("train.kto", "kto", tokens),
        stepper("train.kto", "kto", tokens, plugin=Together()),
    )
    loss, metrics, found = gradient(apart, rows)
    expected_loss, expected_metrics, expected = gradient(together, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
    assert metrics["kl"] > 1
    assert_same(found, expected)


class Watching(Loss):
    """Says what it is shown."""

    family = KtoLoss.family
    needs = KtoLoss.needs

    def __init__(self) -> None:
        self.seen: list[UnpairedBatch] = []
        self.measured: list[UnpairedBatch] = []

    def measure(self, batch: UnpairedBatch, config: Any, state: Any) -> Any:
        self.measured.append(batch)
        return {}

    def __call__(self, batch: UnpairedBatch, config: Any, stats: Any, state: Any) -> LossOutput:
        self.seen.append(batch)
        return LossOutput([Term(-batch.logp, EXAMPLE_MEAN)])


def test_each_pass_scores_what_it_is_for():
    watching = Watching()
    made = stepper("train.kto", "kto", 60, plugin=watching)
    rows = prepared(unpaired_rows(7)).examples
    result = made.backward(rows)
    assert len(watching.seen) > 1 and len(watching.measured) > 1
    assert all(each.mismatched.isnan().all() and each.logp.requires_grad for each in watching.seen)
    for each in watching.measured:
        assert each.logp.isnan().all() and not each.mismatched.requires_grad
        assert each.mismatched.isfinite().all() and (each.reference_mismatched < 0).all()
    assert sum(len(each.logp) for each in watching.measured) == 7
    assert result.tokens == sum(each.size for each in rows)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_without_answers_of_other_rows_each_is_scored_once(loss: str):
    made = stepper("train.kto", loss, 60)
    rows = prepared(unpaired_rows(7), frozenset()).examples
    forwards: list[int] = []
    hook = made.model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: forwards.append(given[0].shape[0])
    )
    made.backward(rows)
    hook.remove()
    assert len(forwards) > 1 and sum(forwards) == 7


def test_rows_that_predict_nothing_of_another_answer_are_left_out_of_the_estimate():
    rows = prepared(unpaired_rows(4)).examples
    own, other = rows[0].sequences
    blind = replace(rows[0], sequences=(own, replace(other, supervised=bytes(len(other.tokens)))))
    watching = Watching()
    stepper("train.kto", "kto", plugin=watching).backward([blind, *rows[1:]])
    assert [len(each.logp) for each in watching.measured] == [3]
    together = stepper("train.kto", "kto", plugin=Together()).backward([blind, *rows[1:]])
    assert together.metrics == pytest.approx(
        stepper("train.kto", "kto").backward([blind, *rows[1:]]).metrics, rel=1e-5
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


def trained(directory: Path, model: Artifact, rows: list[dict[str, Any]], **options: Any) -> Context:
    context = context_for(directory, "train.kto", model, rows, "unpaired_preference", max_steps=3, **options)
    train(context)
    return context


def test_the_first_step_is_at_one_half_and_good_answers_rise(tmp_path: Path, model: Artifact):
    context = trained(tmp_path, model, unpaired_rows(12), batch_size=12)
    first, *_, last = (values for _, values in sorted(context.seen_metrics.items()))
    assert first["loss"] == pytest.approx(0.5, abs=1e-5)
    assert first["kl"] == pytest.approx(0.0, abs=1e-4)
    assert last["rewards/chosen"] > last["rewards/rejected"]
    assert last["loss"] < 0.5


@pytest.mark.parametrize("label", [True, False])
def test_a_step_of_one_row_and_labels_of_one_class(tmp_path: Path, model: Artifact, label: bool):
    rows = [{**row, "label": label} for row in unpaired_rows(4)]
    context = trained(tmp_path, model, rows, batch_size=1, shuffle=True)
    assert len(context.losses) == 3
    absent, present = ("rejected", "chosen") if label else ("chosen", "rejected")
    last = max(context.seen_metrics.items())[1]
    assert f"rewards/{present}" in last and f"rewards/{absent}" not in last
    assert any("one class only: 4 of 4 completions are" in text for text in context.warnings)


def test_one_answer_to_every_prompt_has_no_divergence_and_is_told(tmp_path: Path, model: Artifact):
    rows = [{**row, "completion": "yes"} for row in unpaired_rows(4)]
    context = trained(tmp_path, model, rows, batch_size=2)
    assert all(values["kl"] == 0 for values in context.seen_metrics.values() if "kl" in values)
    assert any("all rows have the same answer" in text for text in context.warnings)


def test_options():
    config = configured(TRAINER)
    assert (config.learning_rate, config.loss.name) == (1e-6, "kto")
    assert (
        configured(TRAINER, loss={"name": "kto", "desirable_weight": 1.33}).loss.options["desirable_weight"]
        == 1.33
    )
    with pytest.raises(Exception, match="dropout"):
        configured(TRAINER, lora={"dropout": 0.1})
    with pytest.raises(Exception, match="family"):
        configured(TRAINER, loss="sigmoid")


def test_a_row_is_not_blamed_for_the_answer_of_another_one():
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{at}"}],
            "completion": [{"role": "user" if at == 1 else "assistant", "content": f"a{at}"}],
            "label": bool(at % 2),
        }
        for at in range(4)
    ]
    alone, beside = (
        prepare(
            TRAINER,
            TRAINER.rows(rows, FORMAT, needs, seed=0),
            encoder(),
            FORMAT,
            max_length=None,
            truncation="error",
            weight_column=None,
        )
        for needs in (frozenset[Need](), frozenset({Need.MISMATCHED}))
    )
    assert alone.reasons == beside.reasons == ["1 row(s) dropped: no assistant turn (row 2)"]
    assert alone.notes == beside.notes
    assert [each.row for each in beside.examples] == [0, 2, 3]
    assert all(each.measured is not None for each in beside.examples)
