"""Rows that would teach something wrong: each is refused or counted by its name, before any step, by every trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.training import ROWS

from posttrain.artifacts.kinds import Kind, PolicyFacts
from posttrain.contracts.loss import Family, Need
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Input
from posttrain.contracts.trainer import Trainer
from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.judging.labels import LABELLED
from posttrain_plugins.data.judging.validation import inspect
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.data.validate import ValidateConfig, checks_of
from posttrain_plugins.preparation import accounts
from posttrain_plugins.preparation.examples import NO_WORD, Prepared, prepare
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.testing.models import char_tokenizer

Row = Mapping[str, Any]
NAN = float("nan")
COUNT, BAD = 6, 3
"""So many rows, and which of them is spoilt, from 0."""
TEXTS = ("text", "completion", "chosen", "rejected", "gold")
MARGINED = ("preference", "scored", "ranked")


def faults(format: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield what may be wrong with a row of a format: its name, the columns that are, and what must be said."""
    row = ROWS[format](COUNT)[BAD]
    if "chosen" in row:
        yield "identical", {"rejected": row["chosen"]}, "chosen and rejected are the same"
    if "gold" in row:
        yield "the worst is gold", {"gold": row["rejected"]}, "gold and rejected are the same"
    for column in TEXTS:
        if column in row:
            yield f"empty {column}", {column: " "}, f"`{column}` is empty"
    if "completions" in row:
        yield "an empty one", {"completions": [row["completions"][0], ""]}, "2 is empty"
    if "messages" in row:
        turns = [*row["messages"][:-1], {"role": "assistant", "content": ""}]
        yield "an empty turn", {"messages": turns}, NO_WORD
    for value in (NAN, "1", None, -1.0) if format in MARGINED else ():
        yield f"margin {value}", {"margin": value}, "`margin` is"
    for value in (NAN, "1", None, True) if "score" in row else ():
        yield f"score {value}", {"score": value}, "`score` is"
    for value in (NAN, "1", None) if "scores" in row else ():
        yield f"scores {value}", {"scores": [value, *row["scores"][1:]]}, "`scores` entry 1 is"
    for value in (0, 1, "true", "0", None) if "label" in row else ():
        yield f"label {value!r}", {"label": value}, "`label` is"
    for value in (NAN, "true", None, 2, -0.5) if "labels" in row else ():
        yield f"labels {value}", {"labels": [value, *row["labels"][1:]]}, "`labels` entry 1 is"
    for value in ([], [True], None) if "labels" in row else ():
        yield f"labels are {value}", {"completions": ["a", "b"], "labels": value}, "`labels`"


