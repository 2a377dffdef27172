"""What an encoder reads from its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import (
    HEADERS_AND_DATE,
    NO_SYSTEM,
    OPEN_ENDED,
    REASONING,
    SYSTEM_BY_DEFAULT,
)
from helpers.encoders import ASK, marked, opened
from helpers.models import ALPHABET, END_ID, PAD_ID, UNK_ID, char_tokenizer
from tokenizers import pre_tokenizers

from posttrain.errors import DataError
from posttrain_plugins.models.vocabulary import bpe_tokenizer, write_tokenizer
from posttrain_plugins.templates.encoder import Encoder


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(tmp_path, template=None)
    plain = Encoder.open(tmp_path)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    write_tokenizer(tmp_path, tokenizer, None)
    changed = Encoder.open(tmp_path)
    assert changed.encode_prompt("abcdef") == plain.encode_prompt("abcdef")
    assert changed.files.hash == plain.files.hash


def test_the_tokenizer_hash_follows_what_decides_the_ids(tmp_path: Path) -> None:
    first = opened(tmp_path / "a").files.hash
    assert opened(tmp_path / "b", template=None).files.hash == first
    tokenizer = char_tokenizer(tmp_path / "c")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    write_tokenizer(tmp_path / "c", tokenizer, None)
    assert Encoder.open(tmp_path / "c").files.hash != first
    tokenizer = char_tokenizer(tmp_path / "d")
    tokenizer.add_tokens(["new"])
    write_tokenizer(tmp_path / "d", tokenizer, None)
    assert Encoder.open(tmp_path / "d").files.hash != first


def test_stop_ids_join_template_generation_config_and_tokenizer(tmp_path: Path) -> None:
    encoder = opened(tmp_path)
    assert (encoder.stop_ids, encoder.end_of_turn, encoder.pad_id) == ((END_ID,), END_ID, PAD_ID)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [UNK_ID]}))
    assert Encoder.open(tmp_path).stop_ids == (UNK_ID, END_ID)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "pad_token_id": 8}))
    other = opened(tmp_path / "x", eos_token="<|pad|>", pad_token=None)
    assert other.stop_ids == (PAD_ID, END_ID)
    assert Encoder.open(tmp_path).stop_ids == (END_ID, 7)


def test_the_fingerprint_tells_templates_and_tokenizers_apart(tmp_path: Path) -> None:
    chatml, headers = (
        opened(tmp_path / "a").fingerprint(),
        opened(tmp_path / "b", HEADERS_AND_DATE).fingerprint(),
    )
    assert chatml is not None
    assert headers is not None
    assert (chatml.dated, headers.dated) == (False, True)
    assert chatml.text != headers.text
    char_tokenizer(tmp_path / "c", "abc")
    other = Encoder.open(tmp_path / "c").fingerprint()
    assert other is not None
    assert (other.text == chatml.text, other.tokens == chatml.tokens) == (True, False)
    assert opened(tmp_path / "d", template=None).fingerprint() is None


def test_a_dated_template_gives_the_same_tokens_on_any_day(tmp_path: Path) -> None:
    encoder = opened(tmp_path, HEADERS_AND_DATE)
    assert "26 Jul 2024" in encoder.decode(encoder.encode_prompt(ASK))


def refusal(encoder: Encoder, prompt: Any, completion: Any = "x") -> DataError:
    with pytest.raises(DataError) as caught:
        encoder.encode_pair(prompt, completion)
    return caught.value


def test_conversations_need_a_template(tmp_path: Path) -> None:
    error = refusal(opened(tmp_path, template=None), ASK)
    assert "no chat template" in error.message
    assert "template: chatml" in str(error.fix)


def test_a_declining_template_is_quoted(tmp_path: Path) -> None:
    error = refusal(opened(tmp_path, NO_SYSTEM), [{"role": "system", "content": "x"}])
    assert "role system is not supported" in error.message
    assert error.found == "turns system, assistant"


def test_what_a_template_drops_of_earlier_turns_is_noted(tmp_path: Path) -> None:
    encoder = opened(tmp_path, REASONING)
    answer = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    text = marked(encoder, encoder.encode_pair(ASK, [answer]))
    assert text.endswith("assistant\n[<think>why</think>x<|im_end|>]\n")
    encoded = encoder.encode_messages([*ASK, answer, *ASK, answer])
    assert marked(encoder, encoded) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[x<|im_end|>]\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<think>why</think>x<|im_end|>]\n"
    )
    assert [(note.code, note.turn) for note in encoded.notes] == [("dropped-field", 1)]


def test_a_template_that_never_ends_a_turn_is_refused(tmp_path: Path) -> None:
    error = refusal(opened(tmp_path, OPEN_ENDED), ASK, "<|im_end|> was said")
    assert "never learn to stop" in error.message.replace("\n", " ")
    assert error.found == repr("\n")


def test_short_answers_are_not_mistaken_for_the_templates_own_text(tmp_path: Path) -> None:
    encoder = opened(tmp_path)
    for answer in ("e", "|", "im_end", "\n", "assistant", "<|im_end|>"):
        assert marked(encoder, encoder.encode_pair(ASK, answer)).endswith(f"[{answer}<|im_end|>]\n")


def test_without_an_end_token_plain_text_is_refused(tmp_path: Path) -> None:
    char_tokenizer(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    assert "no end-of-sequence token" in refusal(Encoder.open(tmp_path), "a").message


def test_no_assistant_turn(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no assistant turn"):
        opened(tmp_path).encode_messages(ASK)


def test_template_files_in_every_place(tmp_path: Path) -> None:
    char_tokenizer(tmp_path, template=None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())

    def template(inline: Any) -> str | None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": inline}))
        return Encoder.open(tmp_path).files.template

    assert template("a") == "a"
    assert template([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]) == "d"
    with pytest.raises(DataError, match="none is called `default`"):
        template([{"name": "rag", "template": "r"}])
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template("a") == "file"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    encoder = opened(tmp_path, eos_token={"__type": "AddedToken", "content": "<|unk|>"})
    assert encoder.eos_id == UNK_ID


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no `tokenizer.json`"):
        Encoder.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        Encoder.open(tmp_path)


@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = bpe_tokenizer([ALPHABET], 300) if kind == "bpe" else char_tokenizer(tmp_path)
    write_tokenizer(tmp_path, tokenizer, SYSTEM_BY_DEFAULT)
    encoder, reference = Encoder.open(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    turns = [*ASK, {"role": "assistant", "content": " 4 \n\n é"}]
    prompt = reference.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert encoder.encode_prompt(ASK) == prompt
    assert encoder.encode_messages(turns).tokens == reference.apply_chat_template(turns, return_dict=False)
    assert encoder.encode_prompt("a  b\nc") == reference("a  b\nc")["input_ids"]
    assert encoder.decode(prompt, skip_special=False) == reference.decode(prompt)
