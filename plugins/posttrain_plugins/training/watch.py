"""What a training tells while it runs, and how it is stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import transformers

from posttrain.contracts.stage import StageContext
from posttrain_plugins.training.loop import Loop


class Watch(transformers.TrainerCallback):
    """Tells the stage's context how training goes, and stops it when the context says so."""

    def __init__(self, context: StageContext, loop: Loop, steps: int) -> None:
        self.context, self.loop, self.steps = context, loop, steps
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._since = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report progress; ask for a checkpoint and the end when stopping."""
        self.context.progress(state.global_step, self.steps, "steps")
        if state.global_step >= self.steps:
            control.should_log = True
        if self.context.stopping:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stream the metrics of the steps since the last report."""
        logs: Mapping[str, float] = rest["logs"]
        if "loss" not in logs:
            return
        now = time.monotonic()
        values = self.loop.meter.report()
        values |= {name: float(logs[name]) for name in ("learning_rate", "grad_norm") if name in logs}
        values["tokens_per_second"] = self.loop.tokens / max(now - self._since, 1e-9)
        self.loop.tokens, self._since = 0, now
        self.context.metrics(state.global_step, values)
