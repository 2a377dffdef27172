"""Where numbers are asked for in answers given in steps: at the last token of each, whatever the tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.models import char_tokenizer
from helpers.tokenizers_of_all_kinds import KINDS, write

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example, StepEnds, TokenSequence
from posttrain.errors import DataError
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.formats.stepwise import in_steps
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.preparation.examples import Preparation
from posttrain_plugins.preparation.supervision import separated
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.library import named_template
from posttrain_plugins.templates.steps import APART, places
from posttrain_plugins.trainers.prm import Prm, PrmOptions

Row = Mapping[str, Any]
CHATML = named_template("chatml")
WORDS = ["fox", "jumps", "да", "👍", "It said:", "lazy  dog", "up!"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Encoder]:
    @cache
    def made(kind: str, bos: bool = True) -> Encoder:
        controls = [*CHATML.tokens, "<sep>"]
        target = tmp_path_factory.mktemp("tokenizers") / kind
        return Encoder.open(write(target, kind, CHATML.source, controls, bos=bos, eos="</s>"))

    return made


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    directory = tmp_path_factory.mktemp("characters")
    char_tokenizer(directory)
    return Encoder.open(directory)


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def row_of(*steps: Any, prompt: Any = "quick brown ", **columns: Any) -> Row:
    return {"prompt": prompt, "completions": list(steps), "labels": [True] * len(steps), **columns}


def encoded(encoder: Encoder, row: Row, separator: str = "\n") -> Any:
    (found,) = encoder.encode([separated(in_steps(row), separator)])
    if isinstance(found, DataError):
        raise found
    return found


def letters(text: str) -> str:
    """A text without what some tokenizers lose or double: white space, and what they do not know."""
    return re.sub(r"\s|##|<unk>|\[UNK\]|👍", "", text)


def prefixes(encoder: Encoder, found: Any) -> list[str]:
    """What the model has read at each place."""
    return [encoder.decode(found.tokens[: place + 1], skip_special=False) for place in found.steps]


def examples(encoder: Encoder, rows: Sequence[Row], **options: Any) -> tuple[list[Example], Account]:
    config = PrmOptions(**{key: value for key, value in options.items() if key in PrmOptions.model_fields})
    trainer, stepwise, account = Prm(), format_of("stepwise"), Account()
    preparation = Preparation(
        lambda row: trainer.passages(row, stepwise, frozenset()),
        encoder,
        config.max_length,
        config.truncation,
        supervise=trainer.supervise_held_out(config)
        if options.get("held_out")
        else trainer.supervise(config),
        verdicts=lambda row: trainer.verdicts(row, stepwise, frozenset()),
    )
    return list(preparation.examples(rows, account)), account


def judged(sequence: TokenSequence) -> list[int]:
    return [place for place, asked in enumerate(sequence.supervised) if asked]


@pytest.mark.parametrize("separator", ["\n", "\n\n", " ", "", "<sep>", " <sep>\n"], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_each_place_is_the_last_token_of_its_step(
    kind: str, separator: str, encoders: Callable[..., Encoder]
) -> None:
    encoder, draw = encoders(kind), random.Random(separator)
    for _ in range(30):
        steps = [" ".join(draw.choices(WORDS, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 5))]
        found = encoded(encoder, row_of(*steps), separator)
        assert len(found.steps) == len(steps)
        text = "quick brown "
        for step, read in zip(steps, prefixes(encoder, found), strict=True):
            text += step + separator
            if kind == "byte-level":
                assert read == f"<s>{text}"
            assert letters(read.removeprefix("<s>")) == letters(text)


@pytest.mark.parametrize("kind", ["byte-level", "word-piece"])
def test_tokens_are_those_of_the_whole_text(kind: str, encoders: Callable[..., Encoder]) -> None:
    encoder = encoders(kind)
    found = encoded(encoder, row_of("The quick", "fox jumps.", prompt="Look it up!\n"))
    text = "Look it up!\nThe quick\nfox jumps.\n"
    assert found.tokens == [encoder.bos_id, *encoder.files.plain.encode(text).ids]
    assert found.notes == ()


def test_nothing_closes_an_answer(characters: Encoder) -> None:
    found = encoded(characters, row_of("a", "bc"))
    assert characters.decode(found.tokens, skip_special=False) == "quick brown a\nbc\n"
    assert found.steps == (13, 16)
    assert found.supervised == [False] * 12 + [True] * 5


@pytest.mark.parametrize("bos", [True, False])
def test_a_token_that_would_join_steps_is_kept_apart_and_told(
    bos: bool, encoders: Callable[..., Encoder]
) -> None:
    """Byte-level tokenizers make one token of ` fox`: the separator would be read in the next step's token."""
    encoder = encoders("byte-level", bos)
    row = row_of("The quick brown", "fox jumps", "over the lazy dog")
    whole = encoder.files.plain.encode("quick brown The quick brown fox jumps over the lazy dog ")
    assert {" fox", " over"} <= {encoder.decode([token]) for token in whole.ids}
    found = encoded(encoder, row, " ")
    assert found.notes == (APART,)
    assert [read.removeprefix("<s>") for read in prefixes(encoder, found)] == [
        "quick brown The quick brown ",
        "quick brown The quick brown fox jumps ",
        "quick brown The quick brown fox jumps over the lazy dog ",
    ]
    assert (found.tokens[0] == encoder.bos_id) is bos
    _, account = examples(encoder, [row, row_of("The", "fox")], step_separator=" ")
    assert account.remarks.counts[APART.message] == 2


