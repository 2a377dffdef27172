"""The end of a training that explodes, before it spoils its weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config
from posttrain.errors import StageError, TrainingDiverged

WATCHED = ("loss", "grad_norm")


class DivergenceOptions(Config):
    """Options of the callback `divergence`."""

    factor: Annotated[float, Field(gt=1)] | None = Field(
        default=10.0,
        description="stop where the size of the loss or of the gradient's norm exceeds this many times its median over "
        "the last `window` steps; null: not for that",
    )
    window: int = Field(default=50, ge=2, description="steps of the running median")
    patience: int = Field(default=1, ge=1, description="steps in a row that have to exceed it")
    warmup: int = Field(
        default=20, ge=2, description="steps that have to be known before anything is too large"
    )
    bounds: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="largest size of metrics of a step, by name: `{rewards/margin: 50, loss: 20}`; they hold from the "
        "first step on",
    )


class Divergence(Callback):
    """Fail the training at the step whose loss, gradient or metrics explode, before the weights are updated with it.

    Whether the norm of the gradient exceeds `factor` times its running median, or a metric its bound, is looked at in
    every step. What is not finite stops any training, without this. The last checkpoint stays for `resume`.
    """

    config = DivergenceOptions
    target = "posttrain_plugins.callbacks.divergence:Watcher"


class Watcher:
    """Compares each step with those before it.

    Args:
        training: The training.
        config: The options.
    """

    def __init__(self, training: Training, config: DivergenceOptions) -> None:
        self.training, self.config = training, config
        self.seen: dict[str, deque[float]] = {name: deque(maxlen=config.window) for name in WATCHED}
        self.exceeding = dict.fromkeys(WATCHED, 0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge the step that is about to change the weights.

        Raises:
            TrainingDiverged: Something is too large.
            StageError: A metric with a bound is not there.
        """
        metrics = self.training.metrics()
        self._bounded(metrics, state.global_step + 1)
        if self.config.factor is not None:
            for name in WATCHED:
                self._compared(name, abs(metrics[name]), self.config.factor, state.global_step + 1)

    def state(self) -> dict[str, Any]:
        """Return what was seen."""
        return {
            "seen": {name: list(values) for name, values in self.seen.items()},
            "exceeding": self.exceeding,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.seen = {name: deque(values, maxlen=self.config.window) for name, values in state["seen"].items()}
        self.exceeding = dict(state["exceeding"])

    def _bounded(self, metrics: Mapping[str, float], step: int) -> None:
        for name, bound in self.config.bounds.items():
            if name not in metrics and step == 1:
                known = ", ".join(sorted(metrics))
                where = "callback divergence, bounds"
                raise StageError("there is no such metric", where=where, found=name, expected=known)
            if abs(metrics.get(name, 0.0)) > bound:
                raise _diverged(name, step, metrics[name], f"at most {bound:g}, which its bound says")

    def _compared(self, name: str, value: float, factor: float, step: int) -> None:
        """Compare with the median, in which a step that exceeds it does not count."""
        if not math.isfinite(value):
            return  # a step that float16 skips
        seen = self.seen[name]
        usual = median(seen) if len(seen) >= min(self.config.warmup, self.config.window) else math.inf
        if value <= factor * usual or usual == 0:
            self.exceeding[name] = 0
            seen.append(value)
            return
        self.exceeding[name] += 1
        if self.exceeding[name] >= self.config.patience:
            expected = f"at most {factor:g} times {usual:.4g}, the median of the last {len(seen)} steps"
            raise _diverged(name, step, value, expected)


def _diverged(name: str, step: int, value: float, expected: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"the training diverges: `{name}` has exploded",
        where=f"step {step}, before its update",
        found=f"{value:.6g}",
        expected=expected,
        fix="lower learning_rate, lengthen its warm-up, or raise the callback's factor or patience",
    )
