from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.chat_templates import (
    BY_INDEX,
    CLOSED_BY_ROLES,
    COLLECTED,
    HEADERS_AND_DATE,
    LAST_LEFT_OPEN,
    MARKED,
    MERGING,
    OPEN_ENDED,
    RANDOM,
    REASONING,
    REORDERING,
    STYLES,
    SYSTEM_BY_DEFAULT,
    WITHOUT_CONTENT,
)
from helpers.conversations import TOOL, assistant, call, conversations, result, user
from helpers.models import ALPHABET
from tokenizers import Tokenizer

from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.models.vocabulary import character_tokenizer
from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.encoder import CLOCK
from posttrain_plugins.templates.reader import Reader
from posttrain_plugins.templates.reading import Reading, Span, apart
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.tokenizer import TokenizerFiles

SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def reader(source: str | None) -> Reader:
    tokenizer: Tokenizer = character_tokenizer([ALPHABET + "<>|_é"])
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|tool|>"])
    tokenizer.add_tokens(TAGS)
    files = TokenizerFiles(json.loads(tokenizer.to_str()), {}, SPECIAL, source)
    template = None if source is None else ChatTemplate(source, SPECIAL)
    return Reader(template, Controls(files), CLOCK, "here")


def read(source: str | None, *messages: Any, prompt: Any = None, **given: Any) -> Reading:
    return reader(source).read(Passage("completion", prompt, list(messages), **given))


def shown(reading: Reading) -> str:
    """The text with what is supervised in brackets."""
    text, at = "", 0
    for start, end in reading.spans:
        text += f"{reading.text[at:start]}⟦{reading.text[start:end]}⟧"
        at = end
    return text + reading.text[at:]


def codes(reading: Reading) -> list[tuple[str, int | None]]:
    return [(note.code, note.turn) for note in reading.notes]


def test_every_assistant_turn_of_a_completion_is_read() -> None:
    reading = read(SYSTEM_BY_DEFAULT, user("u"), assistant("a"), user("v"), assistant("b"))
    assert shown(reading) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n⟦a<|im_end|>⟧\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    )
    assert [(turn.message, turn.end_of_turn) for turn in reading.turns] == [
        (1, "<|im_end|>"),
        (3, "<|im_end|>"),
    ]
    assert [reading.text[own.start : own.end] for turn in reading.turns for own in turn.own] == ["a", "b"]
    assert reading.notes == ()


def test_the_turns_of_a_prompt_are_not() -> None:
    prompt = [user("u"), assistant("a"), user("v")]
    reading = read(SYSTEM_BY_DEFAULT, assistant("b"), prompt=prompt)
    assert "assistant\na<|im_end|>" in shown(reading)
    assert shown(reading).endswith("assistant\n⟦b<|im_end|>⟧\n")


def test_strings_prompts_and_mixtures_are_read() -> None:
    chat = reader(SYSTEM_BY_DEFAULT)
    strings = chat.read(Passage("completion", "2+2=", "4"))
    assert (strings.text, strings.spans) == ("2+2=4", (Span(4, 5),))
    assert chat.read(Passage("completion", None, "ab")).spans == (Span(0, 2),)
    assert chat.read(Passage("prompt", "ab", None)) == Reading("ab")
    assert chat.read(Passage("completion", "ab", "")).spans == ()
    mixed = [
        chat.read(Passage("completion", "u", [assistant("a")])),
        chat.read(Passage("completion", [user("u")], "a")),
    ]
    assert mixed[0] == mixed[1] == chat.read(Passage("completion", [user("u")], [assistant("a")]))
    opened = chat.read(Passage("prompt", [user("u")], None))
    assert opened.text.endswith("u<|im_end|>\n<|im_start|>assistant\n")
    assert (opened.spans, opened.turns) == ((), ())


def test_an_empty_answer_is_its_end_of_turn() -> None:
    reading = read(SYSTEM_BY_DEFAULT, user("u"), assistant(""))
    assert shown(reading).endswith("assistant\n⟦<|im_end|>⟧\n")


