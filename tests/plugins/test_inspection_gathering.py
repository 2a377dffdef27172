from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import catalogue, configured
from helpers.looking import model_at, shown, turns

from posttrain.contracts.loss import Need
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Trainer
from posttrain_plugins import templates
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.inspection.gathering import Subject, inspect
from posttrain_plugins.inspection.hints import fix_of
from posttrain_plugins.inspection.models import Model, model_view, open_model
from posttrain_plugins.inspection.trainers import needs_of, preparation
from posttrain_plugins.inspection.views import Inspection, Kept, Look
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.reward import Reward
from posttrain_plugins.trainers.sft import Sft
from posttrain_plugins.training.objective import known_needs

Rows = list[dict[str, Any]]


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "prompt": turns(prompt),
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


CONVERSATIONS: Rows = [
    {"messages": turns("The quick brown fox?", "It said: look it up!"), "source": "web"},
    {"messages": turns("Hi")},
    {"messages": turns("привет", "👍", "name word " * 40, "tool system user")},
    {"messages": turns("user", "ok " * 60)},
    {"messages": turns("Hi")},
    {"messages": turns("word", "name")},
]
PAIRS: Rows = [
    pair("The quick brown fox?", "It said: no", "It said: yes"),
    pair("user", "same", "same"),
    pair("name " * 30, "It said " * 10, "word " * 12),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(model_at(tmp_path_factory.mktemp("model"))), Path("nowhere"))


def look(
    model: Model,
    trainer: Trainer,
    rows: Rows,
    format: str,
    wanted: Collection[int] = (),
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Inspection:
    form = format_of(format)
    limit, needs = more.pop("limit", None), more.pop("needs", frozenset())
    config = trainer.config.model_validate(options or {})
    subject = Subject("rows", format, form, lambda: iter(rows), lambda index: f"line {index + 1}", limit)
    return inspect(
        subject, model, preparation(trainer, config, form, model, None, needs), "it", wanted, **more
    )


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "drop"])
@pytest.mark.parametrize(
    ("trainer", "rows", "format"), [(Sft(), CONVERSATIONS, "messages"), (Dpo(), PAIRS, "preference")]
)
def test_the_summary_is_what_training_prepares(
    model: Model, trainer: Trainer, rows: Rows, format: str, truncation: str
) -> None:
    options = {"max_length": 64, "truncation": truncation}
    seen = look(model, trainer, rows, format, range(len(rows)), options)
    prepared = prepare(
        trainer, rows, model.encoder, format_of(format),
        max_length=64, truncation=truncation, weight_column=None,
    )  # fmt: skip
    training = seen.training
    assert training.usable == len(prepared.examples)
    assert {reason: kept.count for reason, kept in training.dropped.items()} == dict(prepared.dropped)
    assert (training.truncated, training.lost) == (prepared.truncated, prepared.lost)
    sequences = [sequence for example in prepared.examples for sequence in example.sequences]
    assert training.tokens == sum(len(sequence.tokens) for sequence in sequences)
    assert training.supervised == sum(sequence.predicted for sequence in sequences)
    taken = {example.row: example for example in prepared.examples}
    for row in seen.shown:
        assert (row.dropped is None) is (row.number - 1 in taken)
        if row.dropped is None:
            for side, sequence in zip(row.sides, taken[row.number - 1].sequences, strict=True):
                kept = [piece for piece in side.pieces if piece.id is not None and not piece.cut]
                assert [piece.id for piece in kept] == list(sequence.tokens)
                assert [piece.supervised for piece in kept] == list(map(bool, sequence.supervised))


@pytest.mark.parametrize(("needs", "usable"), [(frozenset({Need.MARGIN}), 0), (frozenset(), 1)])
def test_margins_are_judged_where_a_loss_reads_them(
    model: Model, needs: frozenset[Need], usable: int
) -> None:
    rows = [{**pair("The quick brown fox?", "It said: no", "It said: yes"), "margin": "wide"}]
    assert look(model, Reward(), rows, "preference", needs=needs).training.usable == usable


@pytest.mark.parametrize("name", [*catalogue().names(Group.TRAINER)])
def test_what_losses_need_of_rows_is_known_without_a_plan(name: str) -> None:
    trainer = catalogue().stage(name)
    assert isinstance(trainer, Trainer)
    known = known_needs(trainer, configured(trainer))
    assert known is not None and needs_of(trainer, trainer.config()) == known - {Need.MISMATCHED}


def test_a_row_as_training_sees_it(model: Model) -> None:
    seen = look(model, Sft(), CONVERSATIONS, "messages", [0, 1])
    row, without = seen.shown
    assert (row.number, row.place, row.dropped) == (1, "line 1", None)
    assert [(turn.part, turn.role, turn.content) for turn in row.turns] == [
        ("conversation", "user", "The quick brown fox?"),
        ("conversation", "assistant", "It said: look it up!"),
    ]
    assert row.others == {"source": "web"}
    (side,) = row.sides
    assert shown(side, Look.LEARNED) == "It said: look it up!<|im_end|>"
    assert shown(side, Look.GIVEN) == (
        "<|im_start|>user\nThe quick brown fox?<|im_end|>\n<|im_start|>assistant\n\n"
    )
    assert (without.dropped, without.sides) == ("no assistant turn", ())
    assert without.turns[0].content == "Hi"


def test_what_truncation_takes_is_shown(model: Model) -> None:
    seen = look(model, Sft(), CONVERSATIONS, "messages", [3], {"max_length": 40})
    (side,) = seen.shown[0].sides
    assert side.counts["tokens"] == 40
    assert side.counts["cut"] == seen.training.lost - _lost_elsewhere(model)
    assert shown(side, Look.CUT).endswith("<|im_end|>\n")
    assert shown(side, Look.LEARNED).startswith("ok ok")


