"""What trl 1.16.0 and posttrain make of strings, arguments, dates and tools."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import OPEN_ENDED
from helpers.row_parity import AFFIXES, Labelled, labelled, prepared, sequences
from helpers.scripts import CONVERSATIONS, assistant, user
from helpers.tokenizers_of_all_kinds import KINDS
from helpers.trl_comparison import Bench, standing_clock
from helpers.trl_masks import (
    ORIGINALS,
    Prepared,
    Subject,
    opened,
    sft,
    streamed,
)
from tokenizers import Tokenizer, processors

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Supervise
from posttrain.errors import DataError
from posttrain_plugins.templates.encoder import Encoder

pytestmark = [
    pytest.mark.slow,
    # trl 1.16.0 uses names that transformers 5.24 has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TEXTS = ("hello", "  leading", "The fox</s>", "<s>begun", "a</s>b", "end \n", "привет 🌍", "", "</s>")

PAIRS = (
    ("да ", "ναι"),
    ("Hello", " world"),
    ("Hello ", "world"),
    ("", "answer"),
    ("a", ""),
    ("The qui", "ck brown fox"),
    ("jum", "ps</s>"),
    ("look it up!\n", "\nuser"),
    ("<s>q", "a"),
    ("q</s>", "a"),
)


@pytest.fixture(scope="module", params=KINDS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models of one kind of tokenizer that put something around texts."""
    made = Subject("plain", OPEN_ENDED, (), "</s>").write(
        tmp_path_factory.mktemp("plain") / "0", request.param
    )

    def around(affix: str) -> Path:
        tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
        tokens = [
            (token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>") if token in AFFIXES[affix]
        ]
        tokenizer.post_processor = processors.TemplateProcessing(AFFIXES[affix], special_tokens=tokens)
        tokenizer.save(str(made / "tokenizer.json"))
        return made

    return around


def once(pair: Prepared, bos: int, eos: int) -> Prepared:
    """Take away what TRL has twice: what the tokenizer adds and what the text or TRL itself has."""
    tokens, learned = pair.tokens, pair.learned
    if tokens[:2] == [bos, bos]:
        tokens, learned = tokens[1:], learned[1:]
    if tokens[-2:] == [eos, eos]:
        tokens, learned = [*tokens[:-2], eos], [*learned[:-2], learned[-1]]
    return Prepared(tokens, learned)


def only(encoder: Encoder, prompt: str | None, completion: str) -> Labelled:
    (mine,) = encoder.encode([Passage("completion", prompt, completion)])
    assert not isinstance(mine, DataError)
    return labelled(mine.tokens, mine.supervised)


@pytest.mark.parametrize("affix", AFFIXES)
def test_texts_are_the_same_but_begin_and_end_once(plain: Callable[[str], Path], affix: str):
    directory = plain(affix)
    tokenizer, encoder = opened(directory), Encoder.open(directory)
    bos, eos = encoder.bos_id, encoder.eos_id
    assert bos is not None and eos is not None
    doubled = 0
    for text in TEXTS:
        theirs = Prepared.of(sft(tokenizer, streamed([{"text": text}]))[0])
        single = once(theirs, bos, eos)
        assert only(encoder, None, text) == labelled(single.tokens, single.learned), text
        doubled += single.tokens != theirs.tokens
    assert doubled == {"beginning": 1, "nothing": 0, "both": len(TEXTS)}[affix]


@pytest.mark.parametrize("affix", AFFIXES)
def test_answers_are_the_same_unless_a_token_would_reach_into_the_prompt(
    plain: Callable[[str], Path], affix: str
):
    directory = plain(affix)
    tokenizer, encoder = opened(directory), Encoder.open(directory)
    bos, eos = encoder.bos_id, encoder.eos_id
    assert bos is not None and eos is not None
    for prompt, completion in PAIRS:
        row = {"prompt": prompt, "completion": completion}
        theirs = once(Prepared.of(sft(tokenizer, streamed([row]))[0]), bos, eos)
        mine = only(encoder, prompt, completion)
        if mine == labelled(theirs.tokens, theirs.learned):
            continue
        before = encoder.encode_prompt(prompt)
        assert theirs.tokens[: len(before)] != before, (
            "TRL's prompt is not the one that a generation starts from"
        )
        assert (
            list(mine[0][: len(before)]) == before
            and mine[1] == labelled(mine[0], [False] * len(before) + [True] * (len(mine[0]) - len(before)))[1]
        )


# Everything learned, arguments, dates, tools


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return ORIGINALS["llama3"].write(tmp_path / "llama")


CHATS = [
    {"messages": list(conversation.messages)}
    for name, conversation in CONVERSATIONS.items()
    if name in ("single", "multi", "system", "empty-answer", "white-space", "emoji")
]


def test_trl_learns_everything_of_conversations_unless_told_otherwise(llama: Path):
    theirs = [Prepared.of(row) for row in sft(opened(llama), streamed(CHATS))]
    assert all(all(each.learned) for each in theirs)
    everything = sequences(prepared(llama, CHATS, "messages", supervise=Supervise.EVERYTHING))
    assert everything == [[labelled(each.tokens, each.learned)] for each in theirs]
    answers = sequences(prepared(llama, CHATS, "messages"))
    assert [row[0][0] for row in answers] == [tuple(each.tokens) for each in theirs]
    assert all(sum(row[0][1]) < len(row[0][1]) - 1 for row in answers)


def test_arguments_of_the_template_are_the_same(tmp_path: Path):
    bench = Bench(ORIGINALS["qwen3"], "byte-level", tmp_path)
    row = {"prompt": [user()], "completion": [assistant()]}
    (plain_row,) = sft(bench.tokenizer, streamed([row]))
    arguments = {"enable_thinking": False}
    (told,) = sft(bench.tokenizer, streamed([{**row, "chat_template_kwargs": arguments}]))
    (mine,) = bench.encoder.encode([Passage("completion", [user()], [assistant()], None, arguments)])
    assert not isinstance(mine, DataError)
    assert told["input_ids"] == mine.tokens
    assert [label != -100 for label in told["labels"]][:-1] == mine.supervised[:-1], (
        "up to a line break at the end"
    )
    first = mine.supervised.index(True)
    assert sum(label != -100 for label in plain_row["labels"]) > len(mine.tokens) - first, (
        "the empty thought is given"
    )


def test_trl_tells_templates_the_day_of_the_run(tmp_path: Path):
    directory = ORIGINALS["llama3_2"].write(tmp_path / "model")
    tokenizer, encoder = opened(directory), Encoder.open(directory)
    row = {"messages": [user(), assistant()]}
    with standing_clock(dt.datetime(2031, 5, 4)):
        (later,) = sft(tokenizer, streamed([row]))
    assert "04 May 2031" in tokenizer.decode(later["input_ids"])
    mine = encoder.encode_messages(row["messages"])
    assert "26 Jul 2024" in encoder.decode(mine.tokens, skip_special=False)


def test_arrow_merges_calls_that_jsonl_keeps_apart(tmp_path: Path):
    from datasets import Dataset

    def calling(**arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [user(), assistant("", tool_calls=[call])]}

    bench = Bench(ORIGINALS["qwen2_5"], "byte-level", tmp_path)
    rows = [calling(word="a"), calling(number=3)]
    merged = sft(bench.tokenizer, Dataset.from_list(rows))
    alone = sft(bench.tokenizer, streamed(rows))
    mine = [
        each.tokens
        for each in bench.encoder.encode([Passage("completion", None, r["messages"]) for r in rows])
    ]  # type: ignore[union-attr]
    assert mine == [row["input_ids"] for row in alone]
    assert mine != [row["input_ids"] for row in merged]
    assert '"number": null' in bench.tokenizer.decode(merged[0]["input_ids"])


def test_an_answer_that_nothing_ends_is_refused(tmp_path: Path):
    directory = Subject("open", OPEN_ENDED, (), "</s>").write(tmp_path / "open")
    row = {"prompt": [user()], "completion": [assistant()]}
    (theirs,) = sft(opened(directory), streamed([row]))
    assert theirs["input_ids"][-1] != Encoder.open(directory).eos_id
    with pytest.raises(DataError, match="never learn to stop"):
        Encoder.open(directory).encode_pair(row["prompt"], row["completion"])
