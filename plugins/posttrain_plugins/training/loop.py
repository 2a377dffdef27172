"""The training loop: a thin `transformers.Trainer` around `step.py`.

transformers brings the loop over epochs, schedulers, clipping, callbacks and the names of its arguments. What
is overridden here is listed in `OVERRIDDEN`, and a test keeps that list as short as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME

from posttrain.contracts.trainer import Example
from posttrain.errors import Interrupted, TrainingDiverged
from posttrain_plugins.models.wrappers import never_wrapped
from posttrain_plugins.training.batches import DataOrder, StepSampler
from posttrain_plugins.training.checkpoints import (
    FINISHED,
    PROGRESS,
    WEIGHTS,
    Checkpoint,
    Checkpoints,
    load_state,
    load_weights,
    save_state,
    save_weights,
)
from posttrain_plugins.training.evaluation import Evaluation
from posttrain_plugins.training.groups import make_optimizer
from posttrain_plugins.training.invariants import StepZero
from posttrain_plugins.training.meter import Meter, step_means
from posttrain_plugins.training.moving import MovingReference
from posttrain_plugins.training.randomness import diverge
from posttrain_plugins.training.scaling import Scaling
from posttrain_plugins.training.shares import Shares
from posttrain_plugins.training.step import Stepper

OVERRIDDEN = (
    "__init__",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save_checkpoint",
    "_wrap_model",
    "evaluate",
    "floating_point_ops",
    "get_train_dataloader",
    "training_step",
)

GAP = "reference/gap"


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
        config: The trainer's options.
        zero: Checks what the first step comes to.
        callbacks: transformers callbacks.
        evaluation: What `evaluate` does; None where there is no evaluation set.

    Attributes:
        model: The policy, without what a backend wraps around it.
        companions: The `Companions`, whose state checkpoints keep; they join before the first step.
        moving: The reference, where it follows the policy; checkpoints keep it.
        halted: The callback that has ended the training, if one has.
        finished: The step of the checkpoint from which there is nothing to train, once it is written.
        latest: What the last step came to.
    """

    model: torch.nn.Module

    def __init__(
        self,
        arguments: transformers.TrainingArguments,
        stepper: Stepper,
        examples: Sequence[Example],
        order: DataOrder,
        checkpoints: Checkpoints,
        config: Any,
        zero: StepZero,
        callbacks: Sequence[transformers.TrainerCallback] = (),
        evaluation: Evaluation | None = None,
    ) -> None:
        with never_wrapped():
            super().__init__(
                model=stepper.model,
                args=arguments,
                callbacks=list(callbacks),
                # transformers calls what this returns with the model, wrapped where the backend wraps it
                optimizer_cls_and_kwargs=(lambda: self._make_optimizer, {}),  # type: ignore[arg-type]
            )
        self.remove_callback(transformers.PrinterCallback)
        self.stepper, self.examples, self.order = stepper, examples, order
        self.parallel = stepper.parallel
        self.checkpoints, self.config, self.evaluation = checkpoints, config, evaluation
        self.meter, self.zero = Meter(), zero
        self.scaling = Scaling(stepper.parallel) if config.fp16 else None
        if self.scaling is not None:
            stepper.scale = self.scaling.scale
            # with it, accelerate's optimizer skips steps, and transformers' loop then leaves the schedule alone
            self.accelerator.scaler = self.scaling.scaler
        self.tokens, self.paused = 0, 0.0
        self.halted: str | None = None
        self.finished: int | None = None
        self.companions: Any = None
        self.moving: MovingReference | None = None
        self.latest: dict[str, float] = {}
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
            self._rows = list(result.suspects) or self._rows
            raise self._diverged("the loss", result.loss)
        if self.scaling is not None:
            self.scaling.unscale(self.optimizer)
        metrics, once = {"loss": result.loss, **result.metrics}, {}
        if self.state.global_step == 0:
            once = {} if result.gap is None else {GAP: result.gap}
            self.zero.check_scores(self.stepper.trainer, self.config, metrics | once, result)
        self.meter.add(metrics, once)
        self.latest = dict(metrics)
        self.tokens += result.tokens
        return torch.tensor(result.loss, device=self.args.device)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate on the evaluation set; ask for a checkpoint of the best weights, and for the end."""
        assert self.evaluation is not None, "nobody asks for an evaluation without a set"
        step, best, started = self.state.global_step, self.evaluation.best, time.monotonic()
        try:
            metrics = self.evaluation.measure(step)
        except Interrupted:
            if step == 0:
                raise
            # What was learned is worth a checkpoint; a resume begins with this evaluation.
            self.evaluation.owed = True
            self.control.should_evaluate = False
            self.control.should_save = self.control.should_training_stop = True
            return {}
        self.evaluation.owed = False
        self.paused += time.monotonic() - started
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if step and best is not None:
            if best.judge(step, metrics):
                self.state.best_metric, self.state.best_global_step = metrics[best.metric], step
                self.control.should_save |= self.config.load_best_model_at_end
            if best.exhausted:
                self.control.should_log = self.control.should_save = self.control.should_training_stop = True
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: transformers' estimate wants tensors of inputs."""
        return 0

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Let the ranks share the model and the optimizer that was made for it."""
        wrapped, self.optimizer = self.parallel.wrap(self.model, self.optimizer, self.stepper.precision)
        self.stepper.model = wrapped
        diverge(self.args.seed, self.parallel.rank)
        return wrapped

    def _clip_grad_norm(self, model: Any) -> float:
        return self.parallel.clip(self.stepper.model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        norm = self.parallel.clip(self.stepper.model, math.inf) if grad_norm is None else float(grad_norm)
        # An overflow in float16 is not the end: the step is skipped.
        if not math.isfinite(norm) and self.scaling is None:
            raise self._diverged("the norm of the gradient", norm)
        self.latest["grad_norm"] = norm
        return norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, ended = self.state.global_step, self.ended
        if step == self.finished:
            return
        if ended:
            self.companions.last_step(step)
        weights = self.weights(f"after step {step}", trainable=True)
        fill = partial(self._fill, weights)
        self.checkpoints.write(step, fill, self.needed, self.parallel)
        self.finished = step if ended else None

    @property
    def needed(self) -> list[int]:
        """Steps of the checkpoints that the next one needs beside itself."""
        best = None if self.evaluation is None else self.evaluation.best
        return [best.step] if best and best.step and self.config.load_best_model_at_end else []

    def _fill(self, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        assert self.optimizer is not None and self.lr_scheduler is not None
        if not self.ended:
            # From the end nobody trains on.
            Shares(directory, self.parallel).save(self.optimizer)
        if self.parallel.rank > 0:
            return
        save_weights(directory / WEIGHTS, weights)
        self.write_progress(directory, self.lr_scheduler.state_dict())

    def write_progress(self, directory: Path, scheduler: Mapping[str, Any]) -> None:
        """Write what a checkpoint knows beside weights, optimizer and random generators."""
        if self.ended:
            (directory / FINISHED).touch()
        save_state(directory, {"scheduler": scheduler, **self._progress()}, PROGRESS)
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))

    def weights(self, when: str, trainable: bool = False) -> Mapping[str, torch.Tensor]:
        """Return the policy's tensors by name, whole, on rank 0, and nothing on other ranks.

        Args:
            when: When this is, for the message.
            trainable: Leave frozen parameters out.

        Raises:
            TrainingDiverged: Some trainable parameter holds NaN or an infinity.
        """
        found = self.parallel.weights(self.model, trainable)
        trained = {name for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        wrong = (name for name in found if name in trained and not bool(found[name].isfinite().all()))
        name = self.parallel.agree(next(wrong, None))
        if name is not None:
            raise TrainingDiverged(
                "a weight is not finite",
                where=when,
                found=name,
                fix=f"lower learning_rate; {self.checkpoints.last()}",
            )
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(Path(resume_from_checkpoint) / WEIGHTS, self.model, self.parallel)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        Shares(Path(checkpoint), self.parallel).load_optimizer(self.optimizer)
        self.lr_scheduler.load_state_dict(load_state(Path(checkpoint), PROGRESS)["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.restore_progress(Path(checkpoint))
            Shares(Path(checkpoint), self.parallel).load_random()

    def _progress(self) -> dict[str, Any]:
        return {
            "meter": self.meter.state(),
            "loss": dict(self.stepper.state),
            "evaluation": self.evaluation and self.evaluation.state(),
            "scaling": self.scaling and self.scaling.state(),
            "callbacks": self.companions.state(),
            "reference": self.moving and self.moving.state(),
            "halted": self.halted,
        }

    @property
    def ended(self) -> bool:
        """Whether training came to its end, or to a point from which it is no use to go on."""
        if self.evaluation is not None and self.evaluation.owed:
            return False
        best = self.evaluation and self.evaluation.best
        last = self.state.global_step >= self.args.max_steps
        return last or self.halted is not None or bool(best and best.exhausted)

    @property
    def learned(self) -> int:
        """Steps that moved the weights."""
        return self.state.global_step - (self.scaling.skipped if self.scaling else 0)

    def take_over(self, checkpoint: Checkpoint) -> None:
        """Take over what a checkpoint holds, but for what is needed to train on."""
        self._load_from_checkpoint(str(checkpoint.path))
        self.state = transformers.TrainerState.load_from_json(str(checkpoint.path / TRAINER_STATE_NAME))
        self.restore_progress(checkpoint.path)
        self.finished = checkpoint.step if checkpoint.finished else None

    def settle(self) -> None:
        """See to it that the end is one, however the loop was left.

        The last weights are evaluated, callbacks know of the last step, and a checkpoint holds what came of it. What is
        done already is not done again.

        Raises:
            Interrupted: The stage was asked to stop; a resume begins with the evaluation.
        """
        if self.finished == self.state.global_step:
            return
        if self.evaluation is not None and self.evaluation.at != self.state.global_step:
            self.evaluate()
        self._save_checkpoint(self.model, None)
        if not self.ended:
            raise Interrupted(
                "training was asked to stop",
                where=f"in the evaluation after the last step, {self.state.global_step}",
                fix="`posttrain resume` begins with this evaluation",
            )

    def conclude(self) -> tuple[dict[str, float], str]:
        """Take the best weights where that is asked for; return the final figures and a line about the end."""
        trained, said = step_means(self.meter.recent), f"{self.state.global_step} steps"
        figures: dict[str, float] = {}
        if self.state.global_step < self.args.max_steps:
            said += f" of {self.args.max_steps}, stopped early"
            said += "," if self.halted is None else f" by the callback {self.halted},"
        if self.evaluation is not None:
            best, chosen = self.evaluation.best, self.config.load_best_model_at_end
            if best is not None and best.step is not None and chosen:
                self._load_from_checkpoint(str(self.checkpoints.at(best.step).path))
                said += f" with the weights of step {best.step}"
            figures |= self.evaluation.figures(chosen)
        # What was measured on rows that are not learned from comes first: people see the first few.
        figures |= trained
        if self.scaling is not None:
            figures["skipped_steps"] = float(self.scaling.skipped)
        return figures, said

    def release(self) -> None:
        """Free the memory of gradients and of what the optimizer keeps; nothing is trained any more."""
        self.model.zero_grad()
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def restore_progress(self, checkpoint: Path) -> None:
        """Take over what a checkpoint knows beside weights, optimizer and random generators."""
        progress = load_state(checkpoint, PROGRESS)
        self.meter.restore(progress["meter"])
        self.stepper.state = progress["loss"]
        if self.evaluation is not None:
            self.evaluation.restore(progress["evaluation"])
        if self.scaling is not None:
            self.scaling.restore(progress["scaling"])
        self.companions.restore(progress["callbacks"] or {})
        if self.moving is not None:
            self.moving.restore(progress["reference"])
        self.halted = progress["halted"] or None

    def _make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        self.parallel.prepare(self.model)
        decayed = self.get_decay_parameter_names(model)
        return make_optimizer(model, self.config, self.args, decayed)

    def _diverged(self, what: str, value: float) -> TrainingDiverged:
        return TrainingDiverged(
            f"{what} is not finite",
            where=f"step {self.state.global_step + 1}",
            found=f"{value} over rows {', '.join(map(str, self._rows))} (counted from 0), with the loss "
            f"`{self.stepper.loss.name}`",
            fix=f"lower learning_rate, or look at these rows; {self.checkpoints.last()}",
        )
