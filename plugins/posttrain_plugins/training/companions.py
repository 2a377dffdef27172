"""The callbacks of one training, behind one `transformers.TrainerCallback` that tells all of them what happens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.contracts.callback import Concluding, Delivering, Finishing, Stateful
from posttrain.contracts.registration import Group, load_target
from posttrain.contracts.stage import StageContext
from posttrain.errors import StageError
from posttrain_plugins.models.policy import Policy
from posttrain_plugins.training.checkpoints import load_weights, save_weights
from posttrain_plugins.training.loop import Loop
from posttrain_plugins.training.options import EVALUATION
from posttrain_plugins.training.randomness import random_state, restore_random_state
from posttrain_plugins.training.tally import gather

EVENTS = tuple(name for name in vars(transformers.TrainerCallback) if name.startswith("on_"))
"""What transformers tells callbacks of."""
_DECIDING = {"on_step_end", "on_evaluate", "on_log", "on_save", "on_epoch_end"}
"""After these the ranks decide together whether the training ends, as a callback may have asked for since."""
_FLAGS = ("should_save", "should_evaluate", "should_log")
"""What a callback may ask for besides, and not take back."""
_NUMBERS = {"on_log": "logs", "on_evaluate": "metrics"}
"""The events that hold metrics, and under which name."""
_MODEL = "model"
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Joined:
    """What one callback is given: `posttrain.contracts.callback.Training`."""

    context: StageContext
    config: Any
    work: Path
    steps: int
    policy: Policy
    parallel: Parallel
    loop: Loop

    def weights(self) -> Weights:
        """Return the trained tensors by name, whole, on rank 0."""
        return self.loop.weights(f"after step {self.loop.state.global_step}", trainable=True)

    def metrics(self) -> Mapping[str, float]:
        """Return what the step came to."""
        return self.loop.latest

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the random generators and the clock of the training as they were."""
        started = time.monotonic()
        try:
            with _unmoved(True):
                yield
        finally:
            self.loop.paused += time.monotonic() - started


@dataclass(frozen=True)
class Companion:
    """One callback: how it is called here, whether it only watches, and what it is."""

    name: str
    watches: bool
    callback: Any


