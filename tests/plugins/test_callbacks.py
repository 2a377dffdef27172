"""Callbacks: they join a training, know their place in the key, and come back from checkpoints as they were."""

from __future__ import annotations

import json
import os
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.callback_runs import STEPS, foreign, interrupted_and_resumed, same, sft, trained
from helpers.contexts import FakeContext, catalogue, configured
from helpers.training import completion_rows, context_for, dataset_artifact, model_artifact, train, weights

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.callback import Callback
from posttrain.contracts.component import Config
from posttrain.errors import Interrupted, StageError, TrainingDiverged
from posttrain_plugins.callbacks.bema import Averaging, BemaOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


# Completions


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Artifact) -> FakeContext:
    """The training without callbacks."""
    return trained(tmp_path_factory.mktemp("plain"), model, [])


def test_completions_are_told_and_change_nothing(tmp_path: Path, model: Artifact, plain: FakeContext) -> None:
    asked = {"name": "completions", "every": 2, "prompts": ["ab"], "temperature": 1.0, "on_start": True}
    watched = trained(tmp_path / "watched", model, [asked | {"max_new_tokens": 5}])
    assert plain.losses == watched.losses
    assert same(weights(plain.output("model")), weights(watched.output("model")))
    table = watched.seen_tables["completions"]
    assert sorted(table) == [0, 2, 4, 6]
    assert [row["prompt"] for row in table[4]] == ["ab"]
    assert table[4][0]["tokens"] <= 5
    assert any(note.startswith("completions after step 4\n  ab → ") for note in watched.notes)


def test_completions_leave_dropout_masks_as_they_were(tmp_path: Path, plain: FakeContext) -> None:
    dropping = model_artifact(tmp_path / "model", attention_dropout=0.3)
    dropped = trained(tmp_path / "plain", dropping, [])
    watched = trained(
        tmp_path / "watched", dropping, [{"name": "completions", "every": 1, "max_new_tokens": 3}]
    )
    assert dropped.losses == watched.losses
    assert plain.losses != dropped.losses, "dropout is active, so its masks are looked at here"


def test_completions_ask_what_the_rows_ask(tmp_path: Path, model: Artifact) -> None:
    context = trained(
        tmp_path, model, [{"name": "completions", "every": STEPS, "rows": 2, "max_new_tokens": 2}]
    )
    rows = context.seen_tables["completions"][STEPS]
    assert [row["prompt"] for row in rows] == ["say 0:", "say 1:"]


def test_completions_need_something_to_ask(tmp_path: Path, model: Artifact) -> None:
    rows = [{"text": "abc"}] * 4
    context = context_for(
        tmp_path, "train.sft", model, rows, "text", callbacks=["completions"], max_steps=1, batch_size=2
    )
    with pytest.raises(StageError, match="no prompts to sample from"):
        train(context)


# BEMA


def simulated(path: list[float], config: BemaOptions) -> float:
    """The average of a scalar that takes these values after steps 0, 1, …, by the paper's formulas."""
    start = ema = average = path[config.after]
    for step in range(config.after + 1, len(path)):
        if (step - config.after) % config.every == 0 or step == len(path) - 1:
            age = config.lag + config.multiplier * step
            newest = max(age**-config.ema_power, config.min_weight)
            ema = (1 - newest) * ema + newest * path[step]
            average = ema + age**-config.bias_power * (path[step] - start)
    return average


@pytest.mark.parametrize(
    "options", [{}, {"after": 2, "every": 2}, {"min_weight": 0.5}, {"bias_power": 0.0, "every": 3}]
)
def test_bema_is_the_papers_average(options: dict[str, Any], tmp_path: Path, model: Artifact) -> None:
    config = BemaOptions(**{"every": 1, **options})
    context = sft(
        tmp_path, model, [{"name": "bema", "put_out": "beside", **config.model_dump(exclude={"put_out"})}]
    )
    seen: list[torch.Tensor] = []
    name = "model.layers.0.self_attn.q_proj.weight"
    original = Averaging.on_step_end

    def recording(self: Averaging, args: Any, state: Any, control: Any, **rest: Any) -> None:
        seen.append(self.training.weights()[name].clone())
        original(self, args, state, control, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averaging, "on_step_end", recording)
        train(context)
    values = [float(weights(model.path)[name][0, 0]), *(float(each[0, 0]) for each in seen)]
    assert len(values) == STEPS + 1
    assert float(weights(context.output("average"))[name][0, 0]) == pytest.approx(
        simulated(values, config), rel=1e-5
    )
    assert torch.equal(weights(context.output("model"))[name], seen[-1])


