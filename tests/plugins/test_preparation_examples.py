from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.contracts.passage import Passage
from posttrain.contracts.stage import Level
from posttrain.contracts.trainer import Example, Supervise
from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.preparation.examples import Prepared, prepare
from posttrain_plugins.templates.reading import Note
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.sft import Sft


@dataclass(frozen=True)
class Picture:
    start: int
    end: int


class Letters:
    """Encodes a passage letter by letter; upper case in an answer is not supervised, `#` stands for an image."""

    def __init__(self, bos: str | None = None) -> None:
        self.bos_id = None if bos is None else ord(bos)

    def encode(self, passages: Sequence[Passage]) -> list[Any]:
        return [self._one(passage) for passage in passages]

    def _one(self, passage: Passage) -> Any:
        prompt, completion = map(written, (passage.prompt, passage.completion))
        if "!" in prompt:
            return DataError("the template declines")
        text = str(passage.tools or "") + prompt + completion
        tokens = [ord(letter) for letter in text]
        start = len(text) - len(completion)
        return SimpleNamespace(
            tokens=tokens,
            supervised=[i >= start and chr(t).islower() for i, t in enumerate(tokens)],
            straddling="+" in prompt,
            notes=[SimpleNamespace(code="trimmed", message=f"trims {prompt[2:] or 'it'}")] * 2
            if "_" in text
            else [],
            images=tuple(Picture(i, i + 1) for i, letter in enumerate(text) if letter == "#"),
        )


def written(turns: Any) -> str:
    if turns is None or isinstance(turns, str):
        return turns or ""
    return "".join(message["content"] for message in turns)


def prepared(
    rows: Sequence[Mapping[str, Any]],
    max_length: int | None = None,
    truncation: str = "keep_start",
    **more: Any,
) -> Prepared:
    preference = "chosen" in rows[0] if rows else False
    return prepare(
        Dpo() if preference else Sft(),
        rows,
        Letters(more.get("bos")),
        format_of("preference" if preference else more.get("format", "prompt_completion")),
        max_length=max_length,
        truncation=truncation,
        weight_column=more.get("weight_column"),
        supervise=more.get("supervise", Supervise.ANSWERS),
    )


def said(found: Prepared) -> list[str]:
    return [text for _, text in found.notes]


def text(example: Example, side: int = 0) -> str:
    return "".join(map(chr, example.sequences[side].tokens))


def test_rows_keep_their_order_and_index():
    found = prepared([{"prompt": "P", "completion": c} for c in ("ab", "A", "c")])
    assert [(example.row, text(example)) for example in found.examples] == [(0, "Pab"), (2, "Pc")]
    assert found.dropped == {"no supervised token": 1}
    assert found.figures == {"rows": 2.0, "rows_dropped": 1.0, "rows_truncated": 0.0}


def test_keep_start_cuts_the_tail_and_counts_it():
    found = prepared([{"prompt": "PPP", "completion": "abcdef"}, {"prompt": "P", "completion": "a"}], 5)
    assert [text(example) for example in found.examples] == ["PPPab", "Pa"]
    assert (found.truncated, found.lost) == (1, 4)
    assert found.notes == [
        (Level.WARNING, "1 row(s) (50.00%) shortened to the longest length, 4 tokens lost")
    ]


def test_a_row_that_truncation_would_mask_entirely_is_dropped_counted_and_named():
    found = prepared([{"prompt": "PPPPPP", "completion": "abc"}, {"prompt": "P", "completion": "a"}], 5)
    assert [example.row for example in found.examples] == [1]
    assert said(found) == ["1 row(s) dropped: truncation to 5 tokens removes every supervised token (row 1)"]


def test_the_first_dropped_rows_are_named_by_reason():
    rows = [{"prompt": "P", "completion": c} for c in ("A", "a", "B", "C", "D", "E", "F")]
    assert said(prepared(rows[:3])) == ["2 row(s) dropped: no supervised token (rows 1, 3)"]
    assert said(prepared(rows)) == ["6 row(s) dropped: no supervised token (rows 1, 3, 4, 5, 6, …)"]


def test_conversations_without_an_answer_are_dropped_and_named():
    ask, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}
    found = prepared([{"messages": [ask, answer]}, {"messages": [ask]}], format="messages")
    assert [example.row for example in found.examples] == [0]
    assert said(found) == ["1 row(s) dropped: no assistant turn (row 2)"]
    with pytest.raises(DataError, match="no row of the dataset can be trained on"):
        prepared([{"messages": [ask]}], format="messages")


def test_tokens_between_prompt_and_answer_are_counted():
    found = prepared([{"prompt": "P+", "completion": "a"}, {"prompt": "P", "completion": "a"}])
    assert len(found.examples) == 2
    (note,) = said(found)
    assert note.startswith("1 row(s) have a token that begins in the prompt and ends in the answer")


