"""How trainings end: at the last step, early, or asked to stop; what is evaluated, put out and kept then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.callback_runs import STEPS, foreign, same, sft, trained
from helpers.contexts import FakeContext
from helpers.training import (
    context_for,
    dataset_artifact,
    model_artifact,
    preference_rows,
    train,
    weights,
)

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.callback import Callback
from posttrain.contracts.component import Choice, Config
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.callbacks.bema import Averaging, BemaOptions
from posttrain_plugins.training import companions
from posttrain_plugins.training.checkpoints import Checkpoints

HELD_OUT = [{"prompt": f"ask {number}?", "completion": "ba" * (1 + number % 3)} for number in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return model_artifact(tmp_path_factory.mktemp("model"))


def held_out(context: FakeContext) -> FakeContext:
    """Connect rows to port `eval`."""
    data = dataset_artifact(context.directory / "held-out", HELD_OUT, "prompt_completion")
    context.inputs = {**context.inputs, "eval": [data]}
    return context


def interrupted_at(context: FakeContext, unit: str, times: int = 1) -> None:
    """Ask a training to stop when something is reported for the so-manieth time."""
    seen = 0

    def hear(done: int, told: str) -> None:
        nonlocal seen
        seen += told == unit
        context.stop = context.stop or seen >= times

    context.on_progress = hear
    with pytest.raises(Interrupted):
        train(context)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps of the checkpoints that are written."""
    steps: list[int] = []
    write = Checkpoints.write

    def noted(self: Checkpoints, step: int, *rest: Any, **named: Any) -> Any:
        steps.append(step)
        return write(self, step, *rest, **named)

    monkeypatch.setattr(Checkpoints, "write", noted)
    return steps