def _lost_elsewhere(model: Model) -> int:
    return look(model, Sft(), CONVERSATIONS[:3], "messages", (), {"max_length": 40}).training.lost


def test_both_sides_share_their_prompt(model: Model) -> None:
    row = look(model, Dpo(), PAIRS, "preference", [0]).shown[0]
    chosen, rejected = row.sides
    assert [side.role for side in row.sides] == ["chosen", "rejected"]
    common = "".join(piece.text for piece in chosen.pieces[: row.common])
    assert common == "<|im_start|>user\nThe quick brown fox?<|im_end|>\n<|im_start|>assistant\n"
    assert rejected.pieces[: row.common] == chosen.pieces[: row.common]
    assert shown(rejected, Look.LEARNED) == "It said: yes<|im_end|>"
    assert [(turn.part, turn.role) for turn in row.turns] == [
        ("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"),
    ]  # fmt: skip


def test_a_row_that_training_stops_at_does_not_hide_the_others(model: Model) -> None:
    rows = [{"text": "word"}, {"text": "name " * 50}, {"text": "user"}]
    seen = look(model, Sft(), rows, "text", [1], {"max_length": 20, "truncation": "error"})
    assert seen.training.usable == 2
    assert seen.training.dropped == {"training stops: the row is too long": Kept(1, (2,))}
    assert "the row is too long" in str(seen.shown[0].dropped)
    assert seen.shown[0].sides[0].counts["cut"] == 0


def test_masks_are_counted(model: Model) -> None:
    seen = look(model, Sft(), CONVERSATIONS, "messages")
    assert (seen.training.masked, seen.training.unmasked, seen.training.intended) == (Kept(0), Kept(0), False)
    text = look(model, Sft(), [{"text": "word"}, {"text": "name"}], "text")
    assert (text.training.unmasked, text.training.intended) == (Kept(2, (1, 2)), True)
    everything = look(model, Sft(), CONVERSATIONS, "messages", (), {"supervise": "everything"})
    assert everything.training.unmasked.count == everything.training.usable
    assert everything.training.intended


def test_the_last_answer_alone(model: Model) -> None:
    seen = look(model, Sft(), CONVERSATIONS, "messages", [2], {"supervise": "last_answer"})
    assert shown(seen.shown[0].sides[0], Look.LEARNED) == "tool system user<|im_end|>"


def test_the_first_rows_only(model: Model) -> None:
    seen = look(model, Sft(), CONVERSATIONS, "messages", limit=2)
    assert (seen.rows, seen.complete, seen.statistics.rows) == (2, False, 2)
    assert look(model, Sft(), CONVERSATIONS, "messages", limit=6).complete


def test_rows_left_out_are_shown_once_for_each_reason(model: Model) -> None:
    options = {"max_length": 64, "truncation": "drop"}
    seen = look(model, Sft(), CONVERSATIONS, "messages", [0], options, examples_of_trouble=True)
    assert [(row.number, row.dropped) for row in seen.shown] == [
        (1, None), (2, "no assistant turn"), (3, "longer than 64 tokens"),
    ]  # fmt: skip


def test_prompts_are_shown_though_nothing_is_learned(model: Model) -> None:
    form = format_of("prompt")
    rows = [{"prompt": turns("word")}]
    subject = Subject("rows", "prompt", form, lambda: iter(rows), str)
    seen = inspect(subject, model, preparation(None, None, form, model, None), "no trainer", [0])
    (side,) = seen.shown[0].sides
    assert shown(side, Look.GIVEN) == "<|im_start|>user\nword<|im_end|>\n<|im_start|>assistant\n"


def test_the_model(tmp_path: Path) -> None:
    model = open_model(str(model_at(tmp_path, bos=True, context=77)), tmp_path)
    view = model_view(model)
    assert view.context == 77
    end = model.encoder.files.plain.token_to_id("<|im_end|>")
    assert (str(view.end_of_turn), view.bos and view.bos.name) == (f"<|im_end|> ({end})", "<s>")
    assert [stop.name for stop in view.stops] == ["<|im_end|>"]
    fingerprint = model.encoder.fingerprint()
    assert fingerprint is not None
    assert (view.template, view.template_text) == (fingerprint.tokens, fingerprint.text)
    assert [remark.code for remark in view.remarks] == ["no-pad"]


def test_a_pad_that_ends_turns_is_told(tmp_path: Path) -> None:
    directory = model_at(tmp_path)
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"pad_token": "<|im_end|>", ', 1))
    remarks = model_view(open_model(str(directory), tmp_path)).remarks
    assert [remark.code for remark in remarks] == ["pad-is-end"]


def test_a_model_without_a_template(tmp_path: Path) -> None:
    directory = model_at(tmp_path)
    (directory / "chat_template.jinja").unlink()
    model = open_model(str(directory), tmp_path)
    assert [remark.code for remark in model_view(model).remarks] == ["no-template", "no-pad"]
    seen = look(model, Sft(), CONVERSATIONS, "messages", [0])
    assert seen.training.usable == 0
    assert "chat template" in str(seen.shown[0].dropped)


def test_every_note_has_advice() -> None:
    """The notes' codes are written where they are made; each must say what can be done."""
    made = re.compile(r"""ote\(\s*"([a-z]+(?:-[a-z]+)+|merged|reordered|trimmed|rewritten)\"""")
    folder = Path(templates.__path__[0])
    codes = {code for path in folder.glob("*.py") for code in made.findall(path.read_text(encoding="utf-8"))}
    assert {"no-end-of-turn", "merged", "control-token"} <= codes
    assert not [code for code in codes | {"trimmed", "rewritten"} if fix_of(code) is None]
