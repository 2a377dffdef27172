"""What counts as an overlap of training rows with evaluation rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from helpers.overlaps import EVALUATION, TRAINING, Row, answers, asks, compared, hits, text

from posttrain.errors import DataError
from posttrain_plugins.data.similarity.exposure import RowSet, exposures
from posttrain_plugins.data.similarity.overlap import Measure


def part(told: str, start: int, count: int) -> str:
    return " ".join(told.split()[start : start + count])


# What counts as an overlap

ASKED = text(1)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ((f"see: {part(ASKED, 4, 13)} so", "yes"), {0: (0, 13, 0.4333)}),
        ((f"see: {part(ASKED, 4, 12)} so", "yes"), {}),
        (("tell me", f"gladly {part(ASKED, 10, 20)}"), {0: (0, 20, 0.6667)}),
        ((part(ASKED, 0, 15), f"gap {part(ASKED, 15, 15)}"), {0: (0, 15, 1.0)}),
        ((part(ASKED, 0, 10), part(ASKED, 10, 10)), {0: (0, 20, 0.6667)}),  # the same words in a row
        ((ASKED.upper().replace(" ", ", "), "!"), {0: (0, 30, 1.0)}),
    ],
)
def test_thirteen_words_in_a_row_are_an_overlap(
    training: tuple[str, str], expected: dict[int, tuple[int, int, float]]
) -> None:
    assert hits(answers(("nothing", "here"), training)[1:], asks(ASKED)) == expected


def test_the_longest_overlap_of_a_training_set_is_told_with_its_row() -> None:
    training = answers(
        (part(ASKED, 0, 14), "a"), ("b", part(ASKED, 5, 22)), (text(2), "c"), (part(ASKED, 1, 13), "d")
    )
    exposure = compared(training, asks(text(3), ASKED))
    (found,) = exposure.evaluations
    ((where, hit),) = found.hits.items()
    assert where == (1, 0)
    assert (hit.row, hit.rows, hit.longest) == (1, 3, 22)
    assert hit.text == part(ASKED, 5, 22)
    assert exposure.overlapping == [frozenset({0, 1, 3})]
    assert (found.share, exposure.worst, exposure.trained) == (0.5, 0.5, [4])


def test_words_that_follow_each_other_in_one_row_alone_are_no_longer_overlap() -> None:
    """Both halves are there, the other way round: the longest run is one of them."""
    training = answers((f"{part(ASKED, 15, 15)} {part(ASKED, 0, 15)}", "x"))
    assert hits(training, asks(ASKED)) == {0: (0, 15, 1.0)}


def test_coverage_is_of_the_words_in_common_runs() -> None:
    training = answers((part(ASKED, 0, 9), part(ASKED, 20, 8)))  # 17 of 30 words, in runs of 8
    assert hits(training, asks(ASKED), ngram=8, coverage=0.5) == {0: (0, 9, 0.5667)}
    assert hits(training, asks(ASKED), ngram=8, coverage=0.6) == {}


def test_coverage_does_not_add_up_over_training_rows() -> None:
    training = answers((part(ASKED, 0, 12), "x"), (part(ASKED, 12, 12), "x"))
    assert hits(training, asks(ASKED), ngram=8, coverage=0.5) == {}
    assert hits(training, asks(ASKED), ngram=8, coverage=0.4) == {0: (0, 12, 0.4)}


@pytest.mark.parametrize(
    ("training", "hit"),
    [
        (("first: what is two plus two? then more", "x"), True),
        (("x", "you may ask what is two, plus two"), True),
        (("what is two plus three", "x"), False),
        (("what is two", "plus two"), True),
    ],
)
def test_a_short_prompt_has_to_occur_as_a_whole(training: tuple[str, str], hit: bool) -> None:
    assert bool(hits(answers(training), asks("What is two plus two"))) is hit


@pytest.mark.parametrize(
    ("training", "hit"),
    [
        (("hello there", "x"), True),
        (("Hello, there!", "x"), True),
        (("say hello there", "x"), False),
        (("x", "hello there"), False),
    ],
)
def test_a_prompt_of_few_words_has_to_be_all_that_is_asked(training: tuple[str, str], hit: bool) -> None:
    assert bool(hits(answers(training), asks("hello there"))) is hit


def test_a_question_inside_of_a_conversation_counts() -> None:
    turns = [("user", "hi"), ("assistant", "ho"), ("user", "hello there"), ("assistant", "yes")]
    talk = [{"messages": [{"role": role, "content": told} for role, told in turns]}]
    formats = ("messages", "prompt")
    assert set(hits(talk, asks("hello there", "yes", "ho", "hi"), formats)) == {0, 3}


def test_instructions_that_all_rows_have_are_no_contamination() -> None:
    def talk(question: str) -> Row:
        return {
            "messages": [
                {"role": "system", "content": text(5, 40)},
                {"role": "user", "content": question},
                {"role": "assistant", "content": "yes"},
            ]
        }

    formats = ("messages", "messages")
    assert hits([talk(text(6))], [talk(text(7))], formats) == {}
    assert set(hits([talk(text(6))], [talk(text(7))], formats, on="row")) == {0}


def test_a_template_of_the_evaluation_is_no_contamination() -> None:
    frame = text(8, 20)
    evaluation = asks(*(f"{frame} {text(100 + n, 5)}" for n in range(12)))
    training = answers((f"{frame} and so on", "x"), (evaluation[3]["prompt"], "x"))
    assert hits(training, evaluation) == {3: (1, 25, 1.0)}  # which is the whole prompt
    tail = part(
        evaluation[3]["prompt"], 7, 18
    )  # 13 words of the frame are a template, 5 runs reach beyond it
    assert hits(answers((tail, "x")), evaluation) == {3: (0, 17, 0.68)}
    assert len(hits(training, evaluation, common=12)) == 12
    assert len(hits(training, evaluation, common=None)) == 12


def test_rows_that_are_all_template_are_still_compared_as_a_whole_and_counted() -> None:
    evaluation = asks(*[text(9)] * 12, text(10))
    exposure = compared(answers((text(9), "x")), evaluation)
    (found,) = exposure.evaluations
    assert found.contaminated == frozenset(range(12))
    assert (found.unjudged, found.wordless) == (12, 0)
    assert compared(answers((f"so: {text(9)}", "x")), evaluation).evaluations[0].hits == {}


def test_rows_without_words_are_counted_and_nothing_else() -> None:
    picture = {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}
    (found,) = compared(
        [{"prompt": picture["prompt"], "completion": "x"}], [picture, *asks("hello there")]
    ).evaluations
    assert (found.hits, found.wordless, found.unjudged) == ({}, 1, 1)


def test_symbols_are_words_where_there_are_no_others() -> None:
    assert set(hits(answers(("+-*/%", "x")), asks("+ - * / %", "+ + +"))) == {0}


def test_texts_without_spaces_are_compared_by_character() -> None:
    asked = "小明有三个苹果和五个梨子一共有多少水果"
    assert hits(answers((f"题目：{asked}？", "八")), asks(asked)) == {0: (0, 19, 1.0)}


@pytest.mark.parametrize(
    ("on", "found"), [("prompt", set()), ("row", {0}), ("answer", {0}), ("completion", set())]
)
def test_another_part_of_the_row_may_be_looked_for(on: str, found: set[int]) -> None:
    evaluation = [{"prompt": text(11), "completion": text(12), "answer": ASKED}]
    training = answers(("ask", ASKED if on == "answer" else text(12, 30)))
    if on == "completion":
        training = answers(("ask", text(13)))
    assert set(hits(training, evaluation, ("prompt_completion",) * 2, on=on)) == found


def test_a_column_that_is_missing_is_named_with_the_row() -> None:
    with pytest.raises(DataError, match="row 2: a row has no column `answer`"):
        compared(answers(("a", "b")), [{"prompt": "a", "answer": "b"}, {"prompt": "b"}], on="answer")


def test_preference_pairs_are_compared_on_both_sides() -> None:
    training = [{"prompt": "ask", "chosen": text(14), "rejected": f"no: {ASKED}"}]
    assert set(hits(training, asks(ASKED), ("preference", "prompt"))) == {0}


def test_every_training_set_is_compared_with_every_evaluation_set() -> None:
    def rows(name: str, format: str, given: list[Row]) -> RowSet:
        return RowSet(name, format, lambda: given)

    training = [
        rows("one", "prompt_completion", answers((text(1), "x"), (text(2), "x"))),
        rows("two", "text", [{"text": f"{text(2)} {text(3)}"}]),
    ]
    evaluation = [rows("a", "prompt", asks(text(1), text(2))), rows("b", "prompt", asks(text(3), text(4)))]
    found = exposures(training, evaluation, Measure())
    assert {each.name: set(each.hits) for each in found.evaluations} == {
        "a": {(0, 0), (1, 0), (1, 1)},
        "b": {(0, 1)},
    }
    assert found.evaluations[0].as_dict(found.names)["training"] == {"one": 2, "two": 1}
    assert found.worst == 1.0


def test_nothing_to_compare_is_an_error() -> None:
    some = RowSet("some", "prompt", lambda: asks("a"))
    for training, evaluation, told in (([], [some], "training"), ([some], [], "evaluation")):
        with pytest.raises(DataError, match=f"there is no {told} set"):
            exposures(training, evaluation, Measure())
    with pytest.raises(DataError, match="the evaluation set has no rows"):
        exposures([some], [RowSet("none", "prompt", lambda: [])], Measure())


def test_it_agrees_with_counting_by_hand_on_random_words() -> None:
    """Few different words, so that runs of four are common by chance."""
    chosen = random.Random(0)

    def told(count: int) -> list[str]:
        return [chosen.choice("abcdefg") for _ in range(count)]

    asked, taught = [told(chosen.randrange(5, 12)) for _ in range(30)], [told(25) for _ in range(30)]
    found = hits(
        [{"text": " ".join(each)} for each in taught],
        asks(*map(" ".join, asked)),
        ("text", "prompt"),
        ngram=4,
        shortest=4,
        common=None,
    )
    expected = {}
    for place, own in enumerate(asked):
        longest = max(_common_run(own, other) for other in taught)
        if longest >= 4:
            expected[place] = longest
    assert 3 < len(expected) < 30
    assert {place: longest for place, (_, longest, _) in found.items()} == expected


def _common_run(one: list[str], other: list[str]) -> int:
    """The longest run of words in both, by dynamic programming."""
    best, before = 0, [0] * (len(other) + 1)
    for word in one:
        after = [0]
        for index, each in enumerate(other):
            after.append(before[index] + 1 if each == word else 0)
        best, before = max(best, *after), after
    return best


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", TRAINING), ("test", EVALUATION)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path
