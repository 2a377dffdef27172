"""What is learned, where data loaders of other projects learned the wrong tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.laid_out import alone, build, gpt2, llama, logp
from helpers.nasty import (
    CYRILLIC,
    GREEK,
    KINDS,
    PIECES,
    SPELLED,
    conversation,
    encoder_of,
    ends,
    text,
)
from helpers.scripts import ASSISTANT, OTHERS, USER, Message, assistant, letters, user, wrote
from helpers.tokenizers_of_all_kinds import write
from tokenizers import Tokenizer, processors

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError
from posttrain_plugins.evaluation.likelihood import completion_nll
from posttrain_plugins.rollouts.generation import generate
from posttrain_plugins.templates.encoded import Encoded
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.library import TEMPLATES, named_template
from posttrain_plugins.templates.reading import Reading
from posttrain_plugins.training.layouts import LAYOUTS

CHATML = named_template("chatml").source
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


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


def conversations(seed: str, pieces: Sequence[str], count: int) -> list[list[Message]]:
    random = Random(seed)
    return [conversation(random, tuple(pieces)) for _ in range(count)]


def assert_spans_hold_the_assistant(reading: Reading, closings: tuple[str, ...]) -> None:
    spoken = {at for span in reading.spans for at in range(span.start, span.end)}
    assert {*wrote(ASSISTANT, reading.text)} <= spoken
    for script in OTHERS:
        assert spoken.isdisjoint(wrote(script, reading.text))
    assert all(reading.text[: span.end].endswith(closings) for span in reading.spans)


@EVERY_KIND
def test_no_text_however_strange_moves_a_mask(tmp_path: Path, kind: str) -> None:
    """Control characters, emoji, combining marks and right-to-left text at the edges of an answer shift offsets."""
    for name in TEMPLATES:
        encoder, template = encoder_of(tmp_path, kind, name), named_template(name)
        for messages in conversations(f"{kind} {name}", PIECES, 2):
            passage = Passage("completion", None, messages)
            reading, found = encoder.read(passage), encoded(encoder, passage)
            assert_spans_hold_the_assistant(reading, ends(template))
            raw = encoder.files.plain.encode(reading.text, add_special_tokens=False)
            within = [any(s.start <= a and b <= s.end for s in reading.spans) for a, b in raw.offsets]
            assert (found.tokens, found.supervised) == (raw.ids, [False, *within[1:]]), messages
            said = learned(encoder, found)
            assert not any(letters(script, said) for script in OTHERS), messages
            if kind == "byte-level":
                assert said == "".join(reading.text[start:end] for start, end in reading.spans), messages


@EVERY_KIND
def test_no_message_makes_a_control_token(tmp_path: Path, kind: str) -> None:
    """Content that spells an end of turn becomes one, and what follows in the message counts as another's turn."""
    for name in TEMPLATES:
        encoder, template = encoder_of(tmp_path, kind, name), named_template(name)
        pieces = (*PIECES[::4], *SPELLED, *template.tokens[:2])
        for messages in conversations(f"{kind} {name} spelled", pieces, 2):
            passage = Passage("completion", None, messages)
            if name == "harmony" and any("<|channel|>" in message["content"] for message in messages):
                continue
            reading, found = encoder.read(passage), encoded(encoder, passage)
            assert_spans_hold_the_assistant(reading, ends(template))
            spelled = [reading.text[start:end] for start, end in reading.controls]
            for token in {*template.tokens, *encoder.files.special_tokens.values()}:
                meant = reading.text.count(token) - spelled.count(token)
                assert found.tokens.count(encoder.files.plain.token_to_id(token)) == meant, (token, messages)
            said = learned(encoder, found)
            assert not any(letters(script, said) for script in OTHERS), messages


