"""Evaluation while training: the loss over a fixed set, the best of all evaluations, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from posttrain.contracts.trainer import Example
from posttrain.errors import SpecError, TrainingDiverged
from posttrain_plugins.training.options import EVALUATION, TrainingOptions
from posttrain_plugins.training.step import Pause, Stepper, unheard

Metrics = Mapping[str, float]


@dataclass
class Best:
    """The best evaluation so far; part of a checkpoint.

    Args:
        metric: What it is judged by.
        greater: Whether more of it is better.
        patience: Evaluations in a row without a better one before training stops; None: it does not stop.
        threshold: How much better one must be to count for that.
        step: Where the best one was.
        metrics: What it came to.
        waited: Evaluations in a row that were not better by more than the threshold.
    """

    metric: str
    greater: bool
    patience: int | None = None
    threshold: float = 0.0
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    waited: int = 0

    @classmethod
    def of(cls, config: TrainingOptions) -> Best | None:
        """Return what the options ask for, if they do.

        Raises:
            SpecError: Which way the metric goes is not known.
        """
        if config.early_stopping_patience is None and not config.load_best_model_at_end:
            return None
        if config.undirected:
            raise SpecError(
                f"whether more of {config.metric_for_best_model} is better is not said",
                where="greater_is_better",
                fix="`greater_is_better: true` where more is better, `greater_is_better: false` where less is",
            )
        return cls(
            config.metric_for_best_model,
            bool(config.greater_is_better),
            config.early_stopping_patience,
            config.early_stopping_threshold,
        )

    def judge(self, step: int, metrics: Metrics) -> bool:
        """Take in an evaluation and say whether it is the best so far."""
        gain = math.inf
        if self.step is not None:
            gain = (metrics[self.metric] - self.metrics[self.metric]) * (1 if self.greater else -1)
        self.waited = 0 if gain > self.threshold else self.waited + 1
        if gain > 0:
            self.step, self.metrics = step, dict(metrics)
        return gain > 0

    def require(self, metrics: Metrics) -> None:
        """Refuse metrics without the one to judge by.

        Raises:
            SpecError: It is not among them.
        """
        if self.metric not in metrics:
            raise SpecError(
                "the evaluation has no such metric",
                where="metric_for_best_model",
                found=self.metric,
                expected=f"one of {', '.join(sorted(metrics))}",
            )

    @property
    def exhausted(self) -> bool:
        """Whether it is time to stop."""
        return self.patience is not None and self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.step, "metrics": self.metrics, "waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.step, self.metrics, self.waited = state["step"], dict(state["metrics"]), state["waited"]


@dataclass
class Evaluation:
    """Evaluates the policy on a fixed set with the loss it is trained with, as if the set were one step.

    Args:
        stepper: Computes the loss.
        examples: The set.
        every: Steps between two evaluations; 0: only after the last step, whichever that turns out to be.
        best: What to do with the metrics beside reporting them.
        counts: Key figures of the set.
        reference: As `Stepper.reference`, for the rows of this set.
        last: What the last evaluation came to.
        pause: Called with how many examples are done, and of how many; may raise to stop, on all ranks at once.
        owed: Whether one was broken off, with which a resume begins.
        at: The step that the last one was after.
    """

    stepper: Stepper
    examples: Sequence[Example]
    every: int
    best: Best | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    reference: Mapping[int, Tensor] | None = None
    last: dict[str, float] = field(default_factory=dict)
    pause: Pause = unheard
    owed: bool = False
    at: int | None = None

    def due(self, step: int, steps: int) -> bool:
        """Say whether to evaluate after a step."""
        return step >= steps or bool(self.every and step % self.every == 0)

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics of the policy as it is, under their names with `eval/`.

        Raises:
            TrainingDiverged: The loss is not finite.
            SpecError: The metric to judge by is not among them.
            Interrupted: The stage was asked to stop.
        """
        training = self.stepper.reference
        self.stepper.reference = self.reference
        try:
            result = self.stepper.evaluate(self.examples, self.pause)
        finally:
            self.stepper.reference = training
        if not math.isfinite(result.loss):
            raise TrainingDiverged(
                "the loss of the evaluation is not finite",
                where=f"after step {step}",
                found=f"{result.loss} over rows {', '.join(map(str, result.suspects))} of port `{EVALUATION}`"
                " (counted from 0)",
                fix="lower learning_rate, or look at these rows",
            )
        self.at, found = step, {"loss": result.loss, **result.metrics}
        self.last = {f"{EVALUATION}/{name}": value for name, value in found.items()}
        if self.best is not None:
            self.best.require(self.last)
        return self.last

    def figures(self, chosen: bool) -> dict[str, float]:
        """Return the metrics of the weights that are put out, and where the best evaluation was.

        Args:
            chosen: Whether these are the best ones.
        """
        counts = {f"{EVALUATION}/{name}": count for name, count in self.counts.items()}
        if self.best is None or self.best.step is None:
            return {**self.last, **counts}
        metrics = self.best.metrics if chosen else self.last
        return {**metrics, **counts, "best_step": float(self.best.step)}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"last": self.last, "at": self.at, "best": self.best and self.best.state(), "owed": self.owed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.last, self.at = dict(state["last"]), state.get("at")
        self.owed = state.get("owed", False)
        if self.best is not None:
            self.best.restore(state["best"])