class Asking:
    """Asks for an end at an event of step 3, and takes every other wish for one back."""

    event = "on_step_end"
    wish = "should_training_stop"

    def __init__(self, training: Any, config: Config) -> None:
        setattr(self, self.event, self.hear)

    def hear(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step + (self.event == "on_optimizer_step")
        setattr(control, self.wish, step == 3)


def asking(event: str = "on_step_end", wish: str = "should_training_stop") -> type[Callback]:
    """Return a callback that asks at an event."""
    made = type(f"At_{event}_{wish}", (Asking,), {"event": event, "wish": wish})
    globals()[made.__name__] = made
    return type("Plugin", (Callback,), {"target": f"{__name__}:{made.__name__}"})


EVENTS = ("on_step_begin", "on_optimizer_step", "on_step_end", "on_log", "on_save")


@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_may_ask_for_the_end_at_any_event(event: str, tmp_path: Path, model: Artifact) -> None:
    last = 4 if event == "on_step_begin" else 3
    often = {"logging_steps": 1, "save_steps": 1}
    context = held_out(foreign(tmp_path, model, asking(event), **often))
    outcome = train(context)
    assert outcome.steps == last
    assert outcome.figures["eval/loss"] == context.seen_metrics[last]["eval/loss"]
    again = held_out(foreign(tmp_path, model, asking(event), **often))
    assert train(again).figures == outcome.figures
    assert again.losses == [], "the end is part of the checkpoint"


def test_the_last_weights_are_evaluated_where_they_came_early(tmp_path: Path, model: Artifact) -> None:
    context = held_out(foreign(tmp_path / "early", model, asking(), eval_steps=2))
    found = train(context).figures["eval/loss"]
    alone = held_out(sft(tmp_path / "alone", model, [], max_steps=3, lr_scheduler_type="constant"))
    constant = held_out(foreign(tmp_path / "constant", model, asking(), lr_scheduler_type="constant"))
    assert train(constant).figures["eval/loss"] == train(alone).figures["eval/loss"]
    assert found == context.seen_metrics[3]["eval/loss"] != context.seen_metrics[2]["eval/loss"]


def test_nobody_takes_back_that_the_last_step_is_the_last(tmp_path: Path, model: Artifact) -> None:
    never = foreign(tmp_path, model, asking(), max_steps=2)
    assert train(never).steps == 2


def test_an_end_and_a_stop_at_one_step_are_both_heard(tmp_path: Path, model: Artifact) -> None:
    first = foreign(tmp_path, model, asking())
    first.stop_at = 3
    assert train(first).steps == 3, "the training is over, so there is nothing to stop"


class Deadline(Asking):
    """Asks for the end whenever it is told of something, once the time is over."""

    def hear(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 3


class HasDeadline(Callback):
    target = f"{__name__}:Deadline"


def test_a_wish_that_comes_after_a_stop_ends_nothing(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadline, "event", "on_train_end")
    first = foreign(tmp_path, model, HasDeadline)
    first.stop_at = 3
    with pytest.raises(Interrupted):
        train(first)
    monkeypatch.setattr(Deadline, "event", "on_log")
    first = foreign(tmp_path / "log", model, HasDeadline, logging_steps=100)
    first.stop_at = 3
    with pytest.raises(Interrupted):
        train(first)


def test_a_wish_before_the_first_step_ends_after_it(
    tmp_path: Path, model: Artifact, written: list[int]
) -> None:
    class Eager(Asking):
        event = "on_evaluate"

        def hear(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    globals()["Eager"] = Eager
    plugin = type("Plugin", (Callback,), {"target": f"{__name__}:Eager"})
    context = held_out(foreign(tmp_path, model, plugin, ["bema"], eval_on_start=True))
    assert train(context).steps == 1 and written == [1]
    assert any("steps 0 to 1, taken in every 400" in note for note in context.notes)


class Vetoing(Asking):
    """Wants no checkpoint, no evaluation and no report."""

    def hear(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_evaluate = control.should_log = False


class Vetoes(Callback):
    target = f"{__name__}:Vetoing"


def test_nobody_takes_the_checkpoint_of_the_end_back(
    tmp_path: Path, model: Artifact, written: list[int]
) -> None:
    stopped = foreign(tmp_path, model, Vetoes)
    stopped.stop_at = 2
    with pytest.raises(Interrupted):
        train(stopped)
    assert written == [2]
    context = held_out(foreign(tmp_path / "whole", model, Vetoes))
    assert "eval/loss" in train(context).figures and written == [2, STEPS]
    assert STEPS in context.seen_metrics


@pytest.mark.parametrize("ends", ["callback", "patience"])
def test_the_last_report_comes_however_the_end_came(ends: str, tmp_path: Path, model: Artifact) -> None:
    patience = {"early_stopping_patience": 1, "early_stopping_threshold": 100.0, "eval_steps": 1}
    often = {"logging_steps": 100, **(patience if ends == "patience" else {})}
    context = (
        foreign(tmp_path, model, asking(), **often)
        if ends == "callback"
        else sft(tmp_path, model, [], **often)
    )
    last = int(train(held_out(context)).steps)
    assert last < STEPS and "tokens_per_second" in context.seen_metrics[last]


def test_without_callbacks_ranks_have_nothing_to_agree_on(
    tmp_path: Path, model: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "gather", None)
    assert trained(tmp_path, model, []).losses


def test_the_end_of_an_epoch_is_refused(tmp_path: Path, model: Artifact) -> None:
    with pytest.raises(StageError, match="end of the epoch, and a resume would not know of it"):
        train(foreign(tmp_path, model, asking(wish="should_epoch_stop")))


# What comes after the last step


@pytest.mark.parametrize("ends", ["last", "callback", "patience"])
def test_an_average_holds_the_last_step_however_it_came(ends: str, tmp_path: Path, model: Artifact) -> None:
    options: dict[str, Any] = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "eval_steps": 1}
    if ends == "callback":
        context = foreign(tmp_path, model, asking(), ["bema"], **options)
    else:
        patience = {"early_stopping_patience": 1, "early_stopping_threshold": 100.0}
        context = sft(tmp_path, model, ["bema"], **options, **(patience if ends == "patience" else {}))
    outcome = train(held_out(context))
    found = weights(context.output("model"))
    last = int(outcome.steps)
    assert (last == STEPS) == (ends == "last")
    assert any(f"steps 0 to {last}, taken in every 400" in note for note in context.notes)
    plain = trained(
        tmp_path / "plain", model, [], max_steps=last, learning_rate=0.05, lr_scheduler_type="constant"
    )
    assert same(found, averaged(model, weights(plain.output("model")), last))


def averaged(model: Artifact, last: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return the average of a training that took in the last step alone."""
    parallel = SimpleNamespace(rank=0)
    start = weights(model.path)
    shown = [{name: start[name] for name in last}, dict(last)]
    training: Any = SimpleNamespace(parallel=parallel, steps=step, weights=lambda: shown.pop(0))
    average = Averaging(training, BemaOptions())
    average.on_train_begin(None, SimpleNamespace(global_step=0), None)
    average.last_step(step)
    return average.average


def test_completions_of_the_last_step_are_told_however_it_came(tmp_path: Path, model: Artifact) -> None:
    asked = {"name": "completions", "every": 100, "prompts": ["ab"], "max_new_tokens": 2}
    context = foreign(tmp_path, model, asking(), [asked])
    train(context)
    assert sorted(context.seen_tables["completions"]) == [3]


def test_without_checkpoints_the_end_is_one_and_holds_no_optimizer(
    tmp_path: Path, model: Artifact, written: list[int]
) -> None:
    context = sft(tmp_path, model, [])
    train(context)
    assert written == [STEPS]
    (checkpoint,) = (context.work / "checkpoints").iterdir()
    names = {path.name for path in checkpoint.iterdir()}
    assert {"finished", "weights.safetensors"} <= names
    assert not any(name.startswith(("state", "random")) for name in names)


@pytest.mark.parametrize("evaluation", [1, 2])
def test_what_is_cut_off_after_the_last_step_costs_no_training(
    evaluation: int, tmp_path: Path, model: Artifact
) -> None:
    """The first evaluation is of the last weights, the second of the average that is put out."""
    first = held_out(sft(tmp_path, model, ["bema"]))
    interrupted_at(first, "evaluation rows", times=evaluation)
    again = held_out(sft(tmp_path, model, ["bema"]))
    assert train(again).steps == STEPS and again.losses == []
    whole = held_out(sft(tmp_path / "whole", model, ["bema"]))
    train(whole)
    assert same(weights(again.output("model")), weights(whole.output("model")))


class Both:
    """Puts out zeros as the model and the last weights beside it."""

    def __init__(self, training: Any, config: Config) -> None:
        pass

    def conclude(self, last: Mapping[str, torch.Tensor]) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {"model": {name: torch.zeros_like(tensor) for name, tensor in last.items()}, "last": last}


class PutsOutBoth(Callback):
    target = f"{__name__}:Both"


@pytest.mark.parametrize("evaluated", [False, True])
def test_judging_one_port_leaves_the_others_alone(evaluated: bool, tmp_path: Path, model: Artifact) -> None:
    context = foreign(tmp_path / "both", model, PutsOutBoth)
    train(held_out(context) if evaluated else context)
    plain = trained(tmp_path / "plain", model, [])
    assert same(weights(context.output("last")), weights(plain.output("model")))
    assert not any(tensor.any() for tensor in weights(context.output("model")).values())
    assert not list(context.work.glob("*.safetensors")), "nothing is left of what ranks told each other"


def test_trying_a_reward_model_again_leaves_the_other_ports_alone(tmp_path: Path, model: Artifact) -> None:
    options = {"max_steps": 3, "batch_size": 2}
    context = context_for(tmp_path, "train.reward", model, preference_rows(), "preference", **options)
    context.config = context.config.model_copy(update={"callbacks": (Choice(name="acme/mine"),)})
    context.components["acme/mine"] = PutsOutBoth
    train(context)
    assert any(tensor.any() for tensor in weights(context.output("last")).values())


def test_a_reward_model_and_its_average_are_judged_each_by_itself(tmp_path: Path, model: Artifact) -> None:
    average = {"name": "bema", "put_out": "beside", "ema_power": 50.0, "bias_power": 50.0}
    options = {"max_steps": 40, "batch_size": 5, "learning_rate": 0.02, "lr_scheduler_type": "constant"}
    rows = preference_rows()
    context = context_for(tmp_path, "train.reward", model, rows, "preference", callbacks=[average], **options)
    context.inputs = {**context.inputs, "eval": [dataset_artifact(tmp_path / "eval", rows, "preference")]}
    outcome = train(context)
    judged = {port: facts.scores.accuracy for port, (_, facts) in context.described.items()}
    assert judged["model"] == pytest.approx(outcome.figures["eval/accuracy"])
    assert judged["average"] < judged["model"], "it is where the training began"


# Stops and resumes


def test_an_evaluation_that_is_broken_off_is_not_begun_again(
    tmp_path: Path, model: Artifact, written: list[int]
) -> None:
    context = held_out(sft(tmp_path, model, [], eval_steps=2, save_steps=100))
    interrupted_at(context, "evaluation rows")
    assert [unit for _, _, unit in context.seen_progress].count("evaluation rows") == 1
    assert written == [2]


@pytest.mark.parametrize(("before", "after"), [(0, 100), (1, 3), (2, 0)])
def test_a_resume_saves_and_tells_as_its_own_options_say(
    before: int, after: int, tmp_path: Path, model: Artifact, written: list[int]
) -> None:
    first = sft(tmp_path, model, [], save_steps=before, logging_steps=max(1, before))
    first.stop_at = 2
    with pytest.raises(Interrupted):
        train(first)
    written.clear()
    again = trained(tmp_path, model, [], save_steps=after, logging_steps=4)
    assert written == sorted({step for step in range(3, STEPS) if after and step % after == 0} | {STEPS})
    assert sorted(again.seen_metrics) == [4, STEPS]


def test_a_moving_reference_is_there_for_an_evaluation_before_the_first_step(
    tmp_path: Path, model: Artifact
) -> None:
    rows = preference_rows()
    options = {"max_steps": 4, "batch_size": 2, "reference_sync": {"steps": 2}, "eval_on_start": True}
    context = context_for(tmp_path, "train.dpo", model, rows, "preference", **options)
    context.inputs = {**context.inputs, "eval": [dataset_artifact(tmp_path / "eval", rows, "preference")]}
    train(context)
    assert context.seen_metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5), "π is π_ref: ln 2"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_written_of_a_checkpoint_is_removed(fault: BaseException, tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        (directory / "weights").write_bytes(b"much")
        raise fault

    def fills(directory: Path) -> None:
        (directory / "weights").write_bytes(b"little")

    kept = Checkpoints(tmp_path / "kept", 2, print)
    with pytest.raises(type(fault)):
        kept.write(1, fails)
    assert list((tmp_path / "kept").iterdir()) == []
    (tmp_path / "kept" / ".step-00000001.tmp").mkdir()
    kept.write(2, fills)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000002"], "a kill leaves one"


# Where callbacks end trainings


class Ending:
    """Ends the training after two steps, and counts what it is told."""

    def __init__(self, training: Any, config: Config) -> None:
        self.training, self.heard = training, 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            assert {"grad_norm", "tokens_per_second", "learning_rate"} <= logs.keys()
            self.heard += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


class End(Callback):
    target = f"{__name__}:Ending"


class WatchingEnd(End):
    watches_only = True


def test_a_callback_may_end_the_training(tmp_path: Path, model: Artifact) -> None:
    context = foreign(tmp_path, model, End)
    outcome = train(context)
    assert outcome.steps == 2
    assert f"2 steps of {STEPS}, stopped early by the callback acme/mine" in context.notes
    again = foreign(tmp_path, model, End)
    assert train(again).steps == 2, "the end of a training that was cut off before its result was saved"
    assert "going on from step 2 of 6" in again.notes
    assert again.losses == []


def test_an_end_is_kept_where_the_evaluation_of_that_step_was_broken_off(
    tmp_path: Path, model: Artifact
) -> None:
    def made() -> FakeContext:
        return held_out(foreign(tmp_path, model, End, eval_steps=2))

    def hear(done: int, unit: str) -> None:
        first.stop = first.stop or (unit == "evaluation rows" and 1 in first.seen_metrics)

    (first := made()).on_progress = hear
    with pytest.raises(Interrupted):
        train(first)
    outcome = train(made())
    assert outcome.steps == 2 and "eval/loss" in outcome.figures


def test_one_that_only_watches_may_not(tmp_path: Path, model: Artifact) -> None:
    with pytest.raises(StageError, match="only watches has asked for the end"):
        train(foreign(tmp_path, model, WatchingEnd))