class Companions(transformers.TrainerCallback):
    """Tells each callback, in the order of the options, what happens, and keeps what they know in checkpoints.

    Args:
        joined: The callbacks.
        loop: The training.
    """

    def __init__(self, joined: list[Companion], loop: Loop) -> None:
        self.joined, self.loop = joined, loop
        self._ending: str | None = None
        self._over = False

    @classmethod
    def join(cls, context: StageContext, loop: Loop, policy: Policy, steps: int) -> Companions:
        """Make the callbacks that the options name, and have checkpoints keep what they know."""
        joined: list[Companion] = []
        numbers: Counter[str] = Counter()
        for choice in context.config.callbacks:
            numbers[choice.name] += 1
            name = choice.name if numbers[choice.name] == 1 else f"{choice.name}-{numbers[choice.name]}"
            component = context.component(choice, Group.CALLBACK)
            work = context.work / "callbacks" / name.replace("/", ".")
            training = Joined(context, context.config, work, steps, policy, loop.parallel, loop)
            watches = component.plugin.watches_only
            with _unmoved(watches):
                made = load_target(component.plugin.target)(training, component.config)
            joined.append(Companion(name, watches, made))
        loop.companions = companions = cls(joined, loop)
        return companions

    def tell(self, event: str, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """Tell all of them, and see to it that all ranks end where one callback of one rank asks for it.

        Raises:
            StageError: One that only watches asked for the end of the training, or one for that of the epoch.
        """
        if not self.joined:
            return control
        state.is_world_process_zero = self.loop.parallel.rank == 0
        # transformers' last report comes when the loop is over.
        self._over |= event == "on_train_end" or "train_runtime" in (rest.get("logs") or {})
        if event in _NUMBERS:
            rest[_NUMBERS[event]] = _as_elsewhere(rest[_NUMBERS[event]])
        stopping, wanted = control.should_training_stop, {flag: getattr(control, flag) for flag in _FLAGS}
        for each in self.joined:
            hears = _method(each.callback, event)
            if hears is None:
                continue
            # Each is asked by itself: what others want is not for it to take back.
            control.should_training_stop = False
            with _unmoved(each.watches):
                answer = hears(args, state, control, **rest)
            control = control if answer is None else answer
            _require_fit(each, state.global_step, control)
            if control.should_training_stop and not self._over and self._ending is None:
                self._ending = each.name
            wanted = {flag: wanted[flag] or bool(getattr(control, flag)) for flag in _FLAGS}
        for flag, value in wanted.items():
            setattr(control, flag, value)
        control.should_training_stop = stopping
        if event in _DECIDING and not self._over:
            self._decide(state.global_step, control)
        return control

    def _decide(self, step: int, control: Any) -> None:
        """End the training if it was asked for: with a report, an evaluation of the last weights and a checkpoint."""
        loop, evaluation = self.loop, self.loop.evaluation
        if loop.halted is None:
            loop.halted = next(filter(None, gather(loop.parallel, self._ending)), None)
        if loop.halted is None:
            return
        control.should_training_stop = control.should_log = True
        owed = evaluation is not None and evaluation.owed
        if evaluation is not None and evaluation.at != step and not owed:
            control.should_evaluate = True
        if loop.finished != step and not owed:
            control.should_save = True

    def last_step(self, step: int) -> None:
        """Tell those that have to know of the last step which one it was."""
        for each in self.joined:
            if isinstance(each.callback, Finishing):
                with _unmoved(each.watches):
                    each.callback.last_step(step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of them."""
        return {each.name: found for each in self.joined if (found := _state(each.callback)) is not None}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one that only watches may have joined since."""
        for each in self.joined:
            if each.name in states:
                _restore(each.callback, states[each.name])

    def conclude(self, weights: Weights) -> dict[str, Weights]:
        """Return what each output port is to hold, on rank 0.

        Raises:
            StageError: A callback puts out other tensors than the training did.
        """
        found: dict[str, Weights] = {_MODEL: weights}
        for each in self.joined:
            if not isinstance(each.callback, Concluding):
                continue
            for port, chosen in each.callback.conclude(found[_MODEL]).items():
                if chosen.keys() != weights.keys():
                    raise StageError(
                        "these are not the tensors that were trained", where=f"callback {each.name}"
                    )
                found[port] = chosen
        # What port `model` holds is loaded into the policy, to be judged and to be tried again.
        live = {tensor.data_ptr() for tensor in weights.values()}
        return {port: chosen if port == _MODEL else _apart(chosen, live) for port, chosen in found.items()}

    def judged(self, put_out: Mapping[str, Weights], weights: Weights, file: Path) -> dict[str, float]:
        """Return what an evaluation of port `model` comes to, where it does not hold the last weights.

        Args:
            put_out: What each port is to hold, on rank 0.
            weights: The last weights, on rank 0.
            file: Where rank 0 can leave weights for the others.
        """
        parallel, evaluation = self.loop.parallel, self.loop.evaluation
        same = parallel.agree(put_out.get(_MODEL, weights) is weights)
        if evaluation is None or same:
            return {}
        if parallel.rank == 0:
            save_weights(file, put_out[_MODEL])
        parallel.barrier()
        load_weights(file, self.loop.model, parallel)
        parallel.barrier()
        if parallel.rank == 0:
            file.unlink()
        return dict(evaluation.measure(self.loop.state.global_step))

    def deliver(self, outputs: Mapping[str, Path]) -> None:
        """Let them look at what was put out."""
        for each in self.joined:
            if isinstance(each.callback, Delivering):
                each.callback.deliver(outputs)


for _event in EVENTS:
    setattr(Companions, _event, partialmethod(Companions.tell, _event))


@contextmanager
def _unmoved(kept: bool) -> Iterator[None]:
    """Leave the random generators as they were: what only watches must not change a dropout mask."""
    generators = random_state() if kept else None
    try:
        yield
    finally:
        if generators is not None:
            restore_random_state(generators)


def _apart(chosen: Weights, live: Collection[int]) -> Weights:
    """Return weights that are not those of the policy, whose tensors lie at `live`; what is tied stays tied."""

    def place(tensor: Tensor) -> tuple[int, torch.Size]:
        return tensor.data_ptr(), tensor.shape

    copies = {place(each): each.clone() for each in chosen.values() if each.data_ptr() in live}
    return {name: copies.get(place(tensor), tensor) for name, tensor in chosen.items()}


def _require_fit(one: Companion, step: int, control: Any) -> None:
    """Refuse what a callback must not ask for."""
    where = f"callback {one.name}, step {step}"
    if control.should_epoch_stop:
        raise StageError(
            "a callback has asked for the end of the epoch, and a resume would not know of it",
            where=where,
            found="should_epoch_stop",
            fix="ask for the end of the training, should_training_stop, or for fewer rows",
        )
    if one.watches and control.should_training_stop:
        raise StageError(
            "a callback that only watches has asked for the end of the training",
            where=where,
            fix="its class has to say `watches_only = False`, so that it is part of the key",
        )


def _method(callback: Any, event: str) -> Callable[..., Any] | None:
    """Return what a callback does at an event; None for one that it does not care for."""
    empty = getattr(type(callback), event, None) is getattr(transformers.TrainerCallback, event)
    return None if empty else getattr(callback, event, None)


def _as_elsewhere(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the names that callbacks know from transformers: `eval_loss` for `eval/loss`."""
    prefix = f"{EVALUATION}/"
    return {
        f"{EVALUATION}_{name.removeprefix(prefix)}" if name.startswith(prefix) else name: value
        for name, value in metrics.items()
    }


def _state(callback: Any) -> Any:
    """Return the state of a callback: its own, or the attributes that one of transformers exports."""
    if isinstance(callback, Stateful):
        return callback.state()
    exported = callback.state() if isinstance(callback, _EXPORTING) else {}
    return exported.get("attributes")


def _restore(callback: Any, state: Any) -> None:
    if isinstance(callback, Stateful):
        callback.restore(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


_EXPORTING = transformers.trainer_callback.ExportableState
