from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.contracts.trainer import Example
from posttrain.errors import DataError
from posttrain_plugins.trainers.dpo import Dpo
from posttrain_plugins.trainers.sft import Sft
from posttrain_plugins.training.examples import Prepared, prepare


class Letters:
    """Encodes a pair letter by letter; upper case in an answer is not supervised."""

    def encode_pair(self, prompt: str, completion: str) -> Any:
        if "!" in prompt:
            raise DataError("the template declines")
        tokens = [ord(letter) for letter in prompt + completion]
        return SimpleNamespace(
            tokens=tokens, supervised=[i >= len(prompt) and chr(t).islower() for i, t in enumerate(tokens)]
        )


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
        Letters(),
        "preference" if preference else "prompt_completion",
        max_length=max_length,
        truncation=truncation,
        weight_column=more.get("weight_column"),
    )


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
    assert found.notes == ["1 row(s) shortened to the longest length, 4 tokens lost"]


def test_a_row_that_truncation_would_mask_entirely_is_dropped_counted_and_named():
    found = prepared([{"prompt": "PPPPPP", "completion": "abc"}, {"prompt": "P", "completion": "a"}], 5)
    assert [example.row for example in found.examples] == [1]
    assert found.notes == ["1 row(s) dropped: truncation to 5 tokens removes every supervised token"]


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
    assert "3: truncation to 5 tokens removes every supervised token" in caught.value.found
    assert "1: no supervised token" in caught.value.found


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
