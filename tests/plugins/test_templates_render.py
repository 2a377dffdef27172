from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import HEADERS_AND_DATE, NO_SYSTEM, STYLES
from helpers.models import char_tokenizer

from posttrain.artifacts.fingerprint import PROBES, Refusal
from posttrain_plugins.templates.library import chatml
from posttrain_plugins.templates.render import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<|unk|>", "pad_token": "<|pad|>"}
EXTRA = [
    ("blanks", [{"role": "user", "content": "  a \n"}, {"role": "assistant", "content": "\nb  "}], None),
    ("markup", [{"role": "user", "content": "<b>&amp; 'x' \"y\" {{ z }} é"}], None),
    ("none", [{"role": "user", "content": "a", "name": None}, {"role": "assistant", "content": "b"}], None),
    (
        "old-reasoning",
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "r"}],
        None,
    ),
]


def transformers_render(path: Path, source: str, messages: Any, prompt: bool, tools: Any) -> str | None:
    from transformers import AutoTokenizer

    char_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path, bos_token="<s>")
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=source, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        )
    except Exception:  # noqa: BLE001 - transformers lets whatever the template raises through
        return None


@pytest.mark.parametrize("style", [*STYLES, "chatml"])
def test_renders_are_byte_equal_to_transformers(style: str, tmp_path: Path) -> None:
    source = STYLES.get(style) or chatml()
    template = ChatTemplate(source, SPECIAL)
    rendered = 0
    for _, messages, tools in [*PROBES, *EXTRA]:
        for prompt in (False, True):
            expected = transformers_render(tmp_path, source, messages, prompt, tools)
            try:
                found = template.render(messages, prompt, tools)
            except Refusal:
                found = None
            assert found == expected
            rendered += found is not None
    assert rendered >= 10


def test_a_refusal_says_what_the_template_said() -> None:
    with pytest.raises(Refusal, match="role system is not supported"):
        ChatTemplate(NO_SYSTEM, SPECIAL).render([{"role": "system", "content": "x"}])


def test_the_clock_can_be_held() -> None:
    template = ChatTemplate(HEADERS_AND_DATE, SPECIAL)
    text = template.render([{"role": "user", "content": "x"}], now=dt.datetime(2001, 2, 3))
    assert "Today Date: 03 Feb 2001<|eot_id|>" in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_templates_stay_in_the_sandbox_and_every_failure_is_a_refusal(source: str) -> None:
    with pytest.raises(Refusal):
        print(ChatTemplate(source, {}).render([{"role": "user", "content": "x"}]))


def test_chatml_is_what_it_says() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(chatml(), {}).render(turns) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    other = ChatTemplate(chatml(start="'[", end="</s>"), {}).render(turns[:1], add_generation_prompt=True)
    assert other == "'[user\na</s>\n'[assistant\n"
