from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from helpers.training import ROWS, context_for, dataset_artifact, model_artifact, train, weights

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts, TokenFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import load_target
from posttrain.contracts.stage import Input, Level, Outcome
from posttrain.errors import DataError, Interrupted
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.tokens.token_rows import TokenRows
from posttrain_plugins.data.tokens.tokenizing import ahead, tokenizer_threads
from posttrain_plugins.preparation.examples import CHUNK, prepare, prepare_tokens
from posttrain_plugins.templates.encoder import Encoder

LONGEST = {"text": 30, "messages": 30, "prompt_completion": 16, "preference": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model") / "model")


def tokenized(
    directory: Path, model: Artifact, rows: Sequence[Mapping[str, Any]], format: str, **options: Any
) -> tuple[Artifact, Outcome, FakeContext]:
    data = dataset_artifact(directory / "data", rows, format)
    stage = catalogue().stage("data.tokenize")
    context = FakeContext(directory, stage, configured(stage, **options), {"data": [data], "model": [model]})
    outcome = load_target(stage.target)(context)
    return context.result("data"), outcome, context


def plain(examples: Sequence[Any]) -> list[Any]:
    return [
        (e.weight, [(s.role, list(s.tokens), [bool(c) for c in s.supervised]) for s in e.sequences])
        for e in examples
    ]


@pytest.mark.parametrize("format", LONGEST)
@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "drop"])
def test_tokens_are_what_a_trainer_would_make_of_the_rows(
    tmp_path: Path, model: Artifact, format: str, truncation: str
):
    rows = [{**row, "w": 0.5 + number} for number, row in enumerate(ROWS[format](12))]
    options = {"max_length": LONGEST[format], "truncation": truncation, "weight_column": "w"}
    made, outcome, context = tokenized(tmp_path, model, rows, format, **options)
    trainer = catalogue().stage("train.dpo" if format == "preference" else "train.sft")
    encoder = Encoder.open(model.path)
    direct = prepare(trainer, rows, encoder, format_of(format), **options)
    assert direct.truncated or direct.dropped, "the length must matter"
    found = prepare_tokens(TokenRows(made.path), max_length=None, truncation="error", bos=None)
    assert plain(found.examples) == plain(direct.examples)
    assert found.packs is None
    assert outcome.figures["rows"] == len(direct.examples)
    assert outcome.figures["rows_dropped"] == direct.dropped.total()
    assert {text for _, text in direct.notes} <= set(context.notes)


def test_facts_name_what_the_tokens_were_made_with(tmp_path: Path, model: Artifact):
    made, outcome, _ = tokenized(tmp_path, model, ROWS["messages"](3), "messages", max_length=90)
    facts: DatasetFacts = made.facts
    assert (facts.format, facts.rows, facts.conversational) == ("tokens", 3, False)
    assert facts.tokens == TokenFacts(
        tokenizer=model.facts.tokenizer,
        template=model.facts.template.tokens,
        max_length=90,
        packed=False,
    )
    stage = catalogue().stage("data.tokenize")
    inputs = {
        "data": [Input("rows.data", Kind.DATASET, DatasetFacts(format="messages"))],
        "model": [Input("base.model", Kind.MODEL, model.facts)],
    }
    predicted = stage.predict(configured(stage, max_length=90), inputs)["data"].facts
    assert predicted == facts.model_copy(update={"rows": None})
    assert outcome.summary.startswith("3 rows, ")


def test_the_same_rows_give_the_same_file(tmp_path: Path, model: Artifact):
    one, other = (
        tokenized(tmp_path / name, model, ROWS["text"](20), "text")[0].path / "tokens.arrow" for name in "ab"
    )
    assert one.read_bytes() == other.read_bytes()


def test_every_row_keeps_its_prompt_and_its_number(tmp_path: Path, model: Artifact):
    rows = [{"prompt": f"{n}", "completion": "x" * (50 if n % 7 == 3 else 2)} for n in range(CHUNK + 40)]
    made, outcome, _ = tokenized(tmp_path, model, rows, "prompt_completion", max_length=30, truncation="drop")
    kept = [n for n in range(len(rows)) if n % 7 != 3]
    source = (tmp_path / "data" / "prompts.txt").read_text().splitlines()
    assert (made.path / "prompts.txt").read_text().splitlines() == [source[n] for n in kept]
    assert [row for batch in TokenRows(made.path).batches for row in batch.rows.tolist()] == kept
    assert outcome.figures["rows_dropped"] == len(rows) - len(kept)


def test_what_was_shortened_is_told(tmp_path: Path, model: Artifact):
    rows = [{"prompt": "ask", "completion": "x" * 40}, {"prompt": "ask", "completion": "y"}]
    *_, context = tokenized(tmp_path, model, rows, "prompt_completion", max_length=20)
    ((level, text),) = context.said
    assert (level, text.split(", ")[0]) == (
        Level.WARNING,
        "1 row(s) (50.00%) shortened to the longest length",
    )


def test_supervise_decides_what_is_learned(tmp_path: Path, model: Artifact):
    turns = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)
    ]
    counts = {}
    for name in ("answers", "last_answer", "everything"):
        _, outcome, _ = tokenized(tmp_path / name, model, [{"messages": turns}], "messages", supervise=name)
        counts[name] = outcome.figures["supervised"]
    assert counts["answers"] == 2 * counts["last_answer"]
    assert counts["everything"] == outcome.figures["tokens"] - 1


