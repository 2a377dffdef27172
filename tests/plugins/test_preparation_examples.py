"""From rows to examples: order, truncation, rows that are dropped."""

from __future__ import annotations

import pytest
from helpers.letters import prepared, said, text

from posttrain.contracts.stage import Level
from posttrain.errors import DataError


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
