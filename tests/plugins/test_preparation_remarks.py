"""From rows to examples: weights, and what is told of rows."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.letters import prepared, said, text

from posttrain.contracts.stage import Level
from posttrain.contracts.trainer import Supervise
from posttrain.errors import DataError
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.templates.reading import Note


def test_weights_come_from_the_named_column_alone():
    rows = [{"prompt": "P", "completion": "a", "weight": 3, "w": 0.5}]
    assert prepared(rows).examples[0].weight == 1.0
    assert prepared(rows, weight_column="w").examples[0].weight == 0.5


@pytest.mark.parametrize("value", [float("nan"), -1, True, "2", None])
def test_unusable_weights_are_errors(value: Any):
    with pytest.raises(DataError, match="weight column"):
        prepared([{"prompt": "P", "completion": "a", "w": value}], weight_column="w")


def test_a_missing_weight_is_an_error():
    with pytest.raises(DataError) as caught:
        prepared([{"prompt": "P", "completion": "a"}], weight_column="w")
    assert "no column `w`; the row has `prompt`, `completion`" in str(caught.value)


def test_the_hundredth_row_that_is_shortened_makes_it_a_warning():
    long, short = {"prompt": "P", "completion": "abcdef"}, {"prompt": "P", "completion": "a"}
    (few,) = prepared([long, *[short] * 99], 5).notes
    assert few == (Level.NOTE, "1 row(s) (1.00%) shortened to the longest length, 2 tokens lost")
    (many,) = prepared([long, long, *[short] * 98], 5).notes
    assert many == (Level.WARNING, "2 row(s) (2.00%) shortened to the longest length, 4 tokens lost")


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("keep_start", "PPPPPPPPab"), ("keep_end", "PPPPPPabcd"), ("drop", None), ("error", None)],
)
def test_a_prompt_of_8_and_an_answer_of_4_in_10_tokens(truncation: str, expected: str | None):
    rows = [{"prompt": "P" * 8, "completion": "abcd"}, {"prompt": "P", "completion": "a"}]
    if truncation == "error":
        with pytest.raises(DataError, match="too long"):
            prepared(rows, 10, truncation)
        return
    found = prepared(rows, 10, truncation)
    assert [text(example) for example in found.examples] == ([expected, "Pa"] if expected else ["Pa"])
    assert (found.truncated, found.lost) == ((1, 2) if expected else (0, 0))


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_a_shortened_pair_keeps_one_prompt_and_something_to_learn_on_both_sides(truncation: str):
    rows = [{"prompt": "ABCDEFGH", "chosen": "wxyz", "rejected": "qr"}]
    chosen, rejected = prepared(rows, 10, truncation).examples[0].sequences
    assert chosen.predicted and rejected.predicted
    prompts = [bytes(list(side.tokens)).decode().rstrip("wxyzqr") for side in (chosen, rejected)]
    assert prompts[0] == prompts[1] == ("ABCDEFGH" if truncation == "keep_start" else "CDEFGH")


def test_the_end_of_a_text_is_kept_although_it_has_no_prompt_to_cut():
    found = prepared([{"text": "abcdefgh"}], 5, "keep_end", format="text")
    assert text(found.examples[0]) == "defgh"
    assert found.examples[0].predicted == 4


@pytest.mark.parametrize(
    ("truncation", "prompt", "kept"),
    [
        ("keep_start", "#PP", True),
        ("keep_start", "PPPP##", False),
        ("keep_end", "PPP#", True),
        ("keep_end", "P#PP", False),
    ],
)
def test_tokens_of_images_are_never_cut(truncation: str, prompt: str, kept: bool):
    rows = [{"prompt": prompt, "completion": "abc"}, {"prompt": "P", "completion": "a"}]
    found = prepared(rows, 5, truncation)
    assert found.dropped == ({} if kept else {"truncation to 5 tokens would cut an image": 1})
    if kept:
        (picture,) = found.examples[0].sequences[0].images
        assert text(found.examples[0])[picture.start : picture.end] == "#"


def test_what_a_template_does_is_told_once_a_row():
    found = prepared([{"prompt": "P_", "completion": "a"}, {"prompt": "P", "completion": "a"}])
    assert said(found) == ["1 row(s): trims it (row 1)"]


def test_every_field_that_a_row_loses_is_told():
    account = Account()
    lost = [("no `name`", 1), ("no `tool_calls`", 1), ("no `name`", 3)]
    account.remark(0, [Note("dropped-field", message, turn) for message, turn in lost])
    assert account.remarks.counts == {"no `name`": 1, "no `tool_calls`": 1}


def test_what_takes_nothing_away_is_a_note_and_a_lost_field_a_warning():
    account, other = Account(), Account()
    account.remark(
        0, [Note("dropped-field", "shows no tools"), Note("dropped-field", "shows no `tool_calls`")]
    )
    other.remark(1, [Note("trimmed", "trims `content`"), Note("dropped-field", "shows no tools")])
    account.take(other)
    assert [(level.value, text) for level, text in account.notes] == [
        ("warning", "2 row(s): shows no tools (rows 1, 2)"),
        ("warning", "1 row(s): shows no `tool_calls` (row 1)"),
        ("note", "1 row(s): trims `content` (row 2)"),
    ]


def test_many_sorts_of_remarks_are_told_in_a_few_lines():
    found = prepared([{"prompt": f"P_{n}", "completion": "a"} for n in range(13)])
    assert len(said(found)) == 11
    assert said(found)[0] == "1 row(s): trims 0 (row 1)"
    assert said(found)[-1] == "3 more remarks; see `posttrain data inspect`"


TALK = {
    "messages": [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "V"},
        {"role": "assistant", "content": "c"},
    ]
}


@pytest.mark.parametrize(
    ("supervise", "expected"),
    [(Supervise.ANSWERS, "abc"), (Supervise.LAST_ANSWER, "c"), (Supervise.EVERYTHING, "abVc")],
)
def test_what_is_learned_is_chosen(supervise: Supervise, expected: str):
    (example,) = prepared([TALK], format="messages", supervise=supervise).examples
    sequence = example.sequences[0]
    assert text(example) == "UabVc"
    learned = [chr(t) for t, counts in zip(sequence.tokens, sequence.supervised, strict=True) if counts]
    assert "".join(learned) == expected
    assert sequence.predicted == len(expected)


def test_images_are_not_learned_with_everything_else():
    rows = [{"prompt": "P##Q", "completion": "a"}]
    (example,) = prepared(rows, supervise=Supervise.EVERYTHING).examples
    assert list(example.sequences[0].supervised) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1025])
def test_rows_keep_their_numbers_over_all_chunks(count: int):
    rows = [{"prompt": "P", "completion": "A" if i % 5 == 3 else "ab"} for i in range(count)]
    found = prepared(rows)
    assert [each.row for each in found.examples] == [i for i in range(count) if i % 5 != 3]
    assert (found.rows, found.kept) == (count, len(found.examples))
