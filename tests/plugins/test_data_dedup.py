"""`data.dedup` and `posttrain data dedup`: copies are found, and nothing else is dropped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.copies import PAIR, Row, changed, copies, pair, planted, text

from posttrain.artifacts.manifest import digest_of
from posttrain.errors import DataError
from posttrain_plugins.data.similarity.duplicates import Bands
from posttrain_plugins.data.similarity.shingles import Hasher, content_of, words


def groups(rows: Sequence[Row], format: str = PAIR, **rule: Any) -> list[list[int]]:
    """The places of rows that are taken for one, those of single rows left out."""
    found: dict[int, list[int]] = {}
    for copy in copies(rows, format, **rule):
        found.setdefault(copy.of, [copy.of]).append(copy.row)
    return sorted(sorted(places) for places in found.values())


# Words and shingles


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("Hello, WORLD!  it's 3.5", ["hello", "world", "it", "s", "3", "5"]),
        ("ﬁne ½", ["fine", "1", "2"]),
        ("你好 world", ["你", "好", "world"]),
        ("Straße", ["strasse"]),
        ("+ -", ["+", "-"]),
        (" \n", []),
    ],
)
def test_words_have_neither_case_nor_punctuation(told: str, expected: list[str]) -> None:
    assert words(told) == expected


def test_shingles_are_the_different_runs_of_words() -> None:
    hasher = Hasher(2)
    assert len(hasher.shingles("a b a b c")) == 3  # a b, b a, b c
    assert len(Hasher(5).shingles("a b c")) == 1
    assert len(Hasher(5).shingles("")) == 0
    more = hasher.shingles("x, A B; a b C!")  # and x a
    assert len(more) == 4
    assert set(hasher.shingles("a b a b c").tolist()) < set(more.tolist())


def test_shingles_of_characters_see_folded_text() -> None:
    one, other = (Hasher(3, characters=True).shingles(told) for told in ("Ab  c", "ab C"))
    assert one.tolist() == other.tolist() and len(one) == 2  # "ab ", "b c"


def test_shingles_are_the_same_on_every_machine() -> None:
    assert Hasher(2).shingles("one two three").tolist() == sorted(GOLDEN)


GOLDEN = [14513193064728508331, 16756998254569676072]


def test_what_a_row_says_is_taken_apart() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]},
            {"role": "assistant", "content": "a cat", "reasoning_content": "fur", "weight": 1},
        ],
        "tools": [{"name": "zoom"}],
        "id": 3,
    }
    found = content_of(row, "messages", "row")
    assert found.texts == {
        ("messages", "system"): ["be brief"],
        ("messages", "user"): ["what is it"],
        ("messages", "assistant"): ["a cat"],
        ("messages", "assistant", "reasoning_content"): ["fur"],
    }
    assert found.rest == [
        ["messages", "user", {"type": "image"}],
        ["messages", "assistant", "weight", 1],
        ["tools", [{"name": "zoom"}]],
    ]
    asked = content_of(row, "messages", "prompt").texts
    assert asked == {("prompt", "system"): ["be brief"], ("prompt", "user"): ["what is it"]}


# Which rows are copies


def test_equal_rows_are_found_whatever_their_case_and_white_space() -> None:
    rows = [pair("Ask me", "Yes"), pair("ask  ME\n", "yes"), pair("ask me", "no"), pair("Ask me", "Yes")]
    assert groups(rows, threshold=None) == [[0, 1, 3]]
    assert groups(rows, threshold=None, fold=False) == [[0, 3]]


def test_columns_beside_the_format_do_not_make_rows_differ() -> None:
    assert groups([pair("a", "b", id=1), pair("a", "b", id=2)]) == [[0, 1]]


def test_the_row_that_is_kept_does_not_depend_on_the_order() -> None:
    rows = [pair(text(n % 7), text(100 + n % 7), id=n) for n in range(40)]
    rows += [pair(text(n), changed(text(100 + n), 30), id=50 + n) for n in range(7)]
    kept = None
    for seed in range(4):
        random.Random(seed).shuffle(rows)
        dropped = {copy.row for copy in copies(rows, threshold=0.7)}
        left = sorted(digest_of(row) for place, row in enumerate(rows) if place not in dropped)
        assert len(left) == 7
        assert left == (kept or left)
        kept = left


def test_of_equal_rows_the_one_with_the_lowest_hash_is_kept() -> None:
    rows = [pair("a", "b", id=n) for n in range(10)]
    (kept,) = {copy.of for copy in copies(rows)}
    assert digest_of(rows[kept]) == min(map(digest_of, rows))


def test_near_rows_are_found_and_measured() -> None:
    told = text(1)
    rows = [pair("ask", told), pair("ask", changed(told, 59)), pair("ask", changed(told, 20, 40))]
    near = copies(rows, threshold=0.6)
    assert len(near) == 2 and not any(copy.equal for copy in near)
    # 56 shingles of 5 words each; a change at the end spoils one of them, one within spoils five.
    kept = near[0].of
    expected = {
        frozenset((0, 1)): 55 / 57,
        frozenset((0, 2)): 46 / 66,
        frozenset((1, 2)): 45 / 67,
    }
    for copy in near:
        assert copy.similarity == pytest.approx(expected[frozenset((copy.row, kept))])


def test_the_threshold_is_that_of_the_true_similarity() -> None:
    told = text(2)
    rows = [pair("ask", told), pair("ask", changed(told, 59))]
    exact = 55 / 57
    assert groups(rows, threshold=exact) == [[0, 1]]
    assert groups(rows, threshold=exact + 1e-9) == []


def test_a_chain_of_neighbours_is_not_taken_for_one() -> None:
    """Each is near the next one; the ends are not near each other, and must not vanish for each other."""
    rows = [pair("ask", text(3))]
    for step in range(12):
        rows.append(pair("ask", changed(rows[-1]["completion"], 5 * step)))
    found = copies(rows, threshold=0.75)
    assert found
    kept = [place for place in range(len(rows)) if place not in {copy.row for copy in found}]
    for copy in found:
        assert jaccard(rows[copy.row]["completion"], rows[copy.of]["completion"]) >= 0.75
        assert copy.of in kept
    for one in kept:
        for other in kept:
            if one < other:
                assert jaccard(rows[one]["completion"], rows[other]["completion"]) < 0.75


def jaccard(one: str, other: str) -> float:
    """The similarity, counted without hashes."""

    def shingles(told: str) -> set[tuple[str, ...]]:
        parts = told.split()
        return {tuple(parts[i : i + 5]) for i in range(len(parts) - 4)}

    mine, theirs = shingles(one), shingles(other)
    return len(mine & theirs) / len(mine | theirs)


LONG = text(4, 200)


@pytest.mark.parametrize(
    ("format", "rows"),
    [
        (PAIR, [pair(LONG, "yes indeed"), pair(LONG, "no never")]),
        (
            "preference",
            [
                {"prompt": LONG, "chosen": text(5), "rejected": text(6)},
                {"prompt": LONG, "chosen": text(6), "rejected": text(5)},
            ],
        ),
        (PAIR, [pair("f", LONG, tools=[{"name": "a"}]), pair("f", changed(LONG, 9), tools=[{"name": "b"}])]),
        (
            "messages",
            [
                {
                    "messages": [
                        {"role": role, "content": told}
                        for role, told in zip(("user", "assistant"), turns, strict=True)
                    ]
                }
                for turns in ((LONG, text(7)), (text(7), LONG))
            ],
        ),
        (PAIR, [pair("what is 3 + 4?", "7"), pair("what is 3 + 5?", "8")]),
    ],
)
def test_rows_that_differ_in_one_part_are_both_kept(format: str, rows: list[Row]) -> None:
    assert copies(rows, format, threshold=0.5) == []


def test_labels_that_contradict_each_other_are_both_kept() -> None:
    rows = [{"prompt": "ask", "completion": LONG, "label": label} for label in (True, False)]
    assert copies(rows, "unpaired_preference", threshold=0.5) == []
    assert groups([rows[0], rows[0]], "unpaired_preference") == [[0, 1]]


def test_prompts_alone_or_one_column_may_be_compared() -> None:
    rows = [pair("Same?", text(8)), pair("same?", text(9)), pair("other?", text(8))]
    assert groups(rows, on="prompt") == [[0, 1]]
    assert groups(rows, on="completion") == [[0, 2]]
    with pytest.raises(DataError, match="no column `answer`"):
        copies(rows, on="answer")


def test_short_texts_are_near_by_their_characters() -> None:
    rows = [pair("reverse abcdefghijklmnopqrst", "x"), pair("reverse abcdefghijklmnopqrsu", "x")]
    assert copies(rows, threshold=0.8) == []
    assert groups(rows, threshold=0.8, characters=True, size=4) == [[0, 1]]


def test_rows_without_text_are_equal_or_nothing() -> None:
    rows = [pair("…", "…", id=1), pair("!", "?"), pair("…", "…", id=2)]
    assert groups(rows) == [[0, 2]]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95, 1.0])
def test_bands_hardly_miss_a_pair_at_the_threshold(threshold: float) -> None:
    bands = Bands.of(threshold, 128)
    assert bands.count * bands.rows <= 128
    assert 1 - (1 - threshold**bands.rows) ** bands.count >= 0.99
    longer = bands.rows + 1
    assert longer > 128 or 1 - (1 - threshold**longer) ** (128 // longer) < 0.99


def test_too_few_permutations_are_refused() -> None:
    with pytest.raises(DataError, match="too few permutations"):
        Bands.of(0.05, 16)


def test_all_planted_copies_among_five_thousand_rows_are_found_and_nothing_else() -> None:
    rows, expected = planted(4400)
    assert len(rows) == 5060
    assert groups(rows, threshold=0.8) == expected


def test_templates_that_are_almost_near_take_no_forever() -> None:
    """Rows of one template share three shingles in four: all of them are candidates of each other."""
    frame = text(11, 110)
    rows = [pair("ask", f"{frame} {text(1000 + n, 12)}") for n in range(800)]
    assert copies(rows, threshold=0.83) == []