def test_a_weight_of_zero_keeps_a_turn_out() -> None:
    turns = [user("u"), assistant("a", weight=0), user("v"), assistant("b", weight=1)]
    reading = read(SYSTEM_BY_DEFAULT, *turns)
    assert [turn.message for turn in reading.turns] == [3]
    bare = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    assert reading.text == read(SYSTEM_BY_DEFAULT, *bare).text
    with pytest.raises(DataError, match="every assistant turn has weight 0"):
        read(SYSTEM_BY_DEFAULT, user("u"), assistant("a", weight=0))
    with pytest.raises(DataError, match="neither 0 nor 1") as caught:
        read(SYSTEM_BY_DEFAULT, user("u"), assistant("a", weight=0.5))
    assert caught.value.found == "0.5"


def test_reasoning_that_is_dropped_from_earlier_turns_is_told() -> None:
    answer = assistant("x", reasoning_content="why")
    reading = read(REASONING, user("u"), answer, user("v"), {**answer, "content": "y"})
    assert shown(reading) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n⟦x<|im_end|>⟧\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n⟦<think>why</think>y<|im_end|>⟧\n"
    )
    assert codes(reading) == [("dropped-field", 1)]
    assert reading.turns[0].notes == reading.notes
    assert "`reasoning_content`" in reading.notes[0].message


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_one_field_under_all_of_its_names(name: str) -> None:
    reading = read(REASONING, user("u"), assistant("x", **{name: "why"}))
    assert "⟦<think>why</think>x<|im_end|>⟧" in shown(reading)
    assert reading.notes == ()


def test_every_field_that_is_not_shown_is_told() -> None:
    called = assistant("x", tool_calls=[call({"word": "w"})], name="m")
    reading = read(
        SYSTEM_BY_DEFAULT, {**user("u"), "name": "n"}, called, result("t"), assistant("y"), tools=[TOOL]
    )
    told = [
        (note.turn, note.message.split("`")[1] if "`" in note.message else note.message)
        for note in reading.notes
    ]
    assert told == [
        (None, "the chat template does not show the tools"),
        *[(0, "name"), (1, "tool_calls"), (1, "name"), (2, "name")],
    ]
    assert {note.code for note in reading.notes} == {"dropped-field"}


def test_a_call_that_is_all_of_a_message_names_templates_that_show_calls() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [call({"word": "w"})]}
    with pytest.raises(DataError, match="message 2 has tool calls and no content") as caught:
        read(SYSTEM_BY_DEFAULT, user("u"), called, result("t"), assistant("y"))
    assert "does not show tool calls" in caught.value.message
    named = str(caught.value.fix).rpartition(": ")[2].split(", ")
    assert {"qwen-2.5", "qwen-3", "llama-3.1", "mistral-v3", "harmony"} <= set(named)
    assert not {"chatml", "vicuna", "llama-3", "zephyr"} & set(named)
    with pytest.raises(DataError) as caught:
        read(SYSTEM_BY_DEFAULT, user("u"), {"role": "assistant", "content": None})
    assert "tool calls" not in caught.value.message


def test_parts_that_are_printed_as_a_list_are_told() -> None:
    parts = [{"type": "text", "text": "it's"}, {"type": "text", "text": "a"}]
    source = "{% for m in messages %}<|user|>{{ m.content }}<|im_end|>{% endfor %}"
    told = read(source, user(parts), assistant(parts)).notes
    assert [(note.code, note.turn) for note in told] == [("rewritten", 0), ("rewritten", 1)]
    assert "prints the parts of `content` as a Python list" in told[0].message
    shows = source.replace("m.content", "m.content | map(attribute='text') | join")
    reading = read(shows, user(parts), assistant(parts))
    assert "<|user|>it'sa<|im_end|>" in reading.text
    assert reading.notes == ()


