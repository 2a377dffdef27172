from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import as_artifact
from helpers.stages import configured, contents, run_stage

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.registry.components import ConfigProblems
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.models.init import Init
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.templates.encoder import Encoder

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def data(directory: Path, *texts: str) -> Artifact:
    directory.mkdir(parents=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": text[::-1]}],
        }
        for text in texts
    ]
    return as_artifact(directory, write_rows(directory, rows, "prompt_completion"), Kind.DATASET)


def test_the_characters_of_all_inputs_and_nothing_else(tmp_path: Path) -> None:
    inputs = {"data": [data(tmp_path / "d1", "xyz"), data(tmp_path / "d2", "ö 7")]}
    run = run_stage(Init(), tmp_path, inputs, **SMALL)
    artifact = run.result("model")
    encoder = Encoder.open(artifact.path)
    specials, roles = 4, set("system user assistant".replace(" ", "")) | {"\n"}
    assert artifact.facts.vocabulary == specials + len(roles | set("xyzö 7"))
    text = "zö7 x"
    assert encoder.decode(encoder.encode_prompt(text)) == text
    assert encoder.unk_id in encoder.encode_prompt("Q")
    assert encoder.unk_id not in encoder.encode_prompt([{"role": "user", "content": text}])


def test_predicted_facts_come_true(tmp_path: Path) -> None:
    inputs = {"data": [data(tmp_path / "d", "abc")]}
    for name, options in {"a": {}, "b": {"tokenizer": "bpe", "vocab_size": 300, "dtype": "bfloat16"}}.items():
        run = run_stage(Init(), tmp_path / name, inputs, **SMALL, **options)
        predicted = Init().predict(run.config, {})["model"].facts.model_dump(exclude_none=True)
        actual = run.described["model"][1].model_dump()
        assert {key: actual[key] for key in predicted} == predicted
        assert actual["template"] is not None


def test_equal_options_give_equal_bytes_and_seeds_differ(tmp_path: Path) -> None:
    inputs = {"data": [data(tmp_path / "d", "abc", "the cat sat on the mat")]}
    made = {}
    for name, options in {
        "a": {"seed": 1},
        "b": {"seed": 1},
        "c": {"seed": 2},
        "d": {"tokenizer": "bpe", "vocab_size": 280},
        "e": {"tokenizer": "bpe", "vocab_size": 280},
    }.items():
        torch.manual_seed(len(made))
        before = torch.get_rng_state()
        run = run_stage(Init(), tmp_path / name, inputs, **SMALL, **options)
        assert torch.equal(torch.get_rng_state(), before)
        made[name] = contents(run.output("model"))
    assert made["a"] == made["b"]
    assert made["d"] == made["e"]
    changed = {name for name in made["a"] if made["a"][name] != made["c"][name]}
    assert changed == {"model.safetensors"}


def test_a_trained_vocabulary_spells_anything(tmp_path: Path) -> None:
    inputs = {"data": [data(tmp_path / "d", "the cat sat on the mat " * 5)]}
    run = run_stage(Init(), tmp_path, inputs, **SMALL, tokenizer="bpe", vocab_size=280)
    encoder = Encoder.open(run.output("model"))
    assert encoder.decode(encoder.encode_prompt("Größe 🌍")) == "Größe 🌍"
    assert len(encoder.encode_prompt("the cat")) < 7
    assert encoder.vocabulary == 280


def test_the_model_opens_and_has_the_shape_asked_for(tmp_path: Path) -> None:
    inputs = {"data": [data(tmp_path / "d", "abc")]}
    run = run_stage(
        Init(),
        tmp_path,
        inputs,
        **SMALL,
        num_key_value_heads=1,
        intermediate_size=24,
        tie_word_embeddings=False,
    )
    model = load_model(run.output("model"), "float32")
    assert model.config.intermediate_size == 24
    assert model.config.num_key_value_heads == 1
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"hidden_size": 20, "num_attention_heads": 4}, "multiple of 8: 4 attention heads of even size"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"tokenizer": "bpe"}, "`vocab_size` belongs to `tokenizer: bpe`, which needs it"),
        ({"vocab_size": 300}, "`vocab_size` belongs to `tokenizer: bpe`"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "at least 260"),
        ({"architecture": "mamba"}, "architecture"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        configured(Init(), **options)
    assert part in str([(problem.path, problem.message) for problem in caught.value.problems])