def test_a_character_of_several_tokens_ends_with_the_last_of_them() -> None:
    offsets = [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert places(offsets, 1, [2, 3]) == [3, 4]
    assert places([(0, 2), (2, 4)], 0, [3, 4]) is None


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_step_that_ends_with_the_separator_gets_no_second_one(end: str) -> None:
    passage = separated(in_steps(row_of("a" + end, "b\n\n", "c")), "\n")
    assert passage.completion == "a\nb\n\nc\n"
    assert passage.steps == (2, 5, 7)


def test_a_string_in_steps_goes_on_where_messages_open_an_answer(characters: Encoder) -> None:
    found = encoded(characters, row_of("x is 3", "so 4", prompt=[ask("what?")]))
    opened = characters.decode(characters.encode_prompt([ask("what?")]), skip_special=False)
    assert prefixes(characters, found) == [f"{opened}x is 3\n", f"{opened}x is 3\nso 4\n"]
    assert found.steps[-1] == len(found.tokens) - 1


@pytest.mark.parametrize("prompt", ["hi", [ask("hi")]])
def test_a_step_of_turns_ends_with_its_last_assistant_turn(prompt: Any, characters: Encoder) -> None:
    steps = [say("look it up")], [say("so"), ask("sure?"), say("yes")], [say("done"), ask("thanks")]
    found = encoded(characters, row_of(*steps, prompt=prompt))
    assert [read.rpartition("assistant\n")[2] for read in prefixes(characters, found)] == [
        "look it up<|im_end|>",
        "yes<|im_end|>",
        "done<|im_end|>",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_end_with_their_end_of_turn_in_every_tokenizer(
    kind: str, encoders: Callable[..., Encoder]
) -> None:
    encoder = encoders(kind)
    row = row_of([say("fox")], [say("lazy dog <|im_end|>")], prompt=[ask("да <|im_end|>")])
    found = encoded(encoder, row)
    end = encoder.files.plain.token_to_id("<|im_end|>")
    assert [found.tokens[place] for place in found.steps] == [end, end]
    assert any(note.code == "control-token" for note in found.notes)


def test_a_step_that_the_template_does_not_show_is_refused(characters: Encoder) -> None:
    row = row_of([say("a")], [{**say("b"), "weight": 0}], prompt=[ask("hi")])
    with pytest.raises(DataError, match="step 2 has no assistant turn that is shown and learned"):
        encoded(characters, row)


def test_a_step_of_which_the_tokenizer_leaves_nothing_is_refused(encoders: Callable[..., Encoder]) -> None:
    with pytest.raises(DataError, match="leaves nothing of step 2"):
        encoded(encoders("word-piece"), row_of("The", "\t", "fox"))


def test_a_template_that_ends_turns_with_plain_text_is_refused(tmp_path: Path) -> None:
    """Byte-level tokenizers would put the space that closes a turn into the next turn's token."""
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    directory = write(tmp_path, "byte-level", template, (), bos=False, eos="</s>")
    with pytest.raises(DataError, match="closes message 2 with no special token"):
        encoded(Encoder.open(directory), row_of([say("quick")], [say("fox")], prompt=[ask("The")]))


@pytest.mark.parametrize("asked", ["Look", "Look <|im_end|>"])
def test_steps_behind_messages_are_kept_apart_too(asked: str, encoders: Callable[..., Encoder]) -> None:
    encoder = encoders("byte-level")
    found = encoded(encoder, row_of("The quick", "fox jumps", "over", prompt=[ask(asked)]), " ")
    opened = encoder.decode(encoder.encode_prompt([ask(asked)]), skip_special=False)
    assert prefixes(encoder, found) == [
        f"{opened}The quick ",
        f"{opened}The quick fox jumps ",
        f"{opened}The quick fox jumps over ",
    ]
    spelled = ["control-token"] if "<" in asked else []
    assert [note.code for note in found.notes] == [*spelled, "steps-apart"]


def test_labels_are_probabilities_whatever_their_type(characters: Encoder) -> None:
    ((first,), _) = examples(characters, [row_of("a", "b", "c") | {"labels": [True, 0, 0.25]}])
    assert first.verdicts == (1.0, 0.0, 0.25)
    assert first.sequences[0].own
    assert judged(first.sequences[0]) == [13, 15, 17]


def test_the_last_step_alone_is_learned_and_all_are_evaluated(characters: Encoder) -> None:
    rows = [row_of("a", "b", "c") | {"labels": [True, False, 0.5]}, row_of("d") | {"labels": [False]}]
    learned, _ = examples(characters, rows, train_on_last_step_only=True)
    assert [(judged(each.sequences[0]), each.verdicts) for each in learned] == [
        ([17], (0.5,)),
        ([13], (0.0,)),
    ]
    held_out, _ = examples(characters, rows, train_on_last_step_only=True, held_out=True)
    assert [len(each.verdicts) for each in held_out] == [3, 1]


@pytest.mark.parametrize(("limit", "kept"), [(18, 3), (17, 2), (16, 2), (15, 1), (14, 1)])
def test_steps_that_are_cut_off_lose_their_labels(limit: int, kept: int, characters: Encoder) -> None:
    rows = [row_of("a", "b", "c") | {"labels": [True, False, 0.5]}]
    ((first,), account) = examples(characters, rows, max_length=limit)
    assert first.verdicts == (1.0, 0.0, 0.5)[:kept]
    assert judged(first.sequences[0]) == [13, 15, 17][:kept]
    assert account.truncated == (limit < 18)


def test_a_row_that_loses_its_learned_steps_is_dropped_and_counted(characters: Encoder) -> None:
    rows = [row_of("a", "b", "c")]
    for limit, options in ((13, {}), (17, {"train_on_last_step_only": True})):
        found, account = examples(characters, rows, max_length=limit, **options)
        assert found == []
        assert account.dropped == {f"truncation to {limit} tokens removes every supervised token": 1}


def test_cutting_the_prompt_leaves_the_answer_whole(characters: Encoder) -> None:
    rows = [row_of("a", "b", "c") | {"labels": [True, False, 0.5]}]
    ((first,), _) = examples(characters, rows, max_length=8, truncation="keep_end")
    assert characters.decode(first.sequences[0].tokens) == "n a\nb\nc\n"[-8:]
    assert first.verdicts == (1.0, 0.0, 0.5)
    assert first.sequences[0].prompt == 2
    found, account = examples(characters, rows, max_length=5, truncation="keep_end")
    assert found == []
    assert account.dropped == {"the prompt cannot be cut far enough to fit 5 tokens": 1}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": [True, False]}, "`labels` has 2 entries for 3 `completions`"),
        ({"completions": ["a"]}, "`labels` has 3 entries for 1 `completions`"),
        ({"completions": []}, "`completions` is an empty list"),
        ({"completions": ["a", " \n", "c"]}, "`completions` step 2 is empty"),
        ({"completions": ["a", [say("b")], "c"]}, "`completions` step 2 is a list, but step 1 a string"),
        ({"labels": [True, float("nan"), False]}, "`labels` entry 2 is nan; a probability is from 0 to 1"),
        ({"labels": [True, 1.5, False]}, "`labels` entry 2 is 1.5; a probability is from 0 to 1"),
        ({"labels": [True, "yes", False]}, '`labels` entry 2 is the string "yes", not true'),
        ({"labels": None}, "`labels` is null, not a list of labels"),
        ({"completions": [[ask("b")]], "labels": [1]}, "`completions` step 1 begins with a `user` turn"),
    ],
)
def test_rows_are_refused_by_name(changes: Row, problem: str) -> None:
    found = format_of("stepwise").problem({**row_of("a", "b", "c"), **changes})
    assert found is not None
    assert found.startswith(problem)


def test_steps_without_labels_are_refused() -> None:
    row = {"prompt": "q", "completions": ["a"]}
    found = format_of("stepwise").problem(row)
    assert found is not None
    assert found.startswith("no column `labels`; the row has `prompt`, `completions`")


def test_nothing_else_has_steps(characters: Encoder) -> None:
    (found,) = characters.encode([Passage("completion", "a", "b")])
    assert found.steps == ()
    assert StepEnds().separator == "\n"
