"""The training loop: a thin `transformers.Trainer` around `step.py`.

transformers brings the loop over epochs, schedulers, clipping, callbacks and the names of its arguments. What
is overridden here is listed in `OVERRIDDEN`, and a test keeps that list as short as it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME

from posttrain.contracts.trainer import Example
from posttrain.errors import StageError, TrainingDiverged
from posttrain_plugins.training.batches import DataOrder, StepSampler
from posttrain_plugins.training.checkpoints import (
    PROGRESS,
    WEIGHTS,
    Checkpoints,
    load_state,
    load_weights,
    save_state,
    save_weights,
)
from posttrain_plugins.training.head import vocabulary_of
from posttrain_plugins.training.randomness import random_state, restore_random_state
from posttrain_plugins.training.step import Stepper, StepResult

OVERRIDDEN = (
    "__init__",
    "_get_grad_norm",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save_checkpoint",
    "floating_point_ops",
    "get_train_dataloader",
    "training_step",
)

RECENT = 10
"""Steps that the final figures are averaged over."""
GAP = "reference/gap"
UNLIKELY = 20
"""Supervised tokens this many times less likely, in nats, than by guessing mean a wrong tokenizer or model."""


@dataclass
class Meter:
    """Metrics of the steps since the last report, and of the last few steps; part of a checkpoint.

    Args:
        window: Metrics of each step since the last report.
        recent: Metrics of the last `RECENT` steps.
    """

    window: list[dict[str, float]] = field(default_factory=list)
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, metrics: dict[str, float], once: Mapping[str, float] | None = None) -> None:
        """Take in one step; what is `once` is reported but is none of the final figures."""
        self.window.append(metrics | dict(once or {}))
        self.recent.append(metrics)

    def report(self) -> dict[str, float]:
        """Return the means since the last report and start anew."""
        means, self.window = step_means(self.window), []
        return means

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"window": self.window, "recent": list(self.recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.window, self.recent = list(state["window"]), deque(state["recent"], maxlen=RECENT)


def step_means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the metrics of several steps, each over the steps that have a finite value of it."""
    names = dict.fromkeys(name for step in steps for name in step)
    values = {
        name: [step[name] for step in steps if math.isfinite(step.get(name, math.nan))] for name in names
    }
    return {name: sum(found) / len(found) for name, found in values.items() if found}


class _Steps(DataLoader[Example]):
    """One batch is one optimizer step; knows which epoch it is in."""

    def set_epoch(self, number: int) -> None:
        self.batch_sampler.set_epoch(number)  # type: ignore[union-attr]


class Loop(transformers.Trainer):
    """Drives a `Stepper` through the steps of a `DataOrder`.

    Args:
        arguments: What transformers needs to know; its batch and accumulation sizes are not used.
        stepper: Computes the gradient of one step.
        examples: What the order's positions mean.
        order: The steps of each epoch.
        checkpoints: Where checkpoints go.
        config: The trainer's options, for its invariants.
        callbacks: transformers callbacks.
    """

    def __init__(
        self,
        arguments: transformers.TrainingArguments,
        stepper: Stepper,
        examples: Sequence[Example],
        order: DataOrder,
        checkpoints: Checkpoints,
        config: Any,
        callbacks: Sequence[transformers.TrainerCallback] = (),
    ) -> None:
        super().__init__(model=stepper.model, args=arguments, callbacks=list(callbacks))
        self.remove_callback(transformers.PrinterCallback)
        self.stepper, self.examples, self.order = stepper, examples, order
        self.checkpoints, self.config = checkpoints, config
        self.meter = Meter()
        self.tokens = 0
        self._rows: list[int] = []

    def get_train_dataloader(self) -> DataLoader[Example]:
        """Give the rows of whole optimizer steps. Fetching them must not move the global generator."""
        return _Steps(
            self.examples,  # type: ignore[arg-type]
            batch_sampler=StepSampler(self.order),
            collate_fn=list,
            generator=torch.Generator(),
        )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the gradient of a step; stop before the update when something is wrong with it."""
        model.train()
        self._rows = [example.row for example in inputs]
        result = self.stepper.backward(inputs)
        if not math.isfinite(result.loss):
            raise self._diverged("the loss", result.loss)
        metrics, once = {"loss": result.loss, **result.metrics}, {}
        if self.state.global_step == 0:
            once = {} if result.gap is None else {GAP: result.gap}
            self._check_start(metrics | once, result)
        self.meter.add(metrics, once)
        self.tokens += result.tokens
        return torch.tensor(result.loss, device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: transformers' estimate wants tensors of inputs."""
        return 0

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        norm = float(super()._get_grad_norm(model, grad_norm))  # type: ignore[no-untyped-call]
        if not math.isfinite(norm):
            raise self._diverged("the norm of the gradient", norm)
        return norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        require_finite(self.stepper.model, f"after step {self.state.global_step}", self.checkpoints)
        self.checkpoints.write(self.state.global_step, self._fill)

    def _fill(self, directory: Path) -> None:
        save_weights(directory / WEIGHTS, self.stepper.model)
        assert self.optimizer is not None and self.lr_scheduler is not None
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
        }
        save_state(directory, state)
        save_state(directory, {"random": random_state(), "meter": self.meter.state()}, PROGRESS)
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(Path(resume_from_checkpoint) / WEIGHTS, self.stepper.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        state = load_state(Path(checkpoint))
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            progress = load_state(Path(checkpoint), PROGRESS)
            self.meter.restore(progress["meter"])
            restore_random_state(progress["random"])

    def _check_start(self, metrics: Mapping[str, float], result: StepResult) -> None:
        problems = [*self.stepper.trainer.invariants(metrics, self.config)]
        guessing = math.log(vocabulary_of(self.stepper.model))
        if result.surprise > UNLIKELY * guessing:
            problems.append(
                f"the supervised tokens cost {result.surprise:.3g} nats each before the first update, and guessing "
                f"costs {guessing:.3g}; a tokenizer that is not the model's, or damaged weights, would do that"
            )
        if problems:
            raise StageError(
                "training would start from a wrong state", where="step 0", found="; ".join(problems)
            )

    def _diverged(self, what: str, value: float) -> TrainingDiverged:
        return TrainingDiverged(
            f"{what} is not finite",
            where=f"step {self.state.global_step + 1}",
            found=f"{value} over rows {', '.join(map(str, self._rows))} (counted from 0)",
            fix=f"lower learning_rate, or look at these rows; {self.checkpoints.last()}",
        )


def require_finite(model: torch.nn.Module, when: str, checkpoints: Checkpoints) -> None:
    """Refuse weights that are not finite.

    Raises:
        TrainingDiverged: Some trainable parameter holds NaN or an infinity.
    """
    for name, tensor in model.named_parameters():
        if tensor.requires_grad and not bool(tensor.detach().isfinite().all()):
            raise TrainingDiverged(
                "a weight is not finite",
                where=when,
                found=name,
                fix=f"lower learning_rate; {checkpoints.last()}",
            )