def test_tools_reach_the_encoder_of_both_trainers():
    rows = [{"prompt": "P", "completion": "a", "tools": [{"f": 1}]}]
    assert text(prepared(rows).examples[0]) == "[{'f': 1}]Pa"
    pairs = [{"prompt": "P", "chosen": "a", "rejected": "b", "tools": '[{"f": 1}]'}]
    assert [text(prepared(pairs).examples[0], side) for side in (0, 1)] == ["[{'f': 1}]Pa", "[{'f': 1}]Pb"]


def test_keep_end_keeps_the_beginning_token():
    pair = [{"prompt": "^ABCDEFG", "chosen": "wxyz", "rejected": "q"}]
    found = prepared(pair, 10, "keep_end", bos="^").examples[0]
    assert (text(found, 0), text(found, 1)) == ("^DEFGwxyz"[:1] + "CDEFGwxyz", "^CDEFGq")
    short = prepared([{"prompt": "^ABC", "completion": "wxyz"}], 5, "keep_end", bos="^").examples[0]
    assert text(short) == "^wxyz"
    assert short.sequences[0].predicted == 4


def test_a_pair_that_is_the_same_once_shortened_is_dropped():
    rows = [
        {"prompt": "P", "chosen": "abcx", "rejected": "abcy"},
        {"prompt": "P", "chosen": "xabc", "rejected": "yabc"},
    ]
    found = prepared(rows, 4)
    assert [example.row for example in found.examples] == [1]
    assert found.dropped == {"chosen and rejected have the same tokens once they are shortened": 1}
    assert (found.truncated, found.lost) == (1, 2)


def test_keep_end_cuts_the_prompt_by_the_excess_and_leaves_the_answer_whole():
    found = prepared([{"prompt": "ABCDEFGH", "completion": "wxyz"}], 10, "keep_end")
    assert text(found.examples[0]) == "CDEFGHwxyz"
    assert found.examples[0].sequences[0].predicted == 4


def test_keep_end_cuts_both_sides_of_a_pair_alike():
    found = prepared([{"prompt": "ABCDEFGH", "chosen": "wxyz", "rejected": "q"}], 10, "keep_end")
    assert (text(found.examples[0], 0), text(found.examples[0], 1)) == ("CDEFGHwxyz", "CDEFGHq")


def test_keep_end_drops_a_row_whose_prompt_is_too_short_to_cut():
    found = prepared(
        [{"prompt": "AB", "completion": "uvwxyz"}, {"prompt": "P", "completion": "a"}], 5, "keep_end"
    )
    assert found.dropped == {"the prompt cannot be cut far enough to fit 5 tokens": 1}


def test_keep_start_keeps_a_token_of_both_sides_or_drops_the_pair():
    rows = [
        {"prompt": "ABC", "chosen": "xyz", "rejected": "Qq"},
        {"prompt": "A", "chosen": "x", "rejected": "y"},
    ]
    found = prepared(rows, 4)
    assert [example.row for example in found.examples] == [1]


def test_drop_drops():
    found = prepared([{"prompt": "P", "completion": "abcdef"}, {"prompt": "P", "completion": "a"}], 5, "drop")
    assert found.dropped == {"longer than 5 tokens": 1}


def test_error_names_row_and_length():
    with pytest.raises(DataError) as caught:
        prepared([{"prompt": "P", "completion": "a"}, {"prompt": "P", "completion": "abcdef"}], 5, "error")
    assert (caught.value.where, caught.value.found, caught.value.expected) == (
        "row 2",
        "7 tokens",
        "at most 5",
    )


def test_all_rows_dropped_is_an_error_with_counts_and_reasons():
    with pytest.raises(DataError) as caught:
        prepared([{"prompt": "PPPPPP", "completion": "abc"}] * 3 + [{"prompt": "P", "completion": "A"}], 5)
    assert "4 rows, all dropped" in caught.value.found
    assert (
        "3 row(s) dropped: truncation to 5 tokens removes every supervised token (rows 1, 2, 3)"
        in caught.value.found
    )
    assert "1 row(s) dropped: no supervised token (row 4)" in caught.value.found


def test_an_empty_dataset_is_an_error():
    with pytest.raises(DataError, match="no row"):
        prepared([])


def test_pairs_without_a_difference_are_dropped():
    rows = [{"prompt": "P", "chosen": "a", "rejected": "a"}, {"prompt": "P", "chosen": "a", "rejected": "b"}]
    assert prepared(rows).dropped == {"chosen and rejected are the same": 1}


def test_an_encoding_error_names_the_row():
    with pytest.raises(DataError) as caught:
        prepared([{"prompt": "P", "completion": "a"}, {"prompt": "!", "completion": "a"}])
    assert caught.value.where == "row 2"


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
    assert caught.value.found == "no such column"


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