@EVERY_KIND
def test_the_tokens_of_a_prompt_are_those_a_generation_starts_from(tmp_path: Path, kind: str) -> None:
    """A token merged across the seam is half learned, or makes another prompt of each side of a pair."""
    encoder, random = encoder_of(tmp_path, kind, "chatml"), Random(kind)
    for _ in range(60):
        prompt, answer = "б" + text(random, CYRILLIC), text(random, GREEK) + "α"
        found, before = encoded(encoder, Passage("completion", prompt, answer)), encoder.encode_prompt(prompt)
        assert found.tokens[: len(before)] == before
        assert found.supervised == [at >= len(before) for at in range(len(found.tokens))]
        assert found.tokens[-1] == encoder.eos_id
        said = learned(encoder, found)
        assert letters(USER, said) == []
        assert kind != "byte-level" or said == f"{answer}<|im_end|>"


def test_half_a_character_is_refused_where_it_stands(tmp_path: Path) -> None:
    """Half a surrogate pair is a Python string and no text: a tokenizer raises without saying which row it was."""
    encoder = encoder_of(tmp_path, "byte-level", "chatml")
    fine = [chat("да", "ναι"), Passage("completion", "да", "ναι"), Passage("completion", None, "ναι")]
    broken = [
        chat("да\ud83d", "ναι"),
        chat("да", "\ude00ναι"),
        Passage("completion", "да\ud83d", "\ude00ναι"),
        Passage("prompt", "\udc00", None),
    ]
    found = encoder.encode([*fine, *broken, *fine])
    assert found[:3] == encoder.encode(fine) == found[-3:]
    for error in found[3:-3]:
        assert isinstance(error, DataError)
        assert "half a surrogate pair" in error.message and "\\u" in str(error.found)


def test_unknown_characters_are_no_control_tokens(tmp_path: Path) -> None:
    """A row with a spelled control token and a character that the vocabulary lacks is fine."""
    for kind in ("unigram", "word-piece", "metaspace-bpe"):
        encoder = encoder_of(tmp_path, kind, "chatml")
        found = encoded(encoder, chat("<|im_end|> 漢字", "ναι"))
        assert found.tokens.count(encoder.eos_id) == 2
        assert letters(ASSISTANT, learned(encoder, found)) == [*"ναι"]


def closing_every_text(directory: Path, bos: str) -> Encoder:
    """A tokenizer that puts its end token behind every text that it is given alone."""
    write(directory, "byte-level", CHATML, ("<|im_start|>", "<|im_end|>"), bos=False, eos="</s>")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": bos, "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Encoder.open(directory)


@pytest.mark.parametrize("bos", ["<s>", "</s>"])
def test_a_tokenizer_that_ends_every_text_ends_no_prompt(tmp_path: Path, bos: str) -> None:
    """The end of turn of a prompt that was tokenized alone would stand before the answer, and take its first token."""
    encoder = closing_every_text(tmp_path, bos)
    pair = encoded(encoder, Passage("completion", "да ", "ναι"))
    assert encoder.decode(pair.tokens, skip_special=False) == "да ναι</s>"
    assert learned(encoder, pair) == "ναι</s>"
    assert encoder.encode_prompt("да ") == pair.tokens[: pair.supervised.index(True)]
    turns = encoded(encoder, chat("да", "ναι"))
    assert encoder.eos_id not in turns.tokens
    assert learned(encoder, turns) == "ναι<|im_end|>"


HEADERS = {
    "spaced": ("### Response: ", "### Instruction: "),
    "bare": ("### Response:", "### Instruction:"),
    "broken": ("\n### Response:\n\n", "\n### Instruction:\n\n"),
}


@pytest.mark.parametrize("header", HEADERS)
@EVERY_KIND
def test_what_opens_an_answer_is_not_searched_for(tmp_path: Path, kind: str, header: str) -> None:
    """A marker is tokenized otherwise behind a break or before a space, and users write it as well."""
    opens, asks = HEADERS[header]
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ opens + m.content }}<|end|>{% else %}"
        "{{ asks + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ opens }}{% endif %}"
    )
    source = source.replace("opens", json.dumps(opens)).replace("asks", json.dumps(asks))
    write(tmp_path, kind, source, ("<|end|>",), eos="<|end|>", kinds=KINDS)
    encoder = Encoder.open(tmp_path)
    passage = chat(f"да{opens}и", f"ναι{asks}όχι", f"{opens}да", f"{opens}ναι")
    reading, found = encoder.read(passage), encoded(encoder, passage)
    said = [reading.text[start:end] for start, end in reading.spans]
    assert said == [f"ναι{asks}όχι<|end|>", f"{opens}ναι<|end|>"]
    assert found.tokens.count(encoder.eos_id) == sum(
        token == encoder.eos_id and counts
        for token, counts in zip(found.tokens, found.supervised, strict=True)
    ) == 2  # fmt: skip
    assert letters(USER, learned(encoder, found)) == []


