from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import ALPHABET, END_ID, PAD_ID, UNK_ID, as_artifact, save_tiny_model, tiny_llama
from helpers.stages import contents

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.errors import DataError, StageError, StoreError
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.policy import load_model, open_policy, save_policy


class Known:
    def __init__(self, *artifacts: Artifact) -> None:
        self._artifacts = {artifact.digest: artifact for artifact in artifacts}

    def artifact(self, digest: str) -> Artifact:
        return self._artifacts[digest]


@pytest.fixture
def model(tmp_path: Path) -> Artifact:
    directory = tmp_path / "model"
    return as_artifact(directory, save_tiny_model(directory))


def lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        chosen = {"r": 2, "target_modules": ["v_proj", "q_proj"], "init_lora_weights": False, **options}
        return get_peft_model(model, LoraConfig(**chosen))


def saved_adapter(directory: Path, base: Artifact, **options: Any) -> Artifact:
    directory.mkdir()
    facts = save_policy(directory, lora(load_model(base.path, "float32"), **options), base.path, base.digest)
    return as_artifact(directory, facts, Kind.ADAPTER)


def test_the_facts_of_a_model(model: Artifact) -> None:
    facts = model.facts
    vocabulary = len(set(ALPHABET)) + 4
    # embeddings, then per layer q, k, v, o (16x16, 8x16, 8x16, 16x16), gate, up, down (16x32), two norms; last norm
    parameters = vocabulary * 16 + 2 * (2 * 256 + 2 * 128 + 3 * 512 + 2 * 16) + 16
    assert facts.model_dump(exclude={"tokenizer", "template", "shape"}) == {
        "type": "policy",
        "architecture": "llama",
        "dtype": "float32",
        "parameters": parameters,
        "layers": 2,
        "width": 16,
        "vocabulary": vocabulary,
        "reachable": vocabulary,
        "embeddings": vocabulary,
        "context": 128,
        "has_template": True,
        "template_name": None,
        "overruled": (),
        "opens": True,
        "calls": False,
        "bos_twice": False,
        "bos": None,
        "eos": (END_ID,),
        "end_of_turn": END_ID,
        "declared_eos": (END_ID,),
        "pad": PAD_ID,
        "unk": UNK_ID,
        "head": "LlamaForCausalLM",
        "missing": (),
        "base": None,
        "adapter": None,
        "generation": {"eos_token_id": END_ID, "pad_token_id": PAD_ID},
        "quantization": None,
        "merge": None,
        "sees": False,
        "scores": None,
    }
    assert facts.template is not None
    assert facts.shape["hidden_size"] == 16 and facts.shape["rope.theta"] == 10000.0


def test_saving_equal_weights_gives_equal_bytes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "a")
    reopened = load_model(tmp_path / "a", "float32")
    (tmp_path / "b").mkdir()
    save_policy(tmp_path / "b", reopened, tmp_path / "a")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert not [key for key in config if key.startswith("_") or "version" in key]
    assert str(tmp_path) not in str(contents(tmp_path / "b"))


def test_what_the_weights_say_is_what_comes_back(tmp_path: Path) -> None:
    made = tiny_llama(len(set(ALPHABET)) + 4, seed=3)
    save_tiny_model(tmp_path / "m", seed=3)
    for name, value in load_model(tmp_path / "m", "float32").state_dict().items():
        assert torch.equal(value, made.state_dict()[name])
    assert load_model(tmp_path / "m", "bfloat16").dtype == torch.bfloat16


def test_an_open_policy_is_frozen_unless_it_is_to_be_trained(model: Artifact) -> None:
    policy = open_policy(model, Known())
    assert not policy.model.training
    assert policy.base is None
    assert not any(p.requires_grad for p in policy.model.parameters())
    assert all(p.requires_grad for p in open_policy(model, Known(), trainable=True).model.parameters())


