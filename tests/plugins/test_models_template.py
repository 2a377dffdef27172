from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import NO_SYSTEM
from helpers.models import END_ID, as_artifact, save_tiny_model
from helpers.stages import catalogue, configured, run_stage

from posttrain.artifacts.fingerprint import fingerprint
from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, SourceMark
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems, config_schema, marked, semantic
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.models import gguf
from posttrain_plugins.models.init import Init, InitConfig
from posttrain_plugins.models.load import Load, LoadConfig
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.models.template import text_of_template
from posttrain_plugins.models.vocabulary import _ROLES, SPECIAL
from posttrain_plugins.templates.calling import WITH_CALLS, shows_calls
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.library import TEMPLATES, chatml
from posttrain_plugins.templates.render import ChatTemplate

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TALK = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def data(tmp_path: Path) -> Artifact:
    (tmp_path / "data").mkdir()
    rows = [{"prompt": "ab", "completion": "ba"}]
    facts = write_rows(tmp_path / "data", rows, "prompt_completion")
    return as_artifact(tmp_path / "data", facts, Kind.DATASET)


def added(directory: Path, *tokens: str) -> None:
    """Give a tokenizer more special tokens, in place of characters that it has."""
    definition = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    for token, character in zip(tokens, "0123456789", strict=False):
        vocabulary[token] = vocabulary.pop(character)
        definition["added_tokens"].append(
            {
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "id": vocabulary[token],
                "content": token,
                "special": True,
            }
        )
    definition["added_tokens"].sort(key=lambda token: token["id"])
    (directory / "tokenizer.json").write_text(json.dumps(definition))


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_named_template_becomes_the_models_only_one(tmp_path: Path, source: Path) -> None:
    added(source, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    edited(source / "tokenizer_config.json", chat_template="{{ 'old' }}")
    edited(source / "generation_config.json", temperature=0.5)
    run = run_stage(Load(), tmp_path, path="source", template="llama-3")
    output = run.output("model")
    assert (output / "chat_template.jinja").read_text() == TEMPLATES["llama-3"].source
    assert "chat_template" not in json.loads((output / "tokenizer_config.json").read_text())
    eot = Encoder.open(output).files.plain.token_to_id("<|eot_id|>")
    generation = json.loads((output / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [END_ID, eot], "pad_token_id": 0, "temperature": 0.5}
    facts = run.described["model"][1]
    assert facts.eos == tuple(sorted((END_ID, eot)))
    predicted = Load().predict(LoadConfig(path=str(source), template="llama-3"), {})["model"].facts
    known = predicted.model_dump(exclude_none=True)
    assert {key: facts.model_dump()[key] for key in known} == known


@pytest.mark.parametrize("name", ["chatml", "zephyr", "own"])
def test_the_facts_under_another_template_are_known_while_planning(
    tmp_path: Path, source: Path, name: str
) -> None:
    (tmp_path / "own.jinja").write_text(NO_SYSTEM)
    edited(source / "tokenizer_config.json", chat_template="{{ 'old' }}")
    template = str(tmp_path / "own.jinja") if name == "own" else name
    config = configured(Load(), path=str(source), template=template)
    before = (source / "tokenizer_config.json").read_bytes()
    predicted = Load().predict(config, {})["model"].facts
    assert (source / "tokenizer_config.json").read_bytes() == before
    run = run_stage(Load(), tmp_path, path="source", template=template)
    assert run.described["model"][1] == predicted
    assert predicted.has_template and predicted.template is not None and predicted.end_of_turn is not None


def test_planning_sees_a_template_file_that_changed(tmp_path: Path, source: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(NO_SYSTEM)
    config = configured(Load(), path=str(source), template=str(own))
    first = Load().predict(config, {})["model"].facts.template
    own.write_text(chatml())
    os.utime(own, ns=(1, 1))
    assert Load().predict(config, {})["model"].facts.template != first


def test_of_a_model_that_is_not_read_yet_the_templates_name_is_known(tmp_path: Path) -> None:
    facts = Load().predict(configured(Load(), gguf="a.gguf", template="qwen-3"), {})["model"].facts
    assert (facts.has_template, facts.template, facts.template_name) == (True, None, "qwen-3")


def test_templates_of_two_names_differ() -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    texts = {
        fingerprint(ChatTemplate(each.source, special).render, lambda text: [], "").text
        for each in TEMPLATES.values()
    }
    assert len(texts) == len(TEMPLATES)


def test_the_templates_that_show_calls_are_these() -> None:
    assert tuple(name for name, each in TEMPLATES.items() if shows_calls(each.source)) == WITH_CALLS


def test_a_package_whose_tokenizer_lacks_the_marks_is_named_before_its_weights_are_read(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")

    def write_tokenizer(file: Path, directory: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((source / name).read_bytes())

    monkeypatch.setattr(gguf, "write_tokenizer", write_tokenizer)
    monkeypatch.setattr(gguf, "convert", lambda *rest: pytest.fail("the weights were read"))
    with pytest.raises(DataError, match="no tokens for some marks") as caught:
        run_stage(Load(), tmp_path, gguf="a.gguf", template="llama-3")
    assert caught.value.where == "gguf: a.gguf"


def test_every_end_of_a_turn_stops(tmp_path: Path, source: Path) -> None:
    added(source, *TEMPLATES["harmony"].tokens)
    run = run_stage(Load(), tmp_path, path="source", template="harmony")
    generation = json.loads((run.output("model") / "generation_config.json").read_text())
    ids = [
        Encoder.open(run.output("model")).files.plain.token_to_id(end) for end in ("<|return|>", "<|call|>")
    ]
    assert generation["eos_token_id"] == [END_ID, *sorted(ids)]


def test_tokens_that_are_missing_are_named_while_planning(tmp_path: Path, source: Path) -> None:
    added(source, "<|start_header_id|>")
    with pytest.raises(DataError, match="no tokens for some marks of the chat template `llama-3`") as caught:
        run_stage(Load(), tmp_path, path="source", template="llama-3")
    assert caught.value.found == "missing `<|end_header_id|>`, `<|eot_id|>`"
    (finding,) = Load().check(configured(Load(), path=str(source), template="llama-3"), {})
    assert finding.level is Level.ERROR and "`<|eot_id|>`" in finding.message
    assert list(Load().check(configured(Load(), path=str(source), template="zephyr"), {})) == []
    edited(source / "tokenizer_config.json", eos_token=None)
    (finding,) = Load().check(configured(Load(), path=str(source), template="zephyr"), {})
    assert "no token to end a turn with" in finding.message


def test_a_path_is_a_template_too_and_its_content_is_in_the_key(tmp_path: Path, source: Path) -> None:
    (tmp_path / "own.jinja").write_text(NO_SYSTEM)
    for stage, options in ((Load(), {"path": str(source)}), (Init(), {})):
        config = configured(stage, template="./own.jinja", **options)
        assert config.template_file == "./own.jinja"
        assert (("template_file",), "./own.jinja") in marked(config, SourceMark)
        assert "template_file" not in semantic(config)
    run = run_stage(Load(), tmp_path, path="source", template="./own.jinja")
    assert (run.output("model") / "chat_template.jinja").read_text() == NO_SYSTEM
    (finding,) = Init().check(configured(Init(), template=str(tmp_path / "none.jinja")), {})
    assert "there is no" in finding.message
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        run_stage(Load(), tmp_path / "b", path=str(source), template=str(tmp_path / "bad.jinja"))


@pytest.mark.parametrize("stage", [Load(), Init()])
def test_names_that_are_none_and_options_that_contradict(stage: Any) -> None:
    options = {"path": "a"} if isinstance(stage, Load) else {}
    for given, part in (
        ({"template": "chatm"}, "there is no chat template `chatm`: did you mean `chatml`?"),
        ({"template": "chatml", "template_file": "x"}, "not both"),
        ({"template": "a.jinja", "template_file": "x"}, "not both"),
    ):
        with pytest.raises(ConfigProblems) as caught:
            configured(stage, **options, **given)
        assert part in str(caught.value)


@pytest.mark.parametrize("config", [LoadConfig, InitConfig])
def test_the_schema_lists_names_and_takes_paths(config: Any) -> None:
    text = json.dumps(config_schema(config, catalogue())["properties"]["template"])
    assert all(f'"{name}"' in text for name in TEMPLATES)
    assert "jinja$" in text


@pytest.mark.parametrize(
    "name", ["harmony", "llama-3.1", "deepseek-r1", "mistral-v3", "qwen-3", "vicuna", "gemma"]
)
def test_a_new_tokenizer_has_a_templates_tokens(tmp_path: Path, data: Artifact, name: str) -> None:
    run = run_stage(Init(), tmp_path, {"data": [data]}, template=name, **SMALL)
    artifact = run.result("model")
    encoder = Encoder.open(artifact.path)
    plain, special = encoder.files.plain, encoder.files.special
    for token in TEMPLATES[name].tokens:
        assert plain.encode(token, add_special_tokens=False).ids == [plain.token_to_id(token)]
        assert plain.token_to_id(token) in special
    assert encoder.template is not None
    text = encoder.template.render(TALK)
    ids = plain.encode(text, add_special_tokens=False).ids
    assert encoder.unk_id not in ids
    assert encoder.decode(ids, skip_special=False) == text
    ends = [plain.token_to_id(end) for end in TEMPLATES[name].ends or ("<|im_end|>",)]
    assert set(ends) <= set(encoder.stop_ids) and encoder.eos_id == ends[0]
    predicted = Init().predict(run.config, {})["model"].facts.model_dump(exclude_none=True)
    assert {key: artifact.facts.model_dump()[key] for key in predicted} == predicted
    declared = load_model(artifact.path, "float32").config.eos_token_id
    assert declared == (ends if len(ends) > 1 else ends[0])


def test_a_new_tokenizer_for_a_template_of_ones_own(tmp_path: Path, data: Artifact) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<|at|>{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|at|>assistant: {% endif %}"
    )
    options = {"template": str(tmp_path / "own.jinja"), "special_tokens": ["<|at|>", "<|eot|>"], **SMALL}
    run = run_stage(Init(), tmp_path, {"data": [data]}, **options)
    encoder = Encoder.open(run.output("model"))
    eot = encoder.files.plain.token_to_id("<|eot|>")
    assert encoder.end_of_turn == eot and set(encoder.stop_ids) == {END_ID, eot}
    assert encoder.template is not None
    ids = encoder.files.plain.encode(encoder.template.render(TALK), add_special_tokens=False).ids
    assert encoder.unk_id not in ids
    with pytest.raises(ConfigProblems, match="at least 262"):
        configured(Init(), **options, tokenizer="bpe", vocab_size=261)


def test_chatml_writes_the_roles_alone() -> None:
    assert set(text_of_template(chatml(), SPECIAL, SPECIAL[-1])) == set(_ROLES)
