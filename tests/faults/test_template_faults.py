"""What chat templates and special tokens did to conversations unnoticed in other projects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.nasty import EOS, encoder_of, ends
from helpers.scripts import ASSISTANT, CONVERSATIONS, Conversation, assistant, letters, user
from helpers.tokenizers_of_all_kinds import KINDS, write
from jinja2 import TemplateError
from tokenizers import Tokenizer, processors

from posttrain.contracts.passage import Passage
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.templates.encoded import Encoded
from posttrain_plugins.templates.encoder import CLOCK, Encoder
from posttrain_plugins.templates.library import TEMPLATES, named_template
from posttrain_plugins.trainers.dpo import Dpo

Encoders = Callable[..., Encoder]
EVERY_TEMPLATE = pytest.mark.parametrize("name", TEMPLATES)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    directory = tmp_path_factory.mktemp("models")
    return cache(lambda name, kind="byte-level": encoder_of(directory, kind, name))


def encoded(encoder: Encoder, passage: Passage) -> Encoded:
    (found,) = encoder.encode([passage])
    assert isinstance(found, Encoded), found
    return found


def learned(encoder: Encoder, found: Encoded) -> str:
    ids = [token for token, counts in zip(found.tokens, found.supervised, strict=True) if counts]
    return encoder.decode(ids, skip_special=False)


def chat(*contents: str) -> Passage:
    speakers = (user, assistant)
    return Passage("completion", None, [speakers[at % 2](each) for at, each in enumerate(contents)])


@pytest.mark.parametrize("kind", KINDS)
@EVERY_TEMPLATE
def test_a_text_begins_once(encoders: Encoders, name: str, kind: str) -> None:
    """A template prints a beginning and the tokenizer adds another, in training, in generation or in both."""
    encoder = encoders(name, kind)
    passage = chat("да", "ναι")
    found, text = encoded(encoder, passage), encoder.read(passage).text
    assert found.tokens.count(encoder.bos_id) == text.count("<s>") <= 1
    assert encoder.bos_twice is bool(text.count("<s>"))
    prompt = encoder.encode_prompt([user("да")])
    assert prompt == found.tokens[: len(prompt)] or found.straddling, "a generation starts as training does"
    assert prompt.count(encoder.bos_id) == text.count("<s>")
    plain = [
        encoder.encode_text("ναι"),
        encoder.encode_pair("да", "ναι"),
        encoder.encode_pair("<s>да", "ναι"),
    ]
    assert [each.tokens.count(encoder.bos_id) for each in plain] == [1, 1, 1]
    assert plain[1] == plain[2]


def test_beginning_and_end_may_be_the_same_token(tmp_path: Path) -> None:
    """Who takes the second beginning away by its id takes the end with it."""
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    write(tmp_path, "byte-level", source, (EOS,), bos=False, eos=EOS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, end)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(f'{{"bos_token": "{EOS}", "eos_token": "{EOS}"}}')
    encoder = Encoder.open(tmp_path)
    found = encoded(encoder, chat("да", "ναι"))
    assert encoder.decode(found.tokens, skip_special=False) == f"{EOS}userда{EOS}assistantναι{EOS}"
    assert learned(encoder, found) == f"ναι{EOS}"
    pair = encoder.encode_pair("да", "ναι")
    assert [at for at, token in enumerate(pair.tokens) if token == end] == [0, len(pair.tokens) - 1]
    assert pair.supervised[-1] and not pair.supervised[0]


@EVERY_TEMPLATE
def test_an_answer_ends_once(encoders: Encoders, name: str) -> None:
    """An end token is put behind a text that the template has ended, and none behind one that nobody did."""
    encoder = encoders(name)
    passage = chat("да", "ναι")
    found, text = encoded(encoder, passage), encoder.read(passage).text
    assert encoder.decode(found.tokens, skip_special=False) == text, (
        "nothing is put behind what the template writes"
    )
    assert found.tokens.count(encoder.end_of_turn) == text.count(ends(named_template(name))[0])
    said = [token for token, counts in zip(found.tokens, found.supervised, strict=True) if counts]
    assert said.count(encoder.end_of_turn) == 1 and said[-1] == encoder.end_of_turn
    for plain in (encoder.encode_text("ναι"), encoder.encode_pair("да", "ναι")):
        assert plain.tokens.count(encoder.eos_id) == 1
        assert plain.tokens[-1] == encoder.eos_id and plain.supervised[-1]


@EVERY_TEMPLATE
def test_no_tools_leave_no_trace(encoders: Encoders, name: str) -> None:
    """An empty list of tools makes some templates print what introduces tools."""
    encoder, messages = encoders(name), [user("да"), assistant("ναι")]
    without, none = (encoder.read(Passage("completion", None, messages, tools)) for tools in (None, []))
    assert none == without
    assert encoder.encode_prompt(messages[:1], []) == encoder.encode_prompt(messages[:1])


def rendered(encoder: Encoder, conversation: Conversation) -> str | None:
    """What transformers makes of a whole conversation; None when the template refuses."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    assert encoder.template is not None
    messages = [dict(message) for message in conversation.messages]
    for message in messages:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    try:
        text: str = _compile_jinja_template(encoder.template.source).render(
            messages=messages,
            tools=conversation.tools,
            documents=None,
            add_generation_prompt=False,
            strftime_now=CLOCK.strftime,
            **encoder.files.special_tokens,
        )
    except (TemplateError, TypeError):
        return None
    return text