def test_rows_that_are_refused_are_counted_over_all_parts(tmp_path: Path, model: Artifact):
    bad = {3, CHUNK + 5, CHUNK + 6}
    rows = [{"text": "ab", "w": -1 if n in bad else 1, "n": n} for n in range(CHUNK + 20)]
    with pytest.raises(DataError, match=f"3 of {len(rows)} rows cannot be used") as caught:
        tokenized(tmp_path, model, rows, "text", weight_column="w")
    told = f"`w` is -1; a weight is at least 0 (rows 4, {CHUNK + 6}, {CHUNK + 7})"
    assert f"3 row(s): the weight column {told}" in str(caught.value.found)


def test_rows_that_cannot_be_learned_from_are_an_error(tmp_path: Path, model: Artifact):
    with pytest.raises(DataError, match="no row of the dataset can be trained on"):
        tokenized(
            tmp_path, model, [{"prompt": "x" * 50, "completion": "a"}], "prompt_completion", max_length=9
        )


def test_it_stops_when_asked(tmp_path: Path, model: Artifact):
    data = dataset_artifact(tmp_path / "data", ROWS["text"](5), "text")
    stage = catalogue().stage("data.tokenize")
    context = FakeContext(tmp_path, stage, configured(stage), {"data": [data], "model": [model]})
    context.stop = True
    with pytest.raises(Interrupted):
        load_target(stage.target)(context)


TRAINED = {"max_steps": 3, "batch_size": 3, "seed": 5, "learning_rate": 1e-2}


@pytest.mark.parametrize(("uses", "format"), [("train.sft", "messages"), ("train.dpo", "preference")])
def test_training_on_tokens_is_training_on_rows(tmp_path: Path, model: Artifact, uses: str, format: str):
    rows = ROWS[format](8)
    made, *_ = tokenized(tmp_path / "tokens", model, rows, format)
    direct = context_for(tmp_path / "direct", uses, model, rows, format, **TRAINED)
    train(direct)
    stage = catalogue().stage(uses)
    config = configured(stage, logging_steps=1, **TRAINED)
    ahead = FakeContext(tmp_path / "ahead", stage, config, {"model": [model], "data": [made]})
    train(ahead)
    assert ahead.losses == direct.losses
    one, other = weights(direct.output("model")), weights(ahead.output("model"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, model: Artifact):
    made, *_ = tokenized(tmp_path / "tokens", model, ROWS["text"](4), "text")
    facts = made.facts.model_copy(update={"tokens": TokenFacts(tokenizer="another")})
    stage = catalogue().stage("train.sft")
    data = as_artifact(made.path, facts, Kind.DATASET)
    context = FakeContext(tmp_path, stage, configured(stage, max_steps=1), {"model": [model], "data": [data]})
    with pytest.raises(DataError, match="another tokenizer"):
        train(context)


def test_options_that_came_too_late_are_found_while_planning():
    stage = catalogue().stage("train.sft")
    inputs = {
        "model": [Input("base.model", Kind.MODEL, PolicyFacts())],
        "data": [Input("tokens.data", Kind.DATASET, DatasetFacts(format="tokens", columns=("tokens",)))],
    }
    config = configured(stage, weight_column="w", supervise="everything")
    (finding,) = [each for each in stage.check(config, inputs) if each.level is Level.ERROR]
    assert finding.message == "weight_column, supervise would be ignored: tokens.data is tokenized already"
    assert [*stage.check(configured(stage), inputs)] == []


def test_a_length_beyond_the_model_is_found_while_planning():
    stage = catalogue().stage("data.tokenize")
    inputs = {
        "model": [Input("base.model", Kind.MODEL, PolicyFacts(context=50))],
        "data": [Input("rows.data", Kind.DATASET, DatasetFacts(format="text", columns=("text",)))],
    }
    messages = [
        each.message for each in stage.check(configured(stage, max_length=60, weight_column="w"), inputs)
    ]
    assert messages == [
        "max_length is 60, but the model takes 50 tokens",
        "not every row has the weight column `w`",
    ]
    assert [*stage.check(configured(stage, max_length=50), inputs)] == []


def test_threads_change_nothing_but_time(tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch):
    rows = [{"text": f"{n} ab" * (1 + n % 5)} for n in range(3 * CHUNK + 7)]
    files = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        files.append(tokenized(tmp_path / threads, model, rows, "text")[0].path / "tokens.arrow")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_tokenizers_use_threads_in_this_stage_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    with tokenizer_threads():
        assert (os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"]) == ("true", "2")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert "RAYON_NUM_THREADS" not in os.environ


def test_results_come_in_order_and_only_a_few_parts_are_taken_ahead():
    taken: list[int] = []

    def parts() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    results = ahead(lambda number: number * number, parts(), 3)
    assert next(results) == 0
    assert len(taken) <= 4
    assert list(results) == [number * number for number in range(1, 20)]


def test_the_first_failure_ends_the_work():
    def work(number: int) -> int:
        if number >= 3:
            raise DataError(f"part {number}")
        return number

    results = ahead(work, range(10), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="part 3"):
        next(results)
