"""Models that give numbers: opened, tried, saved, merged, and read at the right token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import END_ID, PAD_ID, as_artifact, save_tiny_model
from helpers.training import model_artifact
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from posttrain.artifacts.kinds import Kind, PolicyFacts, ScoreFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError, StageError, StoreError
from posttrain_plugins.models.adapters import merged
from posttrain_plugins.models.artifact import facts_of
from posttrain_plugins.models.heads import FORMS, _draw
from posttrain_plugins.models.policy import open_policy, save_policy
from posttrain_plugins.models.valued import numbers, open_valued, require_same_numbers, save_valued
from posttrain_plugins.models.valued_record import VALUES, Probe, probes_of, scores_of, write_record
from posttrain_plugins.training.adapters import with_adapter
from posttrain_plugins.training.head import Wanted
from posttrain_plugins.training.head.value import ValueHead
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.peft_options import Lora

REWARD, STEPS = Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL
KINDS = pytest.mark.parametrize("kind", FORMS)
PROBES = [Probe((5, 6, 7, 8), (1, 3)), Probe((9, 5, END_ID), (2,))]
CLASSES = {REWARD: AutoModelForSequenceClassification, STEPS: AutoModelForTokenClassification}


def store(*artifacts: Artifact) -> Any:
    return SimpleNamespace(artifact={each.digest: each for each in artifacts}.__getitem__)


def saved(
    directory: Path, model: Any, source: Artifact, kind: Kind = REWARD, base: str | None = None
) -> Artifact:
    """A model that was saved, with what it says of the probes kept beside it."""
    directory.mkdir()
    facts = save_valued(directory, model, source.path, base)
    kept = [
        replace(probe, values=tuple(values))
        for probe, values in zip(PROBES, numbers(model, PROBES), strict=True)
    ]
    write_record(directory, None, kept)
    return as_artifact(directory, facts, kind)


def flat(values: list[list[float]]) -> list[float]:
    return [value for each in values for value in each]


@KINDS
def test_a_policy_gets_a_fresh_head_that_depends_on_the_seed_alone(tmp_path: Path, kind: Kind):
    policy = model_artifact(tmp_path)
    first, again, other = (open_valued(policy, store(), kind, seed=seed).model for seed in (1, 1, 2))
    assert first.config.num_labels == FORMS[kind].outputs
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    trunk = open_policy(policy, store()).model.model.state_dict()
    assert all(torch.equal(trunk[name], tensor) for name, tensor in first.model.state_dict().items())
    assert isinstance(first, CLASSES[kind]._model_mapping[type(first.config)])


def test_drawing_a_head_leaves_every_generator_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`torch.manual_seed` would seed those of all GPUs too."""
    policy, before = model_artifact(tmp_path), torch.get_rng_state()
    head = torch.nn.Linear(3, 2)
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    torch.set_rng_state(before)
    _draw(head, 5, 0.5)
    assert seeded == [] and torch.equal(torch.get_rng_state(), before)
    expected = torch.empty(2, 3).normal_(0.0, 0.5, generator=torch.Generator().manual_seed(5))
    assert torch.equal(head.weight, expected) and not head.bias.any()
    assert open_valued(policy, store(), REWARD, seed=5).model.score.weight.isfinite().all()


@KINDS
def test_what_is_saved_gives_the_same_numbers_here_and_in_transformers(tmp_path: Path, kind: Kind):
    policy = model_artifact(tmp_path / "policy")
    model = open_valued(policy, store(), kind, seed=3).model
    artifact = saved(tmp_path / "judge", model, policy, kind)
    again = open_valued(artifact, store(), kind).model
    assert flat(numbers(again, PROBES)) == pytest.approx(flat(numbers(model, PROBES)), abs=1e-6)
    assert artifact.facts.head.endswith(("ForSequenceClassification", "ForTokenClassification"))
    assert artifact.facts.tokenizer == policy.facts.tokenizer
    assert artifact.facts.template == policy.facts.template
    plain, report = CLASSES[kind].from_pretrained(artifact.path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert plain.config.num_labels == FORMS[kind].outputs


def test_transformers_pooling_reads_the_same_token_in_a_padded_batch(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    model = open_valued(policy, store(), REWARD).model
    plain = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path / "judge", model, policy).path)
    long, short = (5, 6, 7, 8, END_ID), (9, END_ID)
    padded = torch.tensor([long, (*short, PAD_ID, PAD_ID, PAD_ID)])
    mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    found = plain(input_ids=padded, attention_mask=mask).logits[:, 0].tolist()
    alone = numbers(model, [Probe(long, (4,)), Probe(short, (1,))])
    assert found == pytest.approx(flat(alone), abs=1e-5)