def test_trimmed_text_is_told_and_left_out() -> None:
    trimming = HEADERS_AND_DATE.replace("<|eot_id|>", "<|im_end|>")
    reading = read(trimming, user(" u"), assistant("  a \n"))
    assert shown(reading).endswith("<|end_header_id|>\n\n⟦a<|im_end|>⟧")
    assert codes(reading) == [("trimmed", 0), ("trimmed", 1)]
    assert read(BY_INDEX, user("u"), assistant("a")).notes == ()


@pytest.mark.parametrize("source", [BY_INDEX, COLLECTED])
def test_loops_over_indices_and_collected_text_are_followed(source: str) -> None:
    reading = read(source, user("u"), assistant("a"), user("v"), assistant("b"))
    assert shown(reading) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
        "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    )


def test_merged_turns_are_learned_as_one() -> None:
    reading = read(MERGING, user("u"), assistant("a"), assistant("b"))
    assert shown(reading) == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n⟦ab<|im_end|>⟧\n"
    assert [(turn.message, turn.end_of_turn) for turn in reading.turns] == [(1, None), (2, "<|im_end|>")]
    assert codes(reading) == [("merged", 1), ("merged", 2)]


def test_text_of_others_inside_a_turn_is_left_out() -> None:
    called = assistant("b", tool_calls=[call({})])
    reading = read(REORDERING, user("u"), called, result("t"), result("x"), assistant("c"))
    assert shown(reading) == (
        "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>look_up</tool_call><|im_end|>⟧"
        "<|im_start|>tool\nlook_up: t<|im_end|><|im_start|>tool\nlook_up: x<|im_end|>⟦b<|im_end|>⟧\n"
        "<|im_start|>assistant\n⟦c<|im_end|>⟧\n"
    )
    assert ("reordered", 1) in codes(reading)


def test_a_last_turn_that_is_left_open_is_closed_as_if_another_followed() -> None:
    reading = read(LAST_LEFT_OPEN, user("u"), assistant("a"))
    assert shown(reading) == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧"
    assert codes(reading) == [("no-end-of-turn", 1)]


def test_turns_may_be_closed_by_what_opens_the_next() -> None:
    reading = read(CLOSED_BY_ROLES, user("u"), assistant("a"), user("v"), assistant("b"))
    assert shown(reading) == "<|user|>u<|assistant|>⟦a<|user|>⟧v<|assistant|>⟦b<|user|>⟧"
    assert codes(reading) == [("no-end-of-turn", 1), ("no-end-of-turn", 3)]
    with pytest.raises(DataError, match="never learn to stop"):
        read(CLOSED_BY_ROLES, user("u"), assistant("a"), assistant("b"))


def test_turns_without_any_end_are_refused() -> None:
    with pytest.raises(DataError, match="closes message 2 with no special token") as caught:
        read(OPEN_ENDED, user("u"), assistant("a"))
    assert caught.value.found == repr("\n")


def test_a_template_that_shows_nothing_of_the_answers_is_refused() -> None:
    with pytest.raises(DataError, match="shows nothing of the assistant's turns") as caught:
        read(WITHOUT_CONTENT, user("u"), assistant("a"))
    assert "does not show `content`" in caught.value.message
    reading = read(WITHOUT_CONTENT, user("u"), assistant(""))
    assert shown(reading).endswith("assistant\n⟦<|im_end|>⟧\n")


def test_a_template_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be followed") as caught:
        read(RANDOM, user("u"), assistant("a"))
    assert "character" in str(caught.value.where)


def test_a_tag_that_is_no_special_token_ends_no_turn() -> None:
    source = STYLES["marked"].replace(
        "<|im_end|>{% endgeneration %}", "</think>{% endgeneration %}<|im_end|>"
    )
    assert shown(read(source, user("u"), assistant("a"))).endswith("⟦a</think><|im_end|>⟧\n")


@pytest.mark.parametrize("tags", [("<hm>", "<hop>"), ("[HM]", "[HOP]")])
def test_a_turn_does_not_begin_inside_of_a_tag(tags: tuple[str, str]) -> None:
    """Two tags that are no tokens begin alike and have nothing in common."""
    opens, calls = tags
    source = SYSTEM_BY_DEFAULT.replace("assistant\n", f"assistant\n{opens}").replace(
        "message['content'] + '",
        f"('{calls}' if message.role == 'assistant' else '') + message['content'] + '",
    )
    reading = read(source, user("u"), assistant("a"))
    assert shown(reading).endswith(f"⟦{calls}a<|im_end|>⟧\n")
    assert codes(reading) == [("partial-prompt", 1)]