def test_bema_of_a_resumed_training_is_the_same(tmp_path: Path, model: Artifact) -> None:
    callbacks = [{"name": "bema", "every": 2}, {"name": "divergence"}]
    whole = trained(tmp_path / "whole", model, callbacks)
    resumed = interrupted_and_resumed(tmp_path / "resumed", model, callbacks)
    assert same(weights(whole.output("model")), weights(resumed.output("model")))
    (told,) = (note for note in whole.notes if "moving average" in note)
    assert (
        f"port `model` holds the moving average of the weights of steps 0 to {STEPS}, taken in every 2"
        in told
    )
    assert 0 < float(told.split(" weights is ")[1].split()[0]) < 1 and told in resumed.notes


def test_bema_that_has_not_begun_says_so(tmp_path: Path, model: Artifact) -> None:
    context = trained(tmp_path, model, [{"name": "bema", "after": STEPS + 1}], max_steps=1)
    assert any(f"ended before step {STEPS + 1}" in note for note in context.notes)


def test_what_is_evaluated_last_is_what_is_put_out(tmp_path: Path, model: Artifact) -> None:
    def evaluated(directory: Path, source: Artifact, **options: Any) -> float:
        context = sft(directory, source, **options)
        held_out = dataset_artifact(directory / "eval", completion_rows(4), "prompt_completion")
        context.inputs = {**context.inputs, "eval": [held_out]}
        return float(train(context).figures["eval/loss"])

    averaged = evaluated(tmp_path / "one", model, callbacks=[{"name": "bema", "every": 1}])
    made = sft(tmp_path / "one", model, []).output("model")
    again = Artifact("0" * 64, model.manifest, made)
    last = evaluated(tmp_path / "two", again, callbacks=[], max_steps=1, learning_rate=1e-30)
    assert averaged == pytest.approx(last, rel=1e-5)
    assert averaged != pytest.approx(evaluated(tmp_path / "three", model, callbacks=[]), rel=1e-4)


# The mean of checkpoints


class Recording:
    """Keeps the weights of the model after each step."""

    def __init__(self, training: Any, config: Config) -> None:
        _recorded.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        _recorded[state.global_step] = {
            name: each.detach().clone() for name, each in model.named_parameters()
        }


_recorded: dict[int, dict[str, torch.Tensor]] = {}


class Recorder(Callback):
    target = f"{__name__}:Recording"


def test_the_mean_of_the_last_weights_is_put_out(tmp_path: Path, model: Artifact) -> None:
    callbacks = [{"name": "merge_checkpoints", "last": 3, "every": 2}]
    whole = foreign(tmp_path / "whole", model, Recorder, callbacks=callbacks, max_steps=5)
    train(whole)
    put_out = weights(whole.output("model"))
    assert _recorded[5].keys() <= put_out.keys()
    for name in _recorded[5]:
        mean = sum(_recorded[step][name].double() for step in (2, 4, 5)) / 3
        assert torch.equal(put_out[name], mean.float()), name
    assert "the weights after the steps 2, 4, 5 are averaged" in whole.notes
    resumed = interrupted_and_resumed(tmp_path / "resumed", model, callbacks, max_steps=5)
    assert same(put_out, weights(resumed.output("model")))


# Divergence


def test_a_training_that_explodes_is_stopped_at_its_step(tmp_path: Path, model: Artifact) -> None:
    callbacks = [{"name": "divergence", "factor": 1.0001, "warmup": 2, "window": 4}]
    context = sft(tmp_path, model, callbacks, learning_rate=0.5, max_grad_norm=0)
    with pytest.raises(TrainingDiverged, match="has exploded") as error:
        train(context)
    assert "before its update" in str(error.value.where)