CASES = [
    pytest.param(uses, format, columns, told, id=f"{uses}-{format}-{name}")
    for uses in catalogue().names(Group.TRAINER)
    for format in sorted(catalogue().stage(uses).formats & ROWS.keys())
    for name, columns, told in faults(format)
    if "margin" not in columns or catalogue().stage(uses).family is Family.REWARD
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    directory = tmp_path_factory.mktemp("tokenizer")
    char_tokenizer(directory)
    return Encoder.open(directory)


def prepared(
    trainer: Trainer, encoder: Any, rows: Sequence[Row], format: str, column: str | None = None
) -> Prepared:
    form, config = format_of(format), configured(trainer)
    needs = frozenset({Need.MARGIN}) if trainer.family is Family.REWARD else frozenset[Need]()
    return prepare(
        trainer,
        trainer.rows(rows, form, needs, 0),
        encoder,
        form,
        max_length=None,
        truncation="error",
        weight_column=column,
        supervise=trainer.supervise(config),
        needs=needs,
    )


def spoilt(format: str, columns: Mapping[str, Any]) -> list[Row]:
    good = {"margin": 0.5} if "margin" in columns else {}
    rows: list[Row] = [{**row, **good} for row in ROWS[format](COUNT)]
    rows[BAD] = {**rows[BAD], **columns}
    return rows


@pytest.mark.parametrize(("uses", "format", "columns", "told"), CASES)
def test_every_trainer_names_what_is_wrong_before_it_starts(
    encoder: Encoder, uses: str, format: str, columns: Mapping[str, Any], told: str
) -> None:
    rows, trainer = spoilt(format, columns), catalogue().stage(uses)
    problem = format_of(format).problem(rows[BAD])
    if problem is not None:
        assert told in problem
        return
    if "margin" in columns:
        with pytest.raises(DataError) as caught:
            prepared(trainer, encoder, rows, format)
        assert told in caught.value.message
        return
    made = prepared(trainer, encoder, rows, format)
    reasons = [*made.reasons, *(text for _, text in made.notes)]
    assert any("1 row(s)" in text and told in text and "row 4" in text for text in reasons), reasons


@pytest.mark.parametrize(("uses", "format", "columns", "told"), CASES)
def test_looking_at_the_data_says_the_same(
    uses: str, format: str, columns: Mapping[str, Any], told: str
) -> None:
    """What training refuses or counts, `posttrain data validate` must not let pass."""
    rows = [(f"row {number}", row) for number, row in enumerate(spoilt(format, columns), 1)]
    found = inspect(rows, format_of(format), format, checks_of(ValidateConfig()))
    assert any(place == "row 4" for problem in found.problems for place, _ in problem.examples)


NUMBERS = [
    case for case in CASES
    if {"margin", "score", "scores", "label", "labels"} & set(case.values[2])  # type: ignore[call-overload]
]  # fmt: skip


@pytest.mark.parametrize(("uses", "format", "columns", "told"), NUMBERS)
def test_numbers_that_nobody_judged_are_judged_by_the_trainer(
    encoder: Encoder, uses: str, format: str, columns: Mapping[str, Any], told: str
) -> None:
    """Rows that a plugin's stage made may never have met the format: the trainer says the same of them."""
    with pytest.raises(DataError) as caught:
        prepared(catalogue().stage(uses), encoder, spoilt(format, columns), format)
    assert told in caught.value.message and caught.value.where == "row 4"


WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "negative": {"weight": -1.0},
    "NaN": {"weight": NAN},
    "text": {"weight": "1"},
    "null": {"weight": None},
    "true": {"weight": True},
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("uses", catalogue().names(Group.TRAINER))
def test_weights_that_are_none_are_refused_by_row_and_column(encoder: Encoder, uses: str, kind: str) -> None:
    trainer = catalogue().stage(uses)
    for format in sorted(trainer.formats & ROWS.keys()):
        rows = [{**row, "weight": 1} for row in ROWS[format](COUNT)]
        bad = [*rows[:3], {**rows[3], **WEIGHTS[kind]}, *rows[4:]]
        with pytest.raises(DataError, match="weight column `weight` is") as caught:
            prepared(trainer, encoder, bad, format, "weight")
        assert caught.value.where == "row 4"
        entries = [(f"row {number}", row) for number, row in enumerate(bad, 1)]
        checks = checks_of(ValidateConfig(weight_column="weight"))
        (problem,) = [
            each
            for each in inspect(entries, format_of(format), format, checks).problems
            if each.code == "weights"
        ]
        assert (problem.count, problem.level.value, problem.examples[0][0]) == (1, "error", "row 4")


@pytest.mark.parametrize("uses", [*catalogue().names(Group.TRAINER), "data.tokenize"])
def test_weights_that_are_none_are_found_while_planning(tmp_path: Path, uses: str) -> None:
    stage = catalogue().stage(uses)
    port = next(port for port in stage.inputs if port.name == "data")
    for format in sorted(port.formats & ROWS.keys()):
        rows = [{**row, "weight": -number} for number, row in enumerate(ROWS[format](COUNT))]
        (directory := tmp_path / format).mkdir()
        given = {
            "model": (Input("base.model", Kind.MODEL, PolicyFacts(architecture="none")),),
            "data": (Input("rows.data", Kind.DATASET, write_rows(directory, rows, format)),),
        }
        found = {
            column: [each.message for each in stage.check(configured(stage, weight_column=column), given)]
            for column in (None, "weight")
        }
        told = f"{COUNT - 1} rows of rows.data have a `weight` that is no finite number of at least 0"
        assert told in found["weight"] and told not in found[None]


@pytest.mark.parametrize("label", [True, False])
@pytest.mark.parametrize("uses", catalogue().names(Group.TRAINER))
def test_labels_of_one_class_are_told_with_their_number(encoder: Encoder, uses: str, label: bool) -> None:
    trainer = catalogue().stage(uses)
    for format in sorted(trainer.formats & LABELLED.keys()):
        column = "labels" if "labels" in format_of(format).columns else "label"
        rows = [
            {**row, column: [label] * len(row["labels"]) if column == "labels" else label}
            for row in ROWS[format](COUNT)
        ]
        count = sum(len(row["labels"]) if column == "labels" else 1 for row in rows)
        told = trainer.remarks(prepared(trainer, encoder, rows, format).examples)
        assert any(f"labels of one class only: {count} of {count} " in text for text in told), told
        assert not any("one class" in text for text in trainer.remarks(
            prepared(trainer, encoder, ROWS[format](COUNT), format).examples))  # fmt: skip
        entries = [(f"row {number}", row) for number, row in enumerate(rows, 1)]
        codes = {each.code for each in inspect(entries, format_of(format), format, {}).problems}
        assert "one-class" in codes


class Moody:
    """An encoder whose template refuses some rows."""

    bos_id = None

    def __init__(self, encoder: Encoder, refuses: Callable[[str], str | None]) -> None:
        self.inner, self.refuses = encoder, refuses

    def encode(self, passages: Sequence[Any]) -> list[Any]:
        return [
            DataError("the chat template refuses the row", found=why, fix="mend it")
            if (why := self.refuses(passage.prompt))
            else self.inner.encode([passage])[0]
            for passage in passages
        ]


def test_rows_that_a_template_refuses_are_counted_and_told_at_once(encoder: Encoder) -> None:
    rows = [{**row, "weight": 1.0} for row in ROWS["prompt_completion"](600)]
    rows[7]["weight"] = -1.0
    moody = Moody(encoder, lambda prompt: prompt if prompt.endswith("3:") else None)
    with pytest.raises(DataError) as caught:
        prepared(catalogue().stage("train.sft"), moody, rows, "prompt_completion", "weight")
    assert caught.value.message == "61 of 600 rows cannot be used"
    assert caught.value.fix == "mend it"
    found = str(caught.value.found)
    assert "60 row(s): the chat template refuses the row, such as say 3: (rows 4, 14, 24, 34, 44, …)" in found
    assert "1 row(s): the weight column `weight` is -1.0; a weight is at least 0 (row 8)" in found


def test_very_many_kinds_of_refusals_take_little_room() -> None:
    whole = accounts.Account()
    for part in range(40):
        account = accounts.Account(rows=100)
        for number in range(100):
            index = part * 100 + number
            account.refused.add(index, DataError(f"the row holds {index}" * 9))
        whole.take(account)
    assert len(whole.refused.errors) <= accounts.KINDS + 1
    with pytest.raises(DataError, match="4000 of 4000 rows cannot be used") as caught:
        whole.refused.check(whole.rows)
    assert len(str(caught.value)) < 2000


def test_one_refused_row_keeps_its_own_error() -> None:
    account = accounts.Account()
    account.refused.add(6, DataError("it is odd", where="message 2", found="x", fix="mend it"))
    with pytest.raises(DataError, match="it is odd") as caught:
        account.refused.check(9)
    assert (caught.value.where, caught.value.found, caught.value.fix) == ("row 7, message 2", "x", "mend it")
