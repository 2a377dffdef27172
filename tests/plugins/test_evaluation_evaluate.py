from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.evaluation import Context, dataset
from helpers.models import END_ID
from helpers.training import context_for as training_context
from helpers.training import model_artifact

from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts
from posttrain.contracts.stage import Certainty, Input, Level
from posttrain.errors import DataError, Interrupted
from posttrain_plugins.data.rows import prompt_hash
from posttrain_plugins.data.tasks import tasks_of
from posttrain_plugins.evaluation import measure
from posttrain_plugins.evaluation.evaluate import Evaluate, EvaluateConfig
from posttrain_plugins.evaluation.report import read_items
from posttrain_plugins.models.policy import open_policy
from posttrain_plugins.rollouts.generation import Generation

PAIRS = [{"prompt": f"say {i}:", "completion": "ab" * (1 + i % 3)} for i in range(6)]
CHATS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "yes"}]}
    for i in range(4)
]


def context_for(
    directory: Path, rows: Sequence[Any], format: str, models: int = 1, **options: Any
) -> Context:
    config = EvaluateConfig(**{"max_new_tokens": 4, **options})
    found = [model_artifact(directory / f"model{i}", seed=i, hidden_size=16 * (1 + i)) for i in range(models)]
    return Context(directory, config, {"models": found, "data": [dataset(directory / "data", rows, format)]})


def items_of(context: Context) -> list[Any]:
    return [item for own in read_items(context.output("report")).values() for item in own]


def answering(monkeypatch: pytest.MonkeyPatch, texts: Sequence[tuple[str, bool]]) -> None:
    """Let every model answer with these texts; the second value says whether it ended by itself."""

    def answer(policy: Any, prompts: Sequence[Any], **_: Any) -> list[list[Generation]]:
        encoder = policy.encoder
        return [
            [Generation(encoder.files.plain.encode(text, add_special_tokens=False).ids, finished)]
            for text, finished in texts[: len(prompts)]
        ]

    monkeypatch.setattr(measure, "generate", answer)


def test_exact_match_counts_finished_answers_that_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Right, right but for white space, wrong, right but cut off, empty, wrong.
    answering(
        monkeypatch,
        [("ab", True), (" abab\n", True), ("abab", True), ("ab", False), ("", True), ("no", True)],
    )
    context = context_for(tmp_path, PAIRS, "prompt_completion")
    outcome = measure.run(context)
    assert [item.correct for item in items_of(context)] == [True, True, False, False, False, False]
    assert outcome.figures == {"exact_match": pytest.approx(2 / 6)}
    kind, facts = context.described["report"]
    model = context.inputs["models"][0].digest
    assert (kind, facts.report, facts.subjects) == (Kind.REPORT, "evaluation", (model,))
    report = json.loads((context.output("report") / "report.json").read_text())
    assert report["models"][model]["counts"] == {"rows": 6, "empty": 1, "truncated": 1}
    assert report["models"][model]["metrics"]["exact_match"]["count"] == 6
    assert report["data"] == context.input("data").digest
    assert [item.prompt for item in items_of(context)] == [
        prompt_hash(row, "prompt_completion") for row in PAIRS
    ]


def test_an_answer_with_a_special_token_in_it_is_not_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, [("ab", True), ("<|im_start|>abab", True), ("ababab<|im_start|>", True)])
    context = context_for(tmp_path, PAIRS[:3], "prompt_completion")
    measure.run(context)
    assert [item.correct for item in items_of(context)] == [True, False, False]
    assert items_of(context)[1].prediction == "abab", "decoding drops it, so the texts look the same"


