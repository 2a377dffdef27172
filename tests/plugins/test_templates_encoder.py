"""What an encoder supervises, and that tokens are those of the whole text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.chat_templates import (
    HEADERS_AND_DATE,
    MARKED,
    SYSTEM_BY_DEFAULT,
)
from helpers.encoders import ASK, marked, opened
from helpers.models import END_ID, char_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from posttrain_plugins.models.vocabulary import bpe_tokenizer, write_tokenizer
from posttrain_plugins.templates.encoder import Encoder


def test_an_answer_is_supervised_up_to_its_end_of_turn(tmp_path: Path) -> None:
    encoder = opened(tmp_path)
    encoded = encoder.encode_pair(ASK, "4 + 4")
    assert marked(encoder, encoded) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[4 + 4<|im_end|>]\n"
    )
    assert encoded.tokens[: len(encoder.encode_prompt(ASK))] == encoder.encode_prompt(ASK)


def test_the_end_of_turn_counts_when_it_is_the_pad_token_too(tmp_path: Path) -> None:
    plain, same = opened(tmp_path / "a"), opened(tmp_path / "b", pad_token="<|im_end|>")
    assert same.pad_id == same.eos_id == END_ID
    assert same.encode_pair(ASK, "x") == plain.encode_pair(ASK, "x")


def test_every_assistant_turn_is_supervised(tmp_path: Path) -> None:
    encoder = opened(tmp_path, SYSTEM_BY_DEFAULT)
    turns = [*ASK, {"role": "assistant", "content": "e"}, *ASK, {"role": "assistant", "content": " ok "}]
    assert marked(encoder, encoder.encode_messages(turns)) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n[e<|im_end|>]\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n[ ok <|im_end|>]\n"
    )


def test_a_completion_of_several_turns_leaves_the_prompts_answers_out(tmp_path: Path) -> None:
    encoder = opened(tmp_path)
    prompt = [*ASK, {"role": "assistant", "content": "a"}, *ASK]
    completion = [
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "c"},
    ]
    text = marked(encoder, encoder.encode_pair(prompt, completion))
    assert "assistant\na<|im_end|>" in text
    assert text.endswith(
        "assistant\n[b<|im_end|>]\n<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n"
    )


def test_templates_with_marks_and_trimmed_content(tmp_path: Path) -> None:
    encoder = opened(tmp_path / "a", MARKED)
    assert marked(encoder, encoder.encode_pair(ASK, "x")).endswith("assistant\n[x<|im_end|>]")
    trimmed = HEADERS_AND_DATE.replace("<|eot_id|>", "<|im_end|>")
    encoder = opened(tmp_path / "b", trimmed)
    text = marked(encoder, encoder.encode_pair(ASK, "  x \n"))
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n[x<|im_end|>]")


def test_strings_are_joined_and_closed(tmp_path: Path) -> None:
    encoder = opened(tmp_path, template=None)
    assert marked(encoder, encoder.encode_pair("2+2=", "4")) == "2+2=[4<|im_end|>]"
    assert marked(encoder, encoder.encode_pair("2+2=", "4<|im_end|>")) == "2+2=[4<|im_end|>]"
    assert marked(encoder, encoder.encode_text("abc")) == "a[bc<|im_end|>]"
    assert encoder.decode(encoder.encode_prompt("2+2=")) == "2+2="


def test_nothing_predicts_the_first_token(tmp_path: Path) -> None:
    encoded = opened(tmp_path, template=None).encode_pair("", "ab")
    assert encoded.supervised == [False, True, True]


@pytest.mark.parametrize("how", ["post-processor", "config"])
def test_the_beginning_token_comes_once(tmp_path: Path, how: str) -> None:
    tokenizer = char_tokenizer(tmp_path, template=None)
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    if how == "post-processor":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    write_tokenizer(tmp_path, tokenizer, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": "<s>"}
    config |= {"add_bos_token": True} if how == "config" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = Encoder.open(tmp_path)
    assert marked(encoder, encoder.encode_text("ab")) == "<s>[ab<|im_end|>]"
    assert encoder.encode_prompt("<s>a") == encoder.encode_prompt("a")
    assert encoder.encode_pair("<s>a", "b") == encoder.encode_pair("a", "b")
    assert encoder.encode_pair("a", "b").supervised == [False, False, True, True]


def words(directory: Path) -> Encoder:
    write_tokenizer(directory, bpe_tokenizer(["hello world " * 20], 320), None)
    return Encoder.open(directory)


def test_a_prompt_keeps_its_tokens_whatever_follows_and_the_answer_is_learned(tmp_path: Path) -> None:
    encoder = words(tmp_path)
    encoded = encoder.encode_pair("hello ", "world")
    before = encoder.encode_prompt("hello ")
    assert encoded.tokens[: len(before)] == before
    assert encoder.decode(encoded.tokens) == "hello world"
    assert marked(encoder, encoded) == "hello [world<|im_end|>]"
    assert encoded.straddling == 0
    joined = encoder.encode_pair("hello", " world")
    assert (len(joined.tokens), joined.supervised, joined.straddling) == (3, [False, True, True], 0)


@pytest.mark.parametrize("how", ["normalizer", "pre-tokenizer"])
def test_an_answer_apart_gets_no_space_of_the_tokenizers_own(tmp_path: Path, how: str) -> None:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "</s>": 5, "▁b": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    if how == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    encoded = Encoder.open(tmp_path).encode_pair("a ", "b")
    assert (encoded.tokens, encoded.supervised) == ([4, 1, 3, 5], [False, False, True, True])


@pytest.mark.parametrize("trims", [False, True])
def test_a_token_across_the_start_of_a_turn_is_counted(tmp_path: Path, trims: bool) -> None:
    """Leading spaces belong to the token, whatever the post-processor says."""
    tokenizer = bpe_tokenizer(["hello world " * 20], 320)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} "
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    write_tokenizer(tmp_path, tokenizer, template)
    encoder = Encoder.open(tmp_path)
    encoded = encoder.encode_pair([{"role": "user", "content": "hello"}], "world")
    assert (encoded.supervised, encoded.straddling) == ([False, False, True], 1)


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | join(', ') }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    encoder = opened(tmp_path, template)
    turns = [*ASK, {"role": "assistant", "content": "x"}, *ASK, {"role": "assistant", "content": "z"}]
    for tools, start in ((["f", 1], "f, 1<"), (None, "<")):
        pair = encoder.encode_pair(ASK, "x", tools)
        prompt = encoder.encode_prompt(ASK, tools)
        assert pair.tokens[: len(prompt)] == prompt
        assert encoder.decode(prompt, skip_special=False).startswith(start)
        assert sum(encoder.encode_messages(turns, tools).supervised) == 4


def test_special_tokens_that_decoding_hides_are_told(tmp_path: Path) -> None:
    encoder = opened(tmp_path)
    start = encoder.files.plain.token_to_id("<|im_start|>")
    text = encoder.encode_prompt("hi")
    assert encoder.decode([*text, start]) == "hi"
    assert encoder.has_special([*text, start])
    assert not encoder.has_special([*text, END_ID])


def test_characters_of_several_bytes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, bpe_tokenizer(["abc"], 300), None)
    encoder = Encoder.open(tmp_path)
    encoded = encoder.encode_pair("é", "🌍")
    assert encoded.supervised == [False] * 2 + [True] * 5
    assert encoder.decode(encoded.tokens) == "é🌍"


def test_a_prepended_space_does_not_shift_the_boundary(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "</s>": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    encoded = Encoder.open(tmp_path).encode_pair("a", "b")
    assert (encoded.tokens, encoded.supervised) == ([4, 3, 5], [False, True, True])