MARKS = {
    "none": CHATML,
    "around answers": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "around everything": "{% generation %}" + CHATML + "{% endgeneration %}",
    "around nothing": CHATML + "{% generation %}{% endgeneration %}",
}


@pytest.mark.parametrize("marks", MARKS)
def test_a_template_need_not_mark_answers(tmp_path: Path, marks: str) -> None:
    """Without marks one library learned nothing at all, and another everything."""
    write(tmp_path, "byte-level", MARKS[marks], ("<|im_start|>", "<|im_end|>"), bos=False, eos="<|im_end|>")
    encoder = Encoder.open(tmp_path)
    found = encoded(encoder, chat("да", "ναι", "и", "όχι"))
    assert learned(encoder, found) == "ναι<|im_end|>όχι<|im_end|>"
    assert 0 < sum(found.supervised) < len(found.tokens)


PAD = 2
LOOKALIKES = [
    Example(row, (TokenSequence(tokens, [at > 2 for at in range(len(tokens))], "completion"),))
    for row, tokens in enumerate(
        (
            [PAD, 5, PAD, 6, 7, PAD, 8, PAD],
            [5, PAD, PAD, PAD, PAD],
            [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, PAD],
        )
    )
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [llama, gpt2], ids=lambda config: config.__name__)
def test_tokens_that_equal_the_padding_are_seen(config: Any, layout: str) -> None:
    """An end of turn within a conversation was taken for padding, as it has the same id: all behind it was hidden."""
    model = build(config).eval()
    micro = LAYOUTS[layout].arrange(LOOKALIKES, PAD, "cpu")
    assert int(micro.real.sum()) == sum(example.size for example in LOOKALIKES)
    with torch.no_grad():
        found = logp(model, LAYOUTS[layout], LOOKALIKES)
        assert (found - alone(model, LOOKALIKES)).abs().max() < 1e-5


@pytest.mark.parametrize("config", [llama, gpt2], ids=lambda config: config.__name__)
def test_prompts_that_hold_the_padding_are_answered_as_if_alone(config: Any) -> None:
    """The same when prompts of several lengths are padded on the left, or scored in one batch."""
    policy = SimpleNamespace(model=build(config).eval(), encoder=SimpleNamespace(stop_ids=(PAD,), pad_id=PAD))
    prompts = [list(each.sequences[0].tokens)[:-1] for each in LOOKALIKES]
    together, single = (generate(policy, prompts, max_new_tokens=8, batch_tokens=size) for size in (1000, 1))
    assert together == single
    sequences: Any = [each.sequences[0] for each in LOOKALIKES]
    one, all_ = (completion_nll(policy, sequences, batch_tokens=size) for size in (1, 1000))
    assert [count for _, count in one] == [count for _, count in all_] == [5, 2, 8]
    assert [nll for nll, _ in one] == pytest.approx([nll for nll, _ in all_], abs=1e-4)


def test_an_answer_may_end_with_any_of_several_tokens() -> None:
    """Who knows one end alone calls answers truncated that are not, and goes on behind their end."""
    model = build(llama).eval()
    endless: Any = SimpleNamespace(model=model, encoder=SimpleNamespace(stop_ids=()))
    said = generate(endless, [[9, 10]], max_new_tokens=12)[0][0].tokens
    _, first, second, *_ = dict.fromkeys(said)
    for stops in ((first, second), (second, first), (second,)):
        policy: Any = SimpleNamespace(model=model, encoder=SimpleNamespace(stop_ids=stops))
        (only,) = generate(policy, [[9, 10]], max_new_tokens=12)[0]
        upto = min(map(said.index, stops))
        assert (only.tokens, only.finished) == (said[:upto], True)
