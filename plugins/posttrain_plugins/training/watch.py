"""What a training tells while it runs, and how it is stopped."""

from __future__ import annotations

import math
import time
from typing import Any

import transformers

from posttrain.contracts.stage import StageContext
from posttrain.errors import Interrupted
from posttrain_plugins.training.loop import Loop


class Watch(transformers.TrainerCallback):
    """Tells the stage's context how training goes, and stops it when the context says so."""

    def __init__(self, context: StageContext, loop: Loop, steps: int) -> None:
        self.context, self.loop, self.steps = context, loop, steps
        self._since = 0.0
        if loop.evaluation is not None:
            loop.evaluation.pause = self.pause

    def pause(self, done: int, total: int) -> None:
        """Report how far an evaluation is, and break it off when stopping."""
        self.context.progress(done, total, "evaluation rows")
        if self.loop.parallel.agree(self.context.stopping):
            raise Interrupted(
                "training was asked to stop",
                where=f"row {done} of an evaluation, after step {self.loop.state.global_step} of {self.steps}",
                fix="`posttrain resume` begins with this evaluation",
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock; evaluate the policy as it came, if that is asked for."""
        # A checkpoint's state has those of the options that it was written with.
        state.compute_steps(args, state.max_steps)
        if state.global_step == 0 and self.loop.config.eval_on_start:
            self.loop.evaluate()
        self.loop.paused, self._since = 0.0, time.monotonic()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the steps that float16 skips."""
        if self.loop.scaling is not None:
            skipped = self.loop.accelerator.optimizer_step_was_skipped
            self.loop.scaling.count(skipped, state.global_step + 1, self.loop.checkpoints.last())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report progress; ask for evaluations, and for a checkpoint and the end when stopping."""
        self.context.progress(state.global_step, self.steps, "steps")
        if state.global_step >= self.steps:
            # Saving, judging and delivering what was trained can fail, and must not cost the training.
            control.should_log = control.should_save = True
        evaluation = self.loop.evaluation
        if evaluation is not None and evaluation.due(state.global_step, self.steps):
            control.should_evaluate = True
        # Rank 0 is asked to stop, and all of them have to stop at the same step.
        if self.loop.parallel.agree(self.context.stopping):
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stream what an evaluation came to."""
        self.context.metrics(state.global_step, rest["metrics"])

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stream the metrics of the steps since the last report."""
        logs: dict[str, float] = rest["logs"]
        if "loss" not in logs:
            return
        now = time.monotonic()
        values = self.loop.meter.report()
        values |= {name: float(logs[name]) for name in ("learning_rate", "grad_norm") if name in logs}
        if self.loop.scaling is not None:
            values["skipped_steps"] = float(self.loop.scaling.skipped)
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        values["tokens_per_second"] = self.loop.tokens / max(now - self._since - self.loop.paused, 1e-9)
        self.loop.tokens, self.loop.paused, self._since = 0, 0.0, now
        self.context.metrics(state.global_step, values)
        logs.update(values)  # for the callbacks that are told after this one
