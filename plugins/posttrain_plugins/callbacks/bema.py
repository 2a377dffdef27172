"""The bias-corrected exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from posttrain.contracts.callback import Callback, Training
from posttrain.contracts.component import Config
from posttrain_plugins.callbacks.averages import copied, replaced

if TYPE_CHECKING:
    from torch import Tensor

PORT = "average"


class BemaOptions(Config):
    """Options of the callback `bema`; the names in brackets are the paper's."""

    every: int = Field(
        default=400, ge=1, description="steps between two updates (φ); the last step is always one"
    )
    after: int = Field(
        default=0,
        ge=0,
        description="steps before the average begins (τ): it starts from the weights of that step",
    )
    ema_power: float = Field(
        default=0.5, ge=0, description="how fast the average slows down (κ); 0: it is the last weights"
    )
    bias_power: float = Field(
        default=0.2,
        ge=0,
        description="how fast the correction for the slow start fades (η); 0: it never does",
    )
    lag: float = Field(default=10, ge=1, description="age that the average starts with (ρ)")
    multiplier: float = Field(default=1.0, gt=0, description="how much older each step makes it (γ)")
    min_weight: float = Field(
        default=0.0, ge=0, le=1, description="least weight of the newest weights in an update of the average"
    )
    put_out: Literal["instead", "beside"] = Field(
        default="instead",
        description="`instead`: port `model` holds the average; `beside`: it holds the last weights, and another port, "
        f"`{PORT}`, the average",
    )


class Bema(Callback):
    """Put out a bias-corrected moving average of the trained weights (Block & Zhang 2025, algorithm 1).

    EMA_t = (1 − β_t) EMA_{t−1} + β_t θ_t with β_t = (ρ + γt)^{−κ}, and the average is EMA_t + α_t (θ_t − θ_τ) with
    α_t = (ρ + γt)^{−η}: a plain average lags behind, and the second term makes up for it. https://arxiv.org/abs/2508.00180

    It keeps three copies of the trained weights on the CPU of rank 0: where they began, their average, and the
    corrected one. An evaluation after the last step is one of what port `model` holds.
    """

    config = BemaOptions
    target = "posttrain_plugins.callbacks.bema:Averaging"

    def problems(self, config: BemaOptions, training: Any) -> Sequence[str]:
        """What is put out cannot be both the average and the weights of the best evaluation."""
        if training.load_best_model_at_end and config.put_out == "instead":
            return ("load_best_model_at_end puts out other weights; set `put_out: beside`, or leave one out",)
        return ()

    def ports(self, config: BemaOptions) -> Sequence[str]:
        """One for the average, if it is wanted beside."""
        return (PORT,) if config.put_out == "beside" else ()


class Averaging:
    """The average on rank 0.

    Args:
        training: The training.
        config: The options.
    """

    def __init__(self, training: Training, config: BemaOptions) -> None:
        self.training, self.config = training, config
        self.start: dict[str, Tensor] = {}
        self.ema: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self.updated = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start from the weights as they come, unless the average begins later."""
        if state.global_step == 0 and self.config.after == 0:
            self._begin(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin, or take the step's weights in."""
        step, since = state.global_step, state.global_step - self.config.after
        if since == 0:
            self._begin(step)
        elif since > 0 and since % self.config.every == 0:
            self._take_in(step)

    def last_step(self, step: int) -> None:
        """Take the last step's weights in."""
        if step > self.config.after and step != self.updated:
            self._take_in(step)

    def conclude(self, weights: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
        """Put out the average, or the last weights where it has not begun."""
        port = PORT if self.config.put_out == "beside" else "model"
        note = self.training.context.note
        if self.average:
            note(f"port `{port}` holds {self._said(weights)}")
        else:
            note(f"the training ended before step {self.config.after}, where the average begins")
        return {port: replaced(weights, self.average)}

    def _said(self, weights: Mapping[str, Tensor]) -> str:
        """Say what the average is of, and how far it is from the last weights."""
        squares = [
            (
                (self.average[name] - weights[name]).double().square().sum(),
                weights[name].double().square().sum(),
            )
            for name in self.average
        ]
        off, size = (float(sum(column)) ** 0.5 for column in zip(*squares, strict=True))
        share = off / size if size else 0.0
        return (
            f"the moving average of the weights of steps {self.config.after} to {self.updated}, taken in every "
            f"{self.config.every} steps; its distance from the last weights is {share:.3g} of their size"
        )

    def state(self) -> dict[str, Any]:
        """Return start, EMA, average and the step that they are of."""
        return {"start": self.start, "ema": self.ema, "average": self.average, "updated": self.updated}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; ranks without the average leave it to rank 0."""
        self.updated = state["updated"]
        if self.training.parallel.rank == 0:
            self.start, self.ema, self.average = (dict(state[name]) for name in ("start", "ema", "average"))

    def _begin(self, step: int) -> None:
        weights, self.updated = self.training.weights(), step
        if self.training.parallel.rank == 0:
            self.start, self.ema, self.average = copied(weights), copied(weights), copied(weights)

    def _take_in(self, step: int) -> None:
        weights, self.updated = self.training.weights(), step
        if self.training.parallel.rank == 0:
            self._update(step, weights)

    def _update(self, step: int, weights: Mapping[str, Tensor]) -> None:
        age = self.config.lag + self.config.multiplier * step
        newest = max(age**-self.config.ema_power, self.config.min_weight)
        correction = age**-self.config.bias_power
        for name, ema in self.ema.items():
            value = weights[name].detach()
            ema.mul_(1 - newest).add_(value, alpha=newest)
            self.average[name] = ema + correction * (value - self.start[name])
