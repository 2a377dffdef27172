from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.conversations import Sample, conversations
from helpers.real_templates import SPECIAL, chat_template, names, read, reader, source, tokenizer_files

from posttrain.artifacts.fingerprint import Refusal
from posttrain_plugins.templates.encoder import CLOCK
from posttrain_plugins.templates.reading import Reading
from posttrain_plugins.templates.tracing import Tracer

SAMPLES = conversations()
ENDLESS = {("glm4moe", "consecutive")}
"""What is refused although the template renders it: nothing ends the first of two answers in a row."""
TWICE = re.compile(r"zq[a-z]+")


def rendered(name: str, sample: Sample, upto: int | None = None, prompt: bool = False) -> str | None:
    try:
        return chat_template(name).render(sample.messages[:upto], prompt, sample.tools, CLOCK)
    except Refusal:
        return None


def outside(reading: Reading) -> str:
    """The text with what is supervised left out."""
    kept, at = [], 0
    for span in reading.spans:
        kept.append(reading.text[at : span.start])
        at = span.end
    return "⟂".join([*kept, reading.text[at:]])


def inside(reading: Reading) -> str:
    return "⟂".join(reading.text[span.start : span.end] for span in reading.spans)


@pytest.mark.parametrize("name", names(training=False))
def test_exactly_the_assistants_words_are_supervised(name: str) -> None:
    """Told by words that only one message has, not by how they were traced.

    Words that stand in the generation prompt (an opened `<think>` and what it holds) are never produced, and words that
    a template says again elsewhere (a tool's name in its result) are supervised where they come first.
    """
    tracing = reader(name, 0)
    ends = {token["content"] for token in tokenizer_files(name).definition["added_tokens"]}
    read_at_all = 0
    for label, sample in SAMPLES.items():
        text, reading = rendered(name, sample), read(tracing, sample)
        if text is None:
            assert "declines this conversation" in str(reading)
            continue
        if isinstance(reading, str):
            assert "nothing of the assistant" in reading or (name, label) in ENDLESS, (label, reading)
            continue
        read_at_all += 1
        assert text.startswith(reading.text) or reading.text.startswith(text.rstrip()), label
        supervised, rest = inside(reading), outside(reading)
        assert not [word for word in sample.others if word in supervised], label
        shown = [word for word in sample.own if word in text]
        assert all(word in supervised for word in shown) or reading_left_out(reading), (label, supervised)
        assert not [word for word in shown if word in rest and word not in supervised], label
        for turn in reading.turns:
            if turn.end_of_turn is None:
                assert {note.code for note in turn.notes} & {"merged", "no-end-of-turn"}, label
            else:
                assert turn.end_of_turn in ends, label
                assert reading.text[: turn.span.end].rstrip().endswith(turn.end_of_turn), label
    assert read_at_all >= 1


def reading_left_out(reading: Reading) -> bool:
    return any(note.code == "dropped-turn" for note in reading.notes)


@pytest.mark.parametrize("name", names(training=False))
def test_the_last_turn_begins_where_a_generation_would(name: str) -> None:
    tracing = reader(name, 0)
    for label, sample in SAMPLES.items():
        reading = read(tracing, sample)
        last = len(sample.messages) - 1
        prompt = rendered(name, sample, last, prompt=True)
        if isinstance(reading, str) or prompt is None or reading.turns[-1].message != last:
            continue
        if reading.text.startswith(prompt):
            assert reading.turns[-1].span.start == len(prompt), label
        elif not reading.turns[-1].notes:
            raise AssertionError(
                f"{label}: the generation prompt is not what the text has, and nothing says so"
            )


@pytest.mark.parametrize("name", names(training=True))
def test_marks_are_those_that_transformers_finds_and_differences_are_policy(name: str) -> None:
    """Authors mark headers that the generation prompt supplies, and what follows an end of turn; never a part."""
    from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

    compiled, tracer, tracing = (
        _compile_jinja_template(source(name)),
        Tracer(chat_template(name)),
        reader(name, 0),
    )
    for label in ("single", "multi", "reasoning", "parts"):
        sample = SAMPLES[label]
        if rendered(name, sample) is None:
            continue
        variables = chat_template(name).variables(sample.messages, False, None, CLOCK, None)
        text, marks = _render_with_assistant_indices(
            compiled, documents=None, **_without(variables, "documents")
        )
        trace = tracer.trace(sample.messages, False, None, CLOCK)
        assert text == trace.text
        assert sorted(trace.marked) == sorted(map(tuple, marks))
        reading = read(tracing, sample)
        if isinstance(reading, str):
            continue
        for note in reading.notes:
            assert note.code != "markers-differ" or "leave the turn out" not in note.message, (label, note)
        for turn in reading.turns:
            covered = [mark for mark in marks if mark[0] < turn.span.end and turn.span.start < mark[1]]
            assert all(
                any(first <= own.start and own.end <= last for first, last in covered) for own in turn.own
            ), label


def _without(variables: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize("name", [*names(training=False), *names(training=True)])
def test_a_traced_render_is_byte_equal_to_the_plain_one(name: str) -> None:
    tracer, rendered_at_all = Tracer(chat_template(name)), 0
    for label in (
        "edges",
        "reasoning",
        "inline-think",
        "tokens",
        "tool-dict",
        "tools-parallel-text",
        "parts",
    ):
        sample = SAMPLES[label]
        for prompt in (False, True):
            text = rendered(name, sample, None, prompt)
            try:
                traced = tracer.trace(sample.messages, prompt, sample.tools, CLOCK).text
            except Refusal:
                traced = None
            assert traced == text, label
            rendered_at_all += text is not None
    assert rendered_at_all >= 2


def test_the_samples_have_words_of_their_own() -> None:
    for sample in SAMPLES.values():
        assert not set(sample.own) & set(sample.others)
    assert SPECIAL["eos_token"] == "</s>"
