"""Plugins that keep their contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Config
from posttrain.contracts.loss import Family, Loss
from posttrain.contracts.registration import Registration
from posttrain.contracts.stage import Port, Stage, StageConfig
from posttrain.contracts.trainer import Trainer

REPORT = Port("report", frozenset({Kind.REPORT}))


class Options(StageConfig):
    size: int = 1


class GoodStage(Stage):
    config = Options
    inputs = (Port("model", frozenset({Kind.MODEL})),)
    target = "some.module:run"
    tiny = {"size": 1}

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (REPORT,)


class GoodTrainer(Trainer):
    config = Options
    target = "some.module:run"
    family = Family.TOKEN
    formats = frozenset({"messages"})

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (REPORT,)

    def passages(self, row: Mapping[str, Any], format: Any, needs: Any) -> Sequence[Any] | str:
        return "dropped"

    def batch(self, scored: Sequence[Any], config: Any) -> Any:
        return None


class GoodLoss(Loss):
    family = Family.TOKEN

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class GoodReward:
    config = Config

    def __call__(self, samples: Any, config: Any) -> list[float | None]:
        return []


def variant(base: type, **attributes: Any) -> type:
    return type("Variant", (base,), attributes)


def losses(*names: str) -> list[Registration]:
    return [Registration(name, "s", GoodLoss) for name in names]