def test_the_model_is_put_on_the_device_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_plugins.data import best_of_n
    from posttrain_plugins.models import policy as policies
    from posttrain_plugins.training import ranks
    from posttrain_plugins.training import stage as training

    assert (
        open_policy(model_artifact(tmp_path / "m"), SimpleNamespace(), device="meta").model.device.type
        == "meta"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert policies.usable_device() == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert policies.usable_device() == "cpu"

    class Opened(Exception):
        pass

    def opened(*_: Any, device: str = "cpu", **__: Any) -> None:
        raise Opened(device)

    for module in (measure, training, policies):
        monkeypatch.setattr(module, "open_policy", opened)
        monkeypatch.setattr(module, "usable_device", lambda: "the device")
    context = context_for(tmp_path, PAIRS, "prompt_completion")
    inputs = {"model": context.inputs["models"], "prompts": context.inputs["data"]}
    sampling = Context(tmp_path, best_of_n.BestOfNConfig(reward="exact"), inputs)
    learning = training_context(
        tmp_path / "t", "train.sft", context.inputs["models"][0], PAIRS, "prompt_completion"
    )
    for run, given in ((measure.run, context), (best_of_n.run, sampling), (ranks.run, learning)):
        with pytest.raises(Opened, match="the device"):
            run(given)


def test_a_chat_is_asked_up_to_its_last_turn(tmp_path: Path) -> None:
    context = context_for(tmp_path, CHATS, "messages", metrics=["exact_match", "perplexity"])
    measure.run(context)
    assert {item.target for item in items_of(context)} == {"yes"}
    assert {item.tokens for item in items_of(context)} == {4}, "three characters and the end of turn"


def test_generation_and_scoring_agree_with_the_model(tmp_path: Path) -> None:
    """The whole way on a real model: it gets those rows right whose reference is its own greedy answer."""
    model = model_artifact(tmp_path / "model", initializer_range=0.5)
    policy = open_policy(model, Context(tmp_path, None, {}))
    references = []
    for row in PAIRS:
        ids = torch.tensor([policy.encoder.encode_prompt(row["prompt"])])
        new = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60, eos_token_id=END_ID
        )[0, ids.shape[1] :].tolist()
        answer, ended = [token for token in new if token != END_ID], END_ID in new
        text = policy.encoder.decode(answer)
        # An answer with a special token in it never equals a text.
        references.append((text, ended and text == policy.encoder.decode(answer, skip_special=False)))
    rows = [
        {"prompt": row["prompt"], "completion": text or "-"}
        for row, (text, _) in zip(PAIRS, references, strict=True)
    ]
    data = dataset(tmp_path / "data", rows, "prompt_completion")
    config = EvaluateConfig(metrics=["exact_match", "perplexity"], max_new_tokens=60)
    context = Context(tmp_path, config, {"models": [model], "data": [data]})
    outcome = measure.run(context)
    assert [item.correct for item in items_of(context)] == [
        bool(text) and ended for text, ended in references
    ]
    nll, tokens = 0.0, 0
    for row in rows:
        encoded = policy.encoder.encode_pair(row["prompt"], row["completion"])
        with torch.no_grad():
            logp = policy.model(torch.tensor([encoded.tokens])).logits[0].double().log_softmax(-1)
        wanted = [t for t, counts in enumerate(encoded.supervised) if counts]
        nll -= sum(float(logp[t - 1, encoded.tokens[t]]) for t in wanted)
        tokens += len(wanted)
    assert outcome.figures["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def test_several_models_are_named_by_digest_and_equal_ones_measured_once(tmp_path: Path) -> None:
    context = context_for(tmp_path, PAIRS, "prompt_completion", models=2)
    first, second = context.inputs["models"]
    context.inputs = {**context.inputs, "models": [first, second, first]}
    outcome = measure.run(context)
    assert set(outcome.figures) == {f"exact_match[{model.digest[:8]}]" for model in (first, second)}
    assert len(items_of(context)) == 2 * len(PAIRS)
    assert context.seen_progress[-1] == (12, 12, "rows")


def test_limit_takes_the_same_rows_in_any_order() -> None:
    some = tasks_of(PAIRS, "prompt_completion", 3, seed=0)
    again = tasks_of(PAIRS[::-1], "prompt_completion", 3, seed=0)
    assert [task.identity for task in some] == [task.identity for task in again[::-1]]
    assert len(some) == 3
    choices = {
        frozenset(task.identity for task in tasks_of(PAIRS, "prompt_completion", 3, seed))
        for seed in range(9)
    }
    assert len(choices) > 1


def test_a_row_that_occurs_twice_is_two_items() -> None:
    found = tasks_of([PAIRS[0], PAIRS[1], PAIRS[0]], "prompt_completion", None, 0)
    assert found[2].identity == f"{found[0].identity}#2"


def test_an_answer_column_replaces_the_completion(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": "8"}]
    context = context_for(tmp_path, rows, "prompt")
    measure.run(context)
    assert [item.target for item in items_of(context)] == ["7", "8"]


def test_rows_without_a_reference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no reference answer"):
        measure.run(context_for(tmp_path, [{"prompt": "a", "answer": None}], "prompt"))
    with pytest.raises(DataError, match="perplexity needs completions"):
        measure.run(context_for(tmp_path, [{"prompt": "a"}], "prompt", metrics=["perplexity"]))
    open_ended = [{"messages": [*CHATS[0]["messages"], {"role": "user", "content": "and?"}]}]
    with pytest.raises(DataError, match="does not end with an assistant turn"):
        measure.run(context_for(tmp_path, open_ended, "messages"))


def test_suspicious_answers_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [("ab", False)] * 6)
    context = context_for(tmp_path, PAIRS, "prompt_completion")
    measure.run(context)
    ((level, message),) = context.said
    assert level == Level.WARNING
    assert message.startswith("6 of 6 answers")


def test_stopping_is_heard(tmp_path: Path) -> None:
    context = context_for(tmp_path, PAIRS, "prompt_completion")
    context.stop = True
    with pytest.raises(Interrupted):
        measure.run(context)


def check(config: EvaluateConfig, data: DatasetFacts, model: PolicyFacts | None = None) -> list[Any]:
    inputs = {
        "models": [Input("sft.model", Kind.MODEL, model or PolicyFacts())],
        "data": [Input("d.test", Kind.DATASET, data)],
    }
    return list(Evaluate().check(config, inputs))


def test_plan_refuses_metrics_that_the_data_cannot_give() -> None:
    prompt = DatasetFacts(format="prompt", columns=("prompt", "solution"))
    assert check(EvaluateConfig(), DatasetFacts()) == []
    assert check(EvaluateConfig(answer_column="solution"), prompt) == []
    (missing,) = check(EvaluateConfig(), prompt)
    assert (missing.level, missing.certainty, missing.port) == (Level.ERROR, Certainty.PREDICTED, "data")
    assert "`answer`" in missing.message
    (perplexity,) = check(EvaluateConfig(metrics=["perplexity"]), prompt)
    assert "perplexity needs completions" in perplexity.message


def test_plan_refuses_answers_longer_than_the_context() -> None:
    (found,) = check(EvaluateConfig(max_new_tokens=128), DatasetFacts(), PolicyFacts(context=128))
    assert "leaves no room" in found.message
    assert check(EvaluateConfig(max_new_tokens=127), DatasetFacts(), PolicyFacts(context=128)) == []


def test_the_defaults_of_a_fresh_model_and_of_evaluating_it_go_together() -> None:
    from posttrain_plugins.models.init import InitConfig

    context = InitConfig.model_fields["max_position_embeddings"].default
    assert check(EvaluateConfig(), DatasetFacts(), PolicyFacts(context=context)) == []


def test_prediction_names_models_only_when_all_are_known(tmp_path: Path) -> None:
    artifact = model_artifact(tmp_path / "m")
    known = Input("a.model", Kind.MODEL, artifact.facts, artifact)
    unknown = Input("b.model", Kind.MODEL, PolicyFacts())
    predict = Evaluate().predict
    assert predict(EvaluateConfig(), {"models": [known, known]})["report"].facts.subjects == (
        artifact.digest,
    )
    assert predict(EvaluateConfig(), {"models": [known, unknown]})["report"].facts.subjects is None


def test_metrics_are_named_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        EvaluateConfig(metrics=["exact_match", "exact_match"])
