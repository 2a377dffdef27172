"""Options with components of every kind, and a catalogue that has them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.contracts.component import Choice, Config, Uses
from posttrain.contracts.loss import Family, Loss
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.stage import Secret, Source, StageConfig, VolatileMark

LossChoice = Annotated[Choice, Uses(Group.LOSS)]

RewardChoice = Annotated[Choice, Uses(Group.REWARD)]

Volatile = VolatileMark()


class SigmoidConfig(Config):
    beta: float = Field(default=0.1, description="strength of the pull to the reference")
    smoothing: float = Field(default=0.0, ge=0, lt=0.5)


class Sigmoid(Loss):
    family = Family.PREFERENCE
    config = SigmoidConfig

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class Plain(Loss):
    family = Family.PREFERENCE

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class JudgeConfig(Config):
    rubric: Source
    token: Secret | None = None
    timeout: Annotated[int, Volatile] = 30
    scale: float = 1.0


class SumConfig(Config):
    parts: list[RewardChoice]


def reward(model: type[Config]) -> Any:
    def score(samples: Any, config: Any) -> list[float | None]:
        return []

    score.config = model
    return score


LOSSES = [
    Registration("sigmoid", "The DPO loss.", Sigmoid),
    Registration("acme/plain", "No options.", Plain),
]

REWARDS = [
    Registration("judge", "Asks a judge.", reward(JudgeConfig)),
    Registration("sum", "Adds rewards.", reward(SumConfig)),
]


class Inner(Config):
    loss: LossChoice | None = None
    depth: int = 1


class Options(StageConfig):
    learning_rate: float = Field(default=1e-5, gt=0, description="peak learning rate")
    steps: int | None = None
    loss: LossChoice = Field(default=Choice(name="sigmoid"), description="what is minimized")
    rewards: list[RewardChoice] = []
    named: dict[str, RewardChoice] = {}
    inner: Inner = Inner()


class Colour(StrEnum):
    RED = "red"


class Types(Config):
    real: float = 0.0
    whole: int = 0
    text: str = ""
    flag: bool = False
    pair: tuple[int, str] = (1, "")
    many: tuple[int, ...] = ()
    colour: Colour = Colour.RED
    path: Path = Path()
    mode: Literal["fast", "slow"] = "fast"
    either: str | list[str] = ""
    table: dict[str, float] = {}