def test_an_adapter_opens_on_its_base(tmp_path: Path, model: Artifact) -> None:
    adapter = saved_adapter(tmp_path / "adapter", model)
    policy = open_policy(adapter, Known(model), trainable=True)
    assert policy.base is model
    trainable = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * 2
    assert all("lora" in name for name in trainable)
    tokens = torch.tensor([[2, 5, 6]])
    expected = lora(load_model(model.path, "float32")).eval()
    with torch.no_grad():
        assert torch.equal(policy.model(tokens).logits, expected(tokens).logits)
        assert not torch.equal(policy.model(tokens).logits, open_policy(model, Known()).model(tokens).logits)
    assert not any(p.requires_grad for p in open_policy(adapter, Known(model)).model.parameters())


def test_the_facts_of_an_adapter(tmp_path: Path, model: Artifact) -> None:
    facts = saved_adapter(tmp_path / "adapter", model).facts
    assert facts.base == model.digest
    # two layers; q: 2x16 and 16x2, v: 2x16 and 8x2
    assert facts.parameters == 2 * (32 + 32 + 32 + 16)
    assert facts.adapter["target_modules"] == ["q_proj", "v_proj"]
    assert (facts.architecture, facts.layers, facts.template) == ("llama", 2, model.facts.template)
    assert facts.embeddings == model.facts.embeddings


def test_adapters_are_saved_with_equal_bytes_and_no_paths(tmp_path: Path, model: Artifact) -> None:
    first = saved_adapter(tmp_path / "a", model)
    second = saved_adapter(tmp_path / "b", model, target_modules=["q_proj", "v_proj"])
    assert contents(first.path) == contents(second.path)
    assert str(tmp_path) not in str(contents(first.path))
    config = json.loads((first.path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == model.digest
    assert "peft_version" not in config
    assert not (first.path / "README.md").exists()
    (tmp_path / "c").mkdir()
    save_policy(
        tmp_path / "c", open_policy(first, Known(model), trainable=True).model, first.path, model.digest
    )
    assert contents(tmp_path / "c") == contents(first.path)


def test_an_adapter_without_a_base_is_refused(tmp_path: Path, model: Artifact) -> None:
    with pytest.raises(StageError, match="digest of its base"):
        save_policy(tmp_path, lora(load_model(model.path, "float32")), model.path)
    adapter = saved_adapter(tmp_path / "a", model)
    orphan = as_artifact(adapter.path, adapter.facts.model_copy(update={"base": None}), Kind.ADAPTER)
    with pytest.raises(StoreError, match="does not say which model"):
        open_policy(orphan, Known(model))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny_model(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match="do not fit the architecture") as caught:
        load_model(tmp_path / "m", "float32")
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value.found)


def test_companions_follow_the_source(tmp_path: Path, model: Artifact) -> None:
    source = tmp_path / "source"
    shutil.copytree(model.path, source)
    (source / "generation_config.json").unlink()
    (source / "chat_template.jinja").unlink()
    target = tmp_path / "target"
    target.mkdir()
    facts = save_policy(target, load_model(model.path, "float32"), source)
    assert facts.generation is None
    assert facts.has_template is False
    assert facts.template is None
    assert facts.eos == (END_ID,)


@pytest.mark.parametrize("damage", ["truncated", "empty", "not-json"])
def test_damaged_weights_are_refused(model: Artifact, damage: str) -> None:
    path = model.path / "model.safetensors"
    content = path.read_bytes()
    broken = {"truncated": content[:-4], "empty": b"", "not-json": content[:8] + b"x" + content[9:]}
    path.write_bytes(broken[damage])
    with pytest.raises(DataError, match=r"truncated|damaged"):
        facts_of(model.path)


def test_pickled_weights_are_refused(model: Artifact) -> None:
    (model.path / "model.safetensors").rename(model.path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"holds no `model.safetensors`") as caught:
        facts_of(model.path)
    assert caught.value.found == "pytorch_model.bin"
    assert "can run code" in str(caught.value.expected)


def test_a_missing_shard_is_named(model: Artifact) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (model.path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="shards named in the index are missing") as caught:
        facts_of(model.path)
    assert caught.value.found == "model-1.safetensors"


def test_the_parent_process_can_read_facts_without_torch(model: Artifact) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from posttrain_plugins.models.artifact import facts_of; "
        f"print(facts_of(Path({str(model.path)!r})).layers, sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "2 []"