def test_a_metric_beyond_its_bound_stops_the_training(tmp_path: Path, model: Artifact) -> None:
    context = sft(tmp_path, model, [{"name": "divergence", "factor": None, "bounds": {"loss": 0.001}}])
    with pytest.raises(TrainingDiverged) as error:
        train(context)
    assert error.value.where == "step 1, before its update"
    assert "at most 0.001" in str(error.value)


def test_a_bound_of_nothing_is_refused(tmp_path: Path, model: Artifact) -> None:
    context = sft(tmp_path, model, [{"name": "divergence", "bounds": {"rewards/margin": 1.0}}])
    with pytest.raises(StageError, match="no such metric") as error:
        train(context)
    assert "grad_norm, loss" in str(error.value)


def test_a_step_that_exceeds_the_median_must_be_followed_by_others_where_patience_says_so() -> None:
    from posttrain_plugins.callbacks.divergence import DivergenceOptions, Watcher

    watcher = Watcher(None, DivergenceOptions(factor=2, warmup=2, window=3, patience=2))  # type: ignore[arg-type]
    for step, value in enumerate((1.0, 1.0, 5.0, 1.0, 5.0)):
        watcher._compared("loss", value, 2.0, step)
    assert list(watcher.seen["loss"]) == [1.0, 1.0, 1.0]
    with pytest.raises(TrainingDiverged):
        watcher._compared("loss", 5.0, 2.0, 6)


# Callbacks of others


class Drawing:
    """Draws from every generator wherever it can."""

    def __init__(self, training: Any, config: Config) -> None:
        self._draw()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._draw()

    def _draw(self) -> None:
        torch.rand(3)
        random.random()
        np.random.rand()


class Watching(Callback):
    target = f"{__name__}:Drawing"
    watches_only = True


def test_what_one_that_only_watches_draws_changes_no_dropout_mask(tmp_path: Path) -> None:
    dropping = model_artifact(tmp_path / "model", attention_dropout=0.3)
    alone = trained(tmp_path / "plain", dropping, [])
    watched = foreign(tmp_path / "watched", dropping, Watching)
    train(watched)
    assert alone.losses == watched.losses


def test_a_callback_of_transformers_is_one(tmp_path: Path, model: Artifact) -> None:
    class Exported(Callback):
        target = f"{__name__}:exported"

    first = foreign(tmp_path, model, Exported)
    first.stop_at = 3
    with pytest.raises(Interrupted):
        train(first)
    _made.clear()
    train(foreign(tmp_path, model, Exported))
    (counting,) = _made
    assert counting.steps == STEPS


_made: list[Any] = []


def exported(training: Any, config: Any) -> Any:
    """A callback that transformers would keep in its own checkpoints."""
    import transformers
    from transformers.trainer_callback import ExportableState

    class Counting(transformers.TrainerCallback, ExportableState):
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"steps": self.steps}}

    _made.append(Counting())
    return _made[-1]


# Uploading