def test_where_padding_ends_answers_too_transformers_is_given_no_padding_token(tmp_path: Path):
    """Else its pooling, which tells padding by the id, would read the token before the end."""
    policy = model_artifact(tmp_path / "policy")
    path = policy.path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|pad|>", "<|im_end|>"))
    artifact = as_artifact(policy.path, facts_of(policy.path))
    assert artifact.facts.pad == END_ID
    model = open_valued(artifact, store(), REWARD).model
    plain = AutoModelForSequenceClassification.from_pretrained(
        saved(tmp_path / "judge", model, artifact).path
    )
    answer = (5, 6, END_ID)
    found = plain(input_ids=torch.tensor([answer])).logits[0, 0].item()
    assert found == pytest.approx(numbers(model, [Probe(answer, (2,))])[0][0], abs=1e-5)
    with pytest.raises(ValueError, match="batch sizes > 1"):
        plain(input_ids=torch.tensor([answer, answer]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pad", [PAD_ID, END_ID, 7])
def test_a_score_is_the_same_alone_and_beside_longer_rows(tmp_path: Path, layout: str, pad: int):
    """Places are known: an end in the middle of a conversation, or padding that is one, changes nothing."""
    model = open_valued(model_artifact(tmp_path), store(), REWARD, attention="sdpa").model
    answers = [[5, END_ID, 6, END_ID], [5, END_ID, 9, 9, 9, 9, END_ID], [8, END_ID, END_ID]]
    masks = [[False] * (len(tokens) - 1) + [True] for tokens in answers]
    examples = [
        Example(row, (TokenSequence(tokens, mask, "completion", own=True),))
        for row, (tokens, mask) in enumerate(zip(answers, masks, strict=True))
    ]
    chosen = LAYOUTS[layout]
    micro = chosen.arrange(examples, pad, "cpu")
    with chosen.attending(model, micro):
        found = ValueHead()(model, micro, Wanted()).value
    alone = numbers(model, [Probe(tuple(tokens), (len(tokens) - 1,)) for tokens in answers])
    assert found is not None
    assert found.tolist() == pytest.approx(flat(alone), abs=1e-5)


def adapted(policy: Artifact, kind: Kind = REWARD, **options: Any) -> Any:
    """A model with a trained adapter and a trained head."""
    model = open_valued(policy, store(), kind, seed=1).model
    made = with_adapter(model, Lora(r=2, **options), None, FORMS[kind].task)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.full_like(parameter, 0.05 if "score" in name else 0.1))
    return made


@KINDS
@pytest.mark.parametrize("init", ["default", "pissa"])
def test_an_adapter_is_saved_with_its_head_and_opened_with_it(tmp_path: Path, kind: Kind, init: str):
    policy = model_artifact(tmp_path / "policy")
    made = adapted(policy, kind, init=init)
    before = numbers(made.model, PROBES)
    (tmp_path / "judge").mkdir()
    facts = save_valued(tmp_path / "judge", made.model, policy.path, policy.digest, initial=made.initial)
    artifact = as_artifact(tmp_path / "judge", facts, kind)
    again = open_valued(artifact, store(policy), kind)
    assert again.base == policy
    assert flat(numbers(again.model, PROBES)) == pytest.approx(flat(before), abs=1e-5)
    assert again.model.get_base_model().config.num_labels == FORMS[kind].outputs
    assert facts.base == policy.digest and facts.missing is None
    fresh = open_valued(policy, store(), kind, seed=1).model
    assert flat(numbers(fresh, PROBES)) != pytest.approx(flat(before), abs=1e-2)


@KINDS
def test_a_merged_adapter_keeps_the_head(tmp_path: Path, kind: Kind):
    policy = model_artifact(tmp_path / "policy")
    made = adapted(policy, kind)
    before = flat(numbers(made.model, PROBES))
    whole = saved(tmp_path / "merged", merged(made.model), policy, kind)
    again = open_valued(whole, store(), kind).model
    assert flat(numbers(again, PROBES)) == pytest.approx(before, abs=1e-5)
    assert again.config.num_labels == FORMS[kind].outputs
    plain = CLASSES[kind].from_pretrained(whole.path)
    assert flat(numbers(plain, PROBES)) == pytest.approx(before, abs=1e-5)


def test_plain_peft_opens_an_adapter_with_its_head(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    made = adapted(policy)
    artifact = saved(tmp_path / "judge", made.model, policy, base=policy.digest)
    base = AutoModelForSequenceClassification.from_pretrained(policy.path, num_labels=1)
    plain = PeftModel.from_pretrained(base, artifact.path)
    assert flat(numbers(plain, PROBES)) == pytest.approx(flat(numbers(made.model, PROBES)), abs=1e-5)


def test_an_adapter_without_its_head_is_not_opened(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    policy = model_artifact(tmp_path / "policy")
    artifact = saved(tmp_path / "judge", adapted(policy).model, policy, base=policy.digest)
    file = artifact.path / "adapter_model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if "score" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"score\.weight"):
        open_valued(artifact, store(policy), REWARD)


def test_an_adapter_for_another_task_is_not_saved_as_one_with_a_head(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    model = open_valued(policy, store(), REWARD).model
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(StageError, match="head would not be saved"):
        save_valued(tmp_path, made, policy.path, policy.digest)


def without_head(artifact: Artifact) -> Artifact:
    from safetensors.torch import load_file, save_file

    file = artifact.path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if "score" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    return as_artifact(artifact.path, facts_of(artifact.path), artifact.kind)


@KINDS
def test_a_model_without_its_head_is_not_opened(tmp_path: Path, kind: Kind):
    policy = model_artifact(tmp_path / "policy")
    artifact = saved(tmp_path / "judge", open_valued(policy, store(), kind).model, policy, kind)
    broken = without_head(artifact)
    assert broken.facts.missing == ("score.weight",)
    with pytest.raises(StageError, match="weight files do not fit"):
        open_valued(broken, store(), kind)


def test_a_head_of_random_numbers_is_noticed(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    artifact = saved(tmp_path / "judge", open_valued(policy, store(), REWARD, seed=1).model, policy)
    (tmp_path / "other").mkdir()
    save_valued(tmp_path / "other", open_valued(policy, store(), REWARD, seed=2).model, policy.path)
    (tmp_path / "other" / "model.safetensors").replace(artifact.path / "model.safetensors")
    with pytest.raises(StageError, match="does not give the numbers that were kept"):
        open_valued(artifact, store(), REWARD)


def test_numbers_that_are_not_finite_do_not_agree(tmp_path: Path):
    model = open_valued(model_artifact(tmp_path), store(), REWARD).model
    kept = Probe((5, 6), (1,), (numbers(model, [Probe((5, 6), (1,))])[0][0],))
    write_record(tmp_path, None, [kept])
    require_same_numbers(model, tmp_path)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    with pytest.raises(StageError, match="does not give the numbers"):
        require_same_numbers(model, tmp_path)


def test_a_head_with_another_number_of_outputs_is_refused(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    model = open_valued(policy, store(), REWARD, outputs=3).model
    (tmp_path / "judge").mkdir()
    artifact = as_artifact(tmp_path / "judge", save_valued(tmp_path / "judge", model, policy.path), REWARD)
    with pytest.raises(StageError, match="another number of outputs") as caught:
        open_valued(artifact, store(), REWARD)
    assert "3" in str(caught.value.found) and caught.value.expected == "1"


def test_an_adapter_of_a_policy_is_merged_before_it_gets_a_head(tmp_path: Path):
    policy = model_artifact(tmp_path / "policy")
    made = with_adapter(open_policy(policy, store()).model, Lora(r=2))
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    (tmp_path / "adapter").mkdir()
    facts = save_policy(tmp_path / "adapter", made.model, policy.path, base=policy.digest)
    adapter = as_artifact(tmp_path / "adapter", facts, Kind.ADAPTER)
    opened = open_valued(adapter, store(policy), REWARD, trainable=True)
    assert opened.base is None and all(each.requires_grad for each in opened.model.parameters())
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = made.model.get_base_model().model(tokens)[0]
        found = opened.model.model(tokens)[0]
    assert torch.allclose(found, expected, atol=1e-5)
    bare = as_artifact(adapter.path, facts.model_copy(update={"base": None}), Kind.ADAPTER)
    with pytest.raises(StoreError, match="does not say which model"):
        open_valued(bare, store(policy), REWARD)


def test_an_architecture_without_such_a_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy = model_artifact(tmp_path)
    monkeypatch.setattr(AutoModelForSequenceClassification, "_model_mapping", {})
    with pytest.raises(StageError, match="no head for numbers") as caught:
        open_valued(policy, store(), REWARD)
    assert caught.value.found == "llama"


def test_statistics_stand_beside_the_weights_and_among_the_facts(tmp_path: Path):
    save_tiny_model(tmp_path)
    assert facts_of(tmp_path).scores is None and probes_of(tmp_path) == []
    scores = ScoreFacts(mean=0.5, deviation=2.0, count=8, accuracy=0.75, judged=4, held_out=True)
    write_record(tmp_path, scores, [Probe((1, 2), (1,), (0.25,))])
    assert scores_of(tmp_path) == scores
    assert facts_of(tmp_path) == PolicyFacts(**{**dict(facts_of(tmp_path)), "scores": scores})
    assert probes_of(tmp_path) == [Probe((1, 2), (1,), (0.25,))]
    (tmp_path / VALUES).write_text('{"scores": {"mean": "much"}, "probes": [{"tokens": [1]}]}')
    for read in (scores_of, probes_of):
        with pytest.raises(DataError, match=VALUES):
            read(tmp_path)
