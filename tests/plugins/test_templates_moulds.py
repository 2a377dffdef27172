from __future__ import annotations

from typing import Any

import pytest
from helpers.chat_templates import DEVIOUS, FORCED, STYLES
from helpers.conversations import Sample, assistant, conversations, plain, user, wordy
from helpers.real_templates import chat_template, names, read, reader, tokenizer_files

from posttrain_plugins.templates.casting import PARTS
from posttrain_plugins.templates.controls import Controls
from posttrain_plugins.templates.encoder import CLOCK
from posttrain_plugins.templates.moulds import Mould, Moulds
from posttrain_plugins.templates.reader import Reader
from posttrain_plugins.templates.reading import Reading
from posttrain_plugins.templates.render import ChatTemplate

FAMILIES = (
    "qwen2_5",
    "qwen3",
    "llama3_1",
    "gemma4_v5",
    "gptoss",
    "glm4moe",
    "lfm2_2_5",
    "phi3",
    "deepseekv3",
    "cohere2",
)


def own(source: str, capacity: int) -> Reader:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return Reader(template, Controls(tokenizer_files("qwen3")), CLOCK, "here", Moulds(capacity))


def hits(reader: Reader, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """Read conversations and count those that a mould was enough for."""
    traced: list[Any] = []
    finding = Reader._finding

    def counted(self: Reader, *given: Any) -> Any:
        traced.append(given)
        return finding(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "_finding", counted)
        readings = [read(reader, sample) for sample in samples]
    return readings, len(samples) - len(traced)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mould_reads_as_a_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other words, lengths and characters, through the moulds of the first words, read as they do traced."""
    first, other = conversations(plain), conversations(wordy)
    moulded, traced = reader(name, 512), reader(name, 0)
    known = [label for label in first if isinstance(read(moulded, first[label]), Reading)]
    readings, by_mould = hits(moulded, [other[label] for label in known], monkeypatch)
    for label, found in zip(known, readings, strict=True):
        assert found == read(traced, other[label]), label
    assert by_mould >= len(known) - 4
    assert by_mould >= 7


@pytest.mark.parametrize("style", ["system-by-default", "headers-and-date", "marked", "reasoning"])
def test_the_styles_of_the_field_have_moulds(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = STYLES[style].replace("<|eot_id|>", "<|im_end|>")
    first, other = conversations(plain), conversations(wordy)
    moulded, traced = own(source, 64), own(source, 0)
    for label in ("single", "multi", "system", "edges", "empty"):
        assert isinstance(read(moulded, first[label]), Reading)
        (found,), by_mould = hits(moulded, [other[label]], monkeypatch)
        assert found == read(traced, other[label])
        assert by_mould == 1


def test_rows_that_a_mould_does_not_fit_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    moulded, traced = own(DEVIOUS, 64), own(DEVIOUS, 0)
    answers = [
        "short",
        "brief",
        "an answer of more than twenty characters",
        "another one that is longer than twenty",
        "secret",
    ]
    samples = [Sample([user("u"), assistant(answer)], (), ()) for answer in answers]
    readings, by_mould = hits(moulded, samples, monkeypatch)
    assert by_mould == 1
    assert readings == [read(traced, sample) for sample in samples]
    assert isinstance(readings[2], Reading)
    (span,) = readings[2].spans
    assert readings[2].text[span.start : span.end] == "an answer of more th...<|im_end|>"
    assert "nothing of the assistant" in str(readings[4])


def test_an_answer_that_repeats_the_generation_prompt_begins_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mould of an answer without it must not be used for one with it."""
    moulded = own(FORCED, 64)
    samples = [
        Sample([user("u"), assistant(text)], (), ())
        for text in ("plain", "<think>\nwhy</think>so", "<b>", "more")
    ]
    readings, by_mould = hits(moulded, samples, monkeypatch)
    texts = [reading.text[reading.spans[0].start : reading.spans[0].end] for reading in readings]
    assert texts == ["plain<|im_end|>", "why</think>so<|im_end|>", "<b><|im_end|>", "more<|im_end|>"]
    assert by_mould == 1


def test_an_answer_that_is_a_part_of_the_generation_prompt_has_no_mould(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its words end says nothing about where the turn of another row begins."""
    moulded = own(FORCED, 64)
    samples = [
        Sample([user("u"), assistant(text)], (), ())
        for text in ("<think>", "<think>\nwhy</think>so", "plain", "<think")
    ]
    readings, by_mould = hits(moulded, samples, monkeypatch)
    texts = [reading.text[reading.spans[0].start : reading.spans[0].end] for reading in readings]
    assert texts == ["<think><|im_end|>", "why</think>so<|im_end|>", "plain<|im_end|>", "<think<|im_end|>"]
    assert by_mould == 0


@pytest.mark.parametrize(
    "written",
    ["m.content[:9]", "m.content.split()[0]", "m.content.strip('.')", "m.content.lstrip('\n')"],
)
def test_what_one_row_loses_is_not_said_of_another(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FORCED.replace("m.content", written)
    texts = ["short", "an answer that is longer", "brief.", "other", "\nline", " line", "\nmore"]
    samples = [Sample([user("u"), assistant(text)], (), ()) for text in texts]
    readings, by_mould = hits(own(source, 64), samples, monkeypatch)
    assert readings == [read(own(source, 0), sample) for sample in samples]
    assert by_mould >= 1


@pytest.mark.parametrize("words, by_mould", [(PARTS, 1), (PARTS + 1, 0)])
def test_a_string_that_is_taken_to_many_parts_has_no_mould(
    words: int, by_mould: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part would have all of the string cut again, which takes the square of its length."""
    moulded = own(FORCED.replace("m.content", "m.content.split() | join('_')"), 64)
    samples = [Sample([user("u"), assistant(" ".join([word] * words))], (), ()) for word in ("ab", "cde")]
    readings, found = hits(moulded, samples, monkeypatch)
    assert found == by_mould
    assert [reading.text.count("b_a") + reading.text.count("e_c") for reading in readings] == [words - 1] * 2


def test_the_moulds_used_longest_ago_are_forgotten() -> None:
    mould = Mould(("",), (), (), (), (), None, ())
    moulds = Moulds(2)
    for structure in ("a", "b"):
        moulds.keep(structure, mould)
    assert moulds.get("a") is mould
    moulds.keep("c", None)
    assert [name in moulds for name in "abc"] == [True, False, True]
    assert (len(moulds), moulds.get("b"), moulds.get("c")) == (2, None, None)


def test_tools_and_arguments_belong_to_the_structure() -> None:
    moulded = reader("qwen3", 64)
    sample = conversations()["tool-dict"]
    renamed = (
        [{**sample.tools[0], "function": {**sample.tools[0]["function"], "name": "find"}}]
        if sample.tools
        else []
    )
    changed = Sample(sample.messages, (), (), renamed)
    quiet = Sample(sample.messages, (), (), sample.tools, {"enable_thinking": False})
    texts = [read(moulded, each) for each in (sample, changed, quiet)]
    assert len(moulded.moulds) == 3
    plain_texts = [
        chat_template("qwen3").render(each.messages, False, each.tools, CLOCK, each.arguments)
        for each in (sample, changed, quiet)
    ]
    assert [reading.text for reading in texts if isinstance(reading, Reading)] == plain_texts


def test_every_template_of_the_field_is_known() -> None:
    assert set(FAMILIES) <= set(names(training=False))
