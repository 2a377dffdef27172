"""Step 0: what is refused and what is said about the first step's tokens and scores, by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from helpers.contexts import catalogue

from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import StageError
from posttrain_plugins.data.formats import BUILT_IN, format_of
from posttrain_plugins.trainers.dpo import Dpo, DpoOptions
from posttrain_plugins.trainers.sft import Sft, SftOptions
from posttrain_plugins.training.invariants import ODD, UNLIKELY, Marks, StepZero
from posttrain_plugins.training.stage import _PROMPTED
from posttrain_plugins.training.tally import StepResult

UNK, BOS, END, OTHER_END, SIZE = 1, 2, 3, 4, 20
MARKS = Marks(size=SIZE, stops=frozenset({END, OTHER_END}), bos=BOS, unk=UNK)


def row(tokens: Sequence[int], learned: str, weight: float = 1.0, number: int = 0) -> Example:
    """One sequence; `learned` has a `x` for each token that is learned and a `.` for others."""
    assert len(tokens) == len(learned)
    mask = [mark == "x" for mark in learned]
    return Example(number, (TokenSequence(tokens, mask, "completion"),), weight)


GOOD = row([BOS, 10, 11, END, 9], "..xx.")


def check(*rows: Example, prompts: bool = True, marks: Marks = MARKS) -> tuple[str, list[str]]:
    """Return what a step is refused for, and what is said about it."""
    said: list[str] = []
    try:
        StepZero(marks, said.append, prompts).check_rows(rows)
    except StageError as error:
        assert error.where == "step 0"
        return str(error.found), said
    return "", said


def test_a_sound_step_passes_in_silence() -> None:
    assert check(GOOD, row([BOS, 12, END], ".xx")) == ("", [])


def test_ids_beyond_the_embeddings() -> None:
    refused, _ = check(GOOD, row([BOS, SIZE, END], ".xx"))
    assert refused == "the rows hold ids such as 20, and the model embeds 20 tokens"


@pytest.mark.parametrize(("doubled", "refused"), [(1, False), (2, True)])
def test_bos_twice_in_most_sequences(doubled: int, refused: bool) -> None:
    twice = row([BOS, BOS, 10, END], "..xx")
    found, _ = check(*[twice] * doubled, GOOD)
    assert ("begin with two beginning-of-sequence tokens (2)" in found) is refused
    assert check(twice, marks=Marks(SIZE, MARKS.stops)) == ("", []), (
        "without a BOS there is nothing to double"
    )


def test_an_end_that_is_there_and_masked() -> None:
    masked = row([BOS, 10, 11, END], "..x.")
    refused, said = check(masked)
    assert "in 100% of the sequences the token that ends the answer is not learned" in refused
    assert len(said) == 1 and "will not learn to stop" in said[0]
    assert check(masked, GOOD, GOOD) == ("", [])


def test_a_model_that_gives_numbers_learns_no_token() -> None:
    """Ends and what is masked say nothing; all tokens are read, so all are looked at."""

    def judged(*rows: Example) -> tuple[str, list[str]]:
        said: list[str] = []
        try:
            StepZero(MARKS, said.append, prompts=True, judges=True).check_rows(rows)
        except StageError as error:
            return str(error.found), said
        return "", said

    assert judged(row([BOS, 10, 11, 12], "...x"), row([BOS, 10, END, 12], ".x.x")) == ("", [])
    assert judged(row([UNK, UNK, UNK, 12], "...x"))[0] == "75% of the tokens are unknown to the tokenizer"
    (told,) = judged(row([BOS, UNK, 11, 12, 13], "....x"))[1]
    assert told.startswith("step 0: 20% of the tokens are unknown to the tokenizer; ")
    assert "the model embeds 20 tokens" in judged(row([BOS, SIZE, END], "..x"))[0]


def test_a_second_end_behind_a_learned_one_is_the_template_s() -> None:
    assert check(row([BOS, 10, END, OTHER_END], ".xx.")) == ("", [])


def test_an_end_in_the_prompt_is_not_the_answer_s() -> None:
    assert check(row([BOS, 10, END, 11, 12, END], "....xx")) == ("", [])


def test_a_step_without_ends_is_said() -> None:
    refused, said = check(row([BOS, 10, 11], "..x"), row([BOS, 12, 11], "..x"))
    assert refused == "" and len(said) == 1
    assert said[0].startswith("step 0: no sequence has an end token to learn")


def test_prompts_that_are_learned() -> None:
    everything = row([BOS, 10, END], ".xx")
    assert check(everything, prompts=False) == ("", [])
    assert check(everything)[1] == ["step 0: every token of every sequence is learned, prompts too"]
    assert check(everything, GOOD) == ("", []), "a prompt of one token looks like that"


@pytest.mark.parametrize(("unknown", "refused", "said"), [(0, 0, 0), (2, 0, 1), (6, 1, 0)])
def test_unknown_tokens(unknown: int, refused: int, said: int) -> None:
    answer = [UNK] * unknown + [10] * (9 - unknown) + [END]
    found, told = check(row([BOS, 9, *answer], ".." + "x" * 10))
    assert ("unknown to the tokenizer" in found, len(told)) == (bool(refused), said)


@pytest.mark.parametrize("judges", [False, True])
def test_unknown_tokens_come_with_what_to_do(judges: bool) -> None:
    with pytest.raises(StageError) as caught:
        StepZero(MARKS, print, judges=judges).check_rows([row([BOS, UNK, UNK, UNK, END], ".xxxx")])
    assert "`posttrain data inspect DATA --model MODEL --tokens`" in str(caught.value.fix)


def test_unknown_tokens_of_the_prompt_are_not_learned_but_told() -> None:
    found, (told,) = check(row([BOS, UNK, UNK, UNK, 10, END], "....xx"))
    assert found == "" and "50% of the tokens, prompts included" in told


def test_rows_without_weight() -> None:
    nothing = row([BOS, 10, END], "..x", weight=0.0)
    assert check(nothing)[0] == "every row has the weight 0, so nothing would be learned"
    assert check(nothing, GOOD) == ("", [])


@pytest.mark.parametrize(("copies", "said"), [(3, 0), (4, 1)])
def test_rows_that_are_all_the_same(copies: int, said: int) -> None:
    assert len(check(*[GOOD] * copies)[1]) == said
    assert check(*[GOOD] * copies, row([BOS, 12, END], ".xx")) == ("", [])


class _Encoder:
    stop_ids, bos_id, unk_id = (3, 4), 2, None


def test_marks_are_the_encoder_s() -> None:
    assert Marks.of(_Encoder(), 7) == Marks(7, frozenset({3, 4}), 2, None)


def scored(
    surprise: float, metrics: Mapping[str, float] | None = None, trainer: Any = Sft
) -> tuple[str, list[str]]:
    said: list[str] = []
    result = StepResult(loss=1.0, metrics={}, tokens=9, surprise=surprise)
    options = {Sft: SftOptions(), Dpo: DpoOptions()}[trainer]
    try:
        StepZero(MARKS, said.append).check_scores(trainer(), options, metrics or {}, result)
    except StageError as error:
        return str(error.found), said
    return "", said


def test_tokens_that_cost_more_than_guessing() -> None:
    guessing = math.log(SIZE)
    assert scored(guessing) == scored(ODD * guessing * 0.99) == ("", [])
    refused, said = scored(ODD * guessing * 1.01)
    assert refused == "" and "and guessing costs 3" in said[0]
    refused, said = scored(UNLIKELY * guessing * 1.01)
    assert "damaged weights" in refused and said == []


def test_the_trainer_s_own_invariants_count() -> None:
    assert scored(1.0, {"reference/gap": 0.0}, Dpo) == ("", [])
    assert "differs from its reference by 0.5" in scored(1.0, {"reference/gap": 0.5}, Dpo)[0]


def test_rows_with_a_prompt_are_looked_at_for_prompts_that_are_learned() -> None:
    policies = [
        stage for name in catalogue().names(Group.TRAINER) if not (stage := catalogue().stage(name)).valued
    ]
    prompted = {
        format
        for stage in policies
        for format in stage.formats & set(BUILT_IN)
        if "prompt" in format_of(format).columns
    }
    assert prompted >= {"preference", "prompt_completion"} and prompted <= _PROMPTED
