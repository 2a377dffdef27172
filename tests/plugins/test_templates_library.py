"""Templates of the library: what they write, take and refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.library_talks import (
    BARE,
    NOW,
    SPECIAL,
    TALK,
    TOOL,
    USES_TOOL,
    WITH_TOOLS,
    answer,
    call,
    calls,
    render,
    system,
    user,
)

from posttrain.artifacts.fingerprint import Refusal
from posttrain.errors import SpecError
from posttrain_plugins.templates import library
from posttrain_plugins.templates.library import TEMPLATES, TemplateName, named_template

WITHOUT_PREFIX = {"qwen-3", "deepseek-r1", "harmony", "mistral-v3", "mistral-tekken"}


def test_names_files_and_options_are_the_same() -> None:
    assert set(get_args(TemplateName)) == set(TEMPLATES) and len(TEMPLATES) == 17
    files = {path.stem for path in Path(library.__file__).parent.glob("*.jinja")}
    assert set(TEMPLATES) == files | {"mistral-tekken"}
    assert all(template.name == name and template.summary for name, template in TEMPLATES.items())
    assert all(set(template.ends) <= set(template.tokens) for template in TEMPLATES.values())


def test_a_name_that_is_none() -> None:
    with pytest.raises(SpecError, match="there is no chat template `qwen3`") as caught:
        named_template("qwen3")
    assert caught.value.fix == "did you mean `qwen-3`?"
    with pytest.raises(SpecError) as caught:
        named_template("1234567")
    assert "`.jinja`" in str(caught.value.fix) and "zephyr" in str(caught.value.expected)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_begin_as_the_prompt_ends_and_end_with_an_end_of_turn(name: str) -> None:
    for messages in (TALK[:2], TALK, [system("Be brief."), *TALK]):
        whole, prompt = render(name, messages), render(name, messages[:-1], True)
        assert whole.startswith(prompt)
        rest = whole.removeprefix(prompt)
        end = (named_template(name).ends or ("</s>",))[0]
        assert rest.rstrip().endswith(messages[-1]["content"] + (" " if name == "llama-2" else "") + end)


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_are_those_that_are_listed(name: str) -> None:
    texts = [render(name, [system("Be brief."), *TALK])]
    texts += [render(name, USES_TOOL, tools=[TOOL])] if name in WITH_TOOLS else []
    written = set(
        re.findall(r"<[|｜][^<>\s]+[|｜]>|\[/?[A-Z_]{4,}\]|<(?:start|end)_of_turn>", "".join(texts))
    )
    listed = set(named_template(name).tokens)
    as_text = {"zephyr": {"<|system|>", "<|user|>", "<|assistant|>"}, "llama-2": {"[INST]", "[/INST]"}}
    as_text["mistral-v1"] = as_text["llama-2"]
    written -= as_text.get(name, set())
    written = {token for token in written if not token.startswith("<｜tool▁")}
    assert written == listed


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_cannot_show_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refusal, match=rf"{re.escape(name)} has no role `critic`"):
        render(name, [user("a"), {"role": "critic", "content": "b"}])
    with pytest.raises(Refusal, match=f"{re.escape(name)} needs text"):
        render(name, [user("a"), {"role": "assistant", "content": [{"type": "text", "text": "b"}]}])
    with pytest.raises(Refusal, match=f"{re.escape(name)} needs text"):
        render(name, [user("a"), {"role": "assistant"}])
    if name not in WITH_TOOLS:
        with pytest.raises(Refusal, match=f"{re.escape(name)} cannot show tool calls"):
            render(name, [user("a"), calls(call())])


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"chatml", "llama-3", "zephyr", "phi-3", "phi-4"}))
def test_a_late_system_message_is_refused_or_shown(name: str) -> None:
    late = [user("a"), answer("b"), system("Be brief."), user("c")]
    if name.startswith("qwen") or name == "llama-3.1":
        assert "system" in render(name, late).partition("Be brief.")[0][-40:]
        return
    with pytest.raises(Refusal, match="has no role `system` after the first message"):
        render(name, late)


@pytest.mark.parametrize("name", ["llama-2", "gemma", "mistral-v1", "mistral-v3", "mistral-tekken"])
def test_turns_must_be_taken(name: str) -> None:
    for messages in ([user("a"), user("b")], [answer("a")], [*TALK, answer("c")]):
        with pytest.raises(Refusal, match="take turns"):
            render(name, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_longer_conversations_begin_with_the_shorter_ones_where_the_format_lets_them(name: str) -> None:
    messages = [system("Be brief."), user("One"), answer("1", "uno"), user("Two"), answer("2", "due")]

    def keeps(**options: Any) -> bool:
        whole = render(name, messages, **options)
        return all(whole.startswith(render(name, messages[:cut], **options)) for cut in range(2, 5))

    assert keeps() is (name not in WITHOUT_PREFIX)
    if name.startswith("mistral"):
        assert keeps(stable_prefix=True)
    elif name in ("qwen-3", "deepseek-r1"):
        assert keeps(preserve_thinking=True)
        assert "uno" not in render(name, messages)
        assert "<think>\nuno\n</think>\n\n1" in render(name, messages, preserve_thinking=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_renders_the_same(name: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(named_template(name).source)
    compiled.globals["strftime_now"] = NOW.strftime
    conversations = [([system("Be brief."), *TALK], None)]
    conversations += [(USES_TOOL, [TOOL, BARE])] if name in WITH_TOOLS else []
    for messages, tools in conversations:
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        expected = compiled.render(
            messages=given, tools=tools, add_generation_prompt=False, documents=None, **SPECIAL
        )
        assert render(name, messages, tools=tools) == expected
