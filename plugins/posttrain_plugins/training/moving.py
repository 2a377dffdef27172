"""A reference that follows the policy: every so many steps it moves a part of the way (TR-DPO)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor

from posttrain.contracts.loss import Need
from posttrain.errors import Interrupted
from posttrain_plugins.training.batches import DataOrder
from posttrain_plugins.training.starting import StartingPolicy

if TYPE_CHECKING:
    from posttrain_plugins.trainers.referenced import ReferenceSync
    from posttrain_plugins.training.loop import Loop


class MovingReference(transformers.TrainerCallback):
    """Keeps a second set of weights, moves it, and scores with it what is learned from until it moves again.

    Gorbatovski et al. 2024, eq. 5 (https://arxiv.org/abs/2404.09656): π_ref ← α π + (1 − α) π_ref every τ steps; with
    α = 1 the reference is replaced. The rows of the next τ steps are scored at once, so the weights are exchanged
    twice in τ steps and not in each; what a row's log-probs are is the same.

    Args:
        loop: The training; its model's parameters are whole on every rank.
        sync: How often, and how far.
        steps: How many steps the training takes.
        pause: Called with the number of examples scored and how many there are; may raise to stop, on all ranks at
            once.
    """

    def __init__(
        self, loop: Loop, sync: ReferenceSync, steps: int, pause: Callable[[int, int], None]
    ) -> None:
        self.loop, self.sync, self.steps, self.pause = loop, sync, steps, pause
        self.starting: StartingPolicy | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with the starting policy; a training that goes on is given the reference that it had."""
        if state.global_step == 0:
            self.starting = StartingPolicy.kept(self.loop.model)
            self._score(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the reference when it is time."""
        step = state.global_step
        if step % self.sync.steps == 0 and step < self.steps:
            assert self.starting is not None, "it is taken down before the first step"
            self.starting.follow(self.sync.alpha)
            try:
                self._score(step)
            except Interrupted:
                # The step is done and worth a checkpoint; a resume scores these rows first.
                control.should_save = control.should_training_stop = True

    def state(self) -> Mapping[str, Tensor]:
        """Return the reference's weights, which are part of a checkpoint."""
        assert self.starting is not None, "it is taken down before the first step"
        return self.starting.values

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the reference of a checkpoint, and score the rows that were scored when it last moved.

        After the last step these are the rows of an evaluation alone.
        """
        step = self.loop.state.global_step
        self.starting = StartingPolicy.kept(self.loop.model, state)
        self._score(step - step % self.sync.steps if step < self.steps else step)

    def _score(self, step: int) -> None:
        """Score the rows of the steps until the reference moves again, and those of an evaluation."""
        assert self.starting is not None, "it is taken down before the first step"
        stepper, evaluation, started = self.loop.stepper, self.loop.evaluation, time.monotonic()
        last = min(step + self.sync.steps, self.steps)
        examples = [self.loop.examples[position] for position in _visited(self.loop.order, step, last)]
        held_out = [] if evaluation is None else evaluation.examples
        total = len(examples) + len(held_out)
        score = stepper.log_probs if Need.REFERENCE_TOKENS in stepper.needs else stepper.totals
        stepper.reference = None
        with self.starting.active():
            found = score(examples, lambda done: self.pause(done, total)) if examples else {}
            if evaluation is not None:
                evaluation.reference = score(held_out, lambda done: self.pause(len(examples) + done, total))
        stepper.reference = found
        self.loop.paused += time.monotonic() - started


def _visited(order: DataOrder, first: int, last: int) -> list[int]:
    """Return the positions that steps from `first` on, and before `last`, visit, ascending."""
    return sorted(set(_positions(order, first, last)))


def _positions(order: DataOrder, first: int, last: int) -> Iterator[int]:
    size = order.steps_per_epoch
    for number in range(first // size, -(-last // size)):
        steps = order.epoch(number)
        for step in steps[max(first - number * size, 0) : last - number * size]:
            yield from step
