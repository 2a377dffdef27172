"""What a training minimizes: one loss, or several with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from posttrain.contracts.component import Choice, Component, NoOptions
from posttrain.contracts.loss import Need
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import StageContext
from posttrain.contracts.trainer import Trainer
from posttrain.registry.fields import BoundChoice
from posttrain_plugins.losses.mixture import Mixture
from posttrain_plugins.training.options import TrainingOptions

Losses = Choice | Annotated[list[Choice], Field(min_length=1)]
"""A loss, or a list of them; a field of this type is marked with what losses it takes."""


class MixedOptions(TrainingOptions):
    """Options of trainers that take several losses at once; the trainer says which, in its own field `loss`."""

    loss: Losses
    loss_weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        default=None, description="weights of the losses of a list, in its order; unset: 1 each"
    )

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if self.loss_weights is None:
            return self
        if isinstance(self.loss, Choice):
            raise ValueError("loss_weights would be ignored: `loss` is no list")
        if len(self.loss_weights) != len(self.loss):
            lengths = f"{len(self.loss)} and {len(self.loss_weights)}"
            raise ValueError(f"loss and loss_weights have to be equally long, but hold {lengths}")
        return self


def known_needs(trainer: Trainer, config: Any) -> frozenset[Need] | None:
    """Return what a trainer's losses and options need of a batch; None where a loss is not bound to its plugin."""
    parts = _parts(config)
    if parts is None:
        return None
    needs = [each.plugin.needs_of(each.config) for each in parts]
    return frozenset().union(trainer.needs(config), *needs)


def known_metrics(config: Any) -> frozenset[str] | None:
    """Return the names of the metrics of an evaluation; None where a loss does not say what it tells."""
    parts = _parts(config)
    if parts is None:
        return None
    told = parts[0].plugin.metrics if isinstance(config.loss, Choice) else mixed(parts, None).plugin.metrics
    return None if told is None else told | {"loss"}


def repeated(config: Any) -> str | None:
    """Return the name of a loss that stands twice in a list with the same options."""
    seen: list[Choice] = []
    for each in [] if isinstance(config.loss, Choice) else config.loss:
        if each in seen:
            return str(each.name)
        seen.append(each)
    return None


def _parts(config: Any) -> list[Component] | None:
    """Return the losses that options name; None where one is not bound to its plugin."""
    chosen = config.loss
    losses: list[Any] = [chosen] if isinstance(chosen, Choice) else list(chosen)
    if not all(isinstance(each, BoundChoice) and each.plugin is not None for each in losses):
        return None
    return [Component(each.name, each.plugin(), each.config) for each in losses]


def mixed(parts: Sequence[Component], weights: Sequence[float] | None) -> Component:
    """Return several losses as one; without weights each counts 1."""
    mixture = Mixture(parts, weights or [1.0] * len(parts))
    return Component("+".join(each.name for each in parts), mixture, NoOptions())


def objective(context: StageContext) -> Component:
    """Return the loss that a training's options name; several of them as one."""
    config: Any = context.config
    if isinstance(config.loss, Choice):
        return context.component(config.loss, Group.LOSS)
    return mixed([context.component(each, Group.LOSS) for each in config.loss], config.loss_weights)