@EVERY_TEMPLATE
def test_a_conversation_is_tokenized_as_a_whole(encoders: Encoders, name: str) -> None:
    """Message by message, system blocks come twice, tools are forgotten and reasoning is kept or lost."""
    encoder, shown = encoders(name), 0
    tokenizer = Tokenizer.from_str(encoder.files.plain.to_str())
    for conversation in CONVERSATIONS.values():
        text = rendered(encoder, conversation)
        if text is not None:
            found = encoded(encoder, Passage("completion", None, conversation.messages, conversation.tools))
            assert found.tokens == tokenizer.encode(text, add_special_tokens=False).ids
            shown += 1
    assert shown >= 6


@EVERY_TEMPLATE
def test_each_answer_is_learned_once_though_earlier_reasoning_is_dropped(
    encoders: Encoders, name: str
) -> None:
    """What is not a prefix of itself cannot be taken apart by lengths: users' words were learned, answers twice."""
    rounds = ["άλφα", "βήτα", "γάμμα"]
    messages = [
        message
        for number, word in enumerate(rounds)
        for message in (user("б" * (number + 1)), assistant(word, reasoning_content=f"ξ{number}"))
    ]
    encoder, passage = encoders(name), Passage("completion", None, messages)
    reading, found = encoder.read(passage), encoded(encoders(name), passage)
    assert [reading.text.count(word) for word in rounds] == [1, 1, 1]
    said = [reading.text[start:end] for start, end in reading.spans]
    assert [word in part for word, part in zip(rounds, said, strict=True)] == [True, True, True]
    assert "б" not in learned(encoder, found)
    thoughts = letters(ASSISTANT, reading.text).count("ξ")
    assert letters(ASSISTANT, learned(encoder, found)).count("ξ") == thoughts
    lost = [note.turn for note in reading.notes if note.code == "dropped-field"]
    assert thoughts + len(lost) == len(rounds), "each is shown and learned, or told"


@pytest.mark.parametrize("name", ["deepseek-r1", "qwen-3", "harmony"])
def test_one_side_of_a_pair_may_think(encoders: Encoders, name: str) -> None:
    """A prompt that opens the reasoning was shortened to what both sides share, and an answer lost its beginning."""
    encoder = encoders(name)
    row = {
        "prompt": [user("да")],
        "chosen": [assistant("ναι", reasoning_content="σκέψη")],
        "rejected": [assistant("όχι")],
    }
    prompt = encoder.encode_prompt(row["prompt"])
    passages = format_of("preference").passages(row)
    for passage, tokens in zip(passages, encoder.encode(passages), strict=True):
        assert isinstance(tokens, Encoded)
        whole = encoder.encode_messages([*row["prompt"], *row[passage.role]])
        assert tokens.tokens == whole.tokens
        assert tokens.tokens[: len(prompt)] == prompt
        assert tokens.supervised[: len(prompt) + 1] == [*[False] * len(prompt), True]
        assert letters(ASSISTANT, learned(encoder, tokens)) == letters(
            ASSISTANT, [row[passage.role][0].get("reasoning_content", ""), row[passage.role][0]["content"]]
        )
    made = prepare(
        Dpo(),
        [row],
        encoder,
        format_of("preference"),
        max_length=None,
        truncation="error",
        weight_column=None,
    )
    assert made.examples[0].prefix >= len(prompt)


THINKING: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "asked for": ({}, "<think>\n\n</think>\n\nναι<|im_end|>", "<think>\nσκέψη\n</think>\n\nναι<|im_end|>"),
    "switched off": ({"enable_thinking": False}, "ναι<|im_end|>", "σκέψη\n</think>\n\nναι<|im_end|>"),
}


@pytest.mark.parametrize("how", THINKING)
def test_what_the_prompt_supplies_is_not_learned(encoders: Encoders, how: str) -> None:
    """The empty reasoning that a prompt holds when thinking is off was learned, or not learned when it is on."""
    arguments, without, with_thought = THINKING[how]
    encoder = encoders("qwen-3")
    passage = Passage("completion", [user("да")], [assistant("ναι")], None, arguments)
    prompt = encoder.encode_prompt([user("да")], None, arguments)
    found = encoded(encoder, passage)
    assert learned(encoder, found) == without
    assert found.tokens[: len(prompt)] == prompt
    thought = assistant("ναι", reasoning_content="σκέψη")
    thoughtful = Passage("completion", [user("да")], [thought], None, arguments)
    assert learned(encoder, encoded(encoder, thoughtful)) == with_thought
    notes = {note.code for note in encoder.read(thoughtful).notes}
    assert ("partial-prompt" in notes) is bool(arguments), "reasoning where thinking is off is told"


@EVERY_TEMPLATE
def test_speakers_of_other_names_are_told_apart(encoders: Encoders, name: str) -> None:
    """Roles were compared before they were renamed, so that nobody's turns or everybody's were learned."""
    turns = [("human", "да"), ("gpt", "ναι"), ("human", "и"), ("gpt", "όχι")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    (canonical,) = format_of("sharegpt").rows(row)
    (passage,) = format_of("messages").passages(canonical)
    encoder = encoders(name)
    reading, found = encoder.read(passage), encoded(encoder, passage)
    said = [reading.text[start:end].strip() for start, end in reading.spans]
    closing = ends(named_template(name))
    for text, part in zip(("ναι", "όχι"), said, strict=True):
        assert part.endswith(tuple(text + end for end in closing) + tuple(f"{text} {end}" for end in closing))
    assert "".join(learned(encoder, found).split()) == "".join("".join(said).split())