class FakeHub:
    """Stands in for `huggingface_hub.HfApi`."""

    calls: list[tuple[str, Any]] = []
    refuses = False

    def __init__(self, token: str) -> None:
        self.calls.append(("token", token))

    def create_repo(self, id: str, **options: Any) -> None:
        self.calls.append(("create_repo", (id, options["private"])))

    def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> Any:
        if self.refuses:
            raise OSError("403 Forbidden: the token may not write")
        assert os.environ["HF_HUB_OFFLINE"] == "0"
        self.calls.append(("files", sorted(path.name for path in Path(folder_path).iterdir())))
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    import huggingface_hub

    monkeypatch.setenv("HUB_TOKEN", "hf_secret")
    monkeypatch.setattr(FakeHub, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(FakeContext, "secret", lambda self, reference: "hf_secret", raising=False)
    return FakeHub


UPLOAD = {"name": "hub_upload", "repo_id": "me/model", "token": "env:HUB_TOKEN"}


def test_the_finished_policy_is_uploaded(tmp_path: Path, model: Artifact, hub: type[FakeHub]) -> None:
    context = trained(tmp_path, model, [UPLOAD], max_steps=1)
    found = dict(hub.calls)
    assert found["token"] == "hf_secret"
    assert found["create_repo"] == ("me/model", True)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(found["files"])
    assert "uploaded to https://hub.example/me/model" in context.notes
    assert "hf_secret" not in json.dumps(context.config.model_dump(mode="json"))


def test_a_refused_upload_is_told_and_tried_again_without_training(
    tmp_path: Path, model: Artifact, hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "refuses", True)
    with pytest.raises(StageError, match="could not be uploaded: 403 Forbidden") as error:
        trained(tmp_path, model, [UPLOAD], max_steps=1, save_steps=1)
    assert "without training" in str(error.value.fix)
    monkeypatch.setattr(hub, "refuses", False)
    again = trained(tmp_path, model, [UPLOAD], max_steps=1, save_steps=1)
    assert "uploaded to https://hub.example/me/model" in again.notes
    assert again.losses == []


def test_an_upload_needs_repository_and_token() -> None:
    from posttrain.registry.problems import ConfigProblems

    stage = catalogue().stage("train.sft")
    for callback in ("hub_upload", {**UPLOAD, "repo_id": "model"}, {**UPLOAD, "token": "hf_abc"}):
        with pytest.raises(ConfigProblems):
            configured(stage, callbacks=[callback])


# Reporters


def test_tensorboard_gets_the_metrics(tmp_path: Path, model: Artifact) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    context = trained(tmp_path, model, ["tensorboard"], max_steps=3)
    (directory,) = (tmp_path / ".posttrain" / "tensorboard").iterdir()
    events = EventAccumulator(str(directory)).Reload()
    scalars = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [scalars[step] for step in (1, 2, 3)] == pytest.approx(context.losses)
    assert any(str(directory) in note for note in context.notes)


def test_wandb_stays_offline_unless_asked() -> None:
    from pydantic import ValidationError

    from posttrain_plugins.callbacks.wandb import WandbOptions

    assert WandbOptions().online is False
    with pytest.raises(ValidationError, match="online needs api_key"):
        WandbOptions(online=True)
    with pytest.raises(ValidationError, match="ignored without online"):
        WandbOptions(api_key="env:WANDB_API_KEY")


def library(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a library of metrics, which keeps what it is begun with."""
    module: Any = ModuleType(name)
    module.__spec__, module.run, module.began = ModuleSpec(name, None), None, {}
    module.init, module.Settings = module.began.update, SimpleNamespace
    monkeypatch.setitem(sys.modules, name, module)
    return module


def joining(context: FakeContext, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(FakeContext, "secret", lambda self, reference: "wandb_secret", raising=False)
    return SimpleNamespace(context=context, config=config, parallel=SimpleNamespace(rank=0))


def test_wandb_gets_its_key_for_one_run_and_nothing_but_metrics(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_plugins.callbacks import wandb

    fake = library("wandb", monkeypatch)
    for name in wandb.QUIET:
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    options = wandb.WandbOptions(online=True, api_key="env:WANDB_API_KEY")
    context = sft(tmp_path, model, [{"name": "wandb", **options.model_dump(mode="json")}])
    made = wandb.made(joining(context, context.config, monkeypatch), options)
    assert fake.began["settings"].api_key == "wandb_secret"
    assert "wandb_secret" not in json.dumps(fake.began["config"])
    assert not made._log_model.is_enabled
    assert {name: os.environ[name] for name in wandb.QUIET} == wandb.QUIET


def test_trackio_stays_on_this_machine(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_plugins.callbacks import trackio

    fake = library("trackio", monkeypatch)
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    for name in trackio.ELSEWHERE:
        monkeypatch.setenv(name, "acme/space")
    context = sft(tmp_path, model, ["trackio"])
    ended: list[str] = []
    fake.finish = lambda: ended.append("finished")
    made = trackio.made(joining(context, context.config, monkeypatch), trackio.TrackioOptions())
    made.on_train_end(None, None, None)
    assert ended == ["finished"]
    assert os.environ.keys().isdisjoint(trackio.ELSEWHERE)
    assert Path(os.environ["TRACKIO_DIR"]).is_relative_to(context.workspace)
    assert fake.began["project"] == "posttrain"