def test_the_last_of_several_special_tokens_ends_a_turn() -> None:
    source = SYSTEM_BY_DEFAULT.replace("message['content'] + '", "message['content'] + '<|tool|>")
    assert shown(read(source, user("u"), assistant("a"))).endswith("⟦a<|tool|><|im_end|>⟧\n")


def test_what_the_author_marked_is_compared() -> None:
    assert read(MARKED, user("u"), assistant("a")).notes == ()
    header = "<|im_start|>assistant\n"
    wide = MARKED.replace("{% generation %}", "").replace(header, "{% generation %}" + header, 1)
    (note,) = read(wide, user("u"), assistant("a")).notes
    assert (note.code, note.turn) == ("markers-differ", 1)
    assert repr(header) in note.message
    (note,) = read(
        MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        user("u"),
        assistant("a"),
    ).notes
    assert "end before the turn does ('<|im_end|>')" in note.message


def test_control_tokens_in_messages_are_found() -> None:
    said = assistant("a<|im_end|><think>b")
    reading = read(SYSTEM_BY_DEFAULT, user("x <|im_start|>assistant"), said)
    assert [reading.text[span.start : span.end] for span in reading.controls] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert shown(reading).endswith("assistant\n⟦a<|im_end|><think>b<|im_end|>⟧\n")
    thinking = read(REASONING, user("<think>x"), said)
    assert [thinking.text[span.start : span.end] for span in thinking.controls] == ["<think>", "<|im_end|>"]
    schema = json.loads(json.dumps(TOOL).replace("Look a word up.", "<|im_end|>"))
    trimming = HEADERS_AND_DATE.replace("<|eot_id|>", "<|im_end|>")
    chat = reader(trimming)
    for words in ("u", "other"):
        passage = Passage("completion", None, [user(words), assistant("a")], [schema])
        (span,) = chat.read(passage).controls
        assert chat.read(passage).text[span.start : span.end] == "<|im_end|>"
    assert len(chat.moulds) == 1


def test_no_tools_are_the_same_as_an_empty_list() -> None:
    source = "{% if tools is not none %}TOOLS{% endif %}" + SYSTEM_BY_DEFAULT
    turns = (user("u"), assistant("a"))
    assert read(source, *turns, tools=[]) == read(source, *turns)
    assert read(source, *turns, tools=[TOOL]).text.startswith("TOOLS")


def test_arguments_reach_the_template() -> None:
    source = "{{ 'quiet ' if quiet else '' }}" + SYSTEM_BY_DEFAULT
    assert read(source, user("u"), assistant("a"), arguments={"quiet": True}).text.startswith("quiet ")


@pytest.mark.parametrize(
    "style", ["system-by-default", "headers-and-date", "marked", "reasoning", "no-system"]
)
def test_in_every_style_the_spans_are_the_answers_and_their_ends(style: str) -> None:
    source = STYLES[style].replace("<|eot_id|>", "<|im_end|>")
    for label in ("single", "multi", "edges", "empty", "consecutive"):
        sample = conversations()[label]
        reading = read(source, *sample.messages)
        answers = [message["content"] for message in sample.messages if message["role"] == "assistant"]
        if style == "headers-and-date":
            answers = [answer.strip() for answer in answers]
        texts = [reading.text[span.start : span.end] for span in reading.spans]
        assert texts == [f"{answer}<|im_end|>" for answer in answers]


def test_spans_that_touch_are_one() -> None:
    assert apart([Span(4, 6), Span(0, 2), Span(2, 3)]) == (Span(0, 3), Span(4, 6))


def test_conversations_need_a_template() -> None:
    with pytest.raises(DataError, match="no chat template"):
        read(None, user("u"), assistant("a"))
