"""Light stages for tests of planning and of the command line: a local plugin file with every kind of option."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

import posttrain
from posttrain.artifacts.kinds import DatasetFacts, Kind, PolicyFacts, ReportFacts
from posttrain.contracts.component import Choice, Config, Uses
from posttrain.contracts.loss import Family, Loss
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.stage import (
    Certainty,
    Estimate,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Secret,
    Source,
    Stage,
    StageConfig,
    StageContext,
    Verdict,
    VolatileMark,
)

POSTTRAIN_API = ">=1,<2"
DATA = frozenset({Kind.DATASET})
MODEL = frozenset({Kind.MODEL})
ROWS = "rows.txt"


class RowsConfig(StageConfig):
    path: Source | None = None
    rows: int = 10
    tags: frozenset[str] = frozenset()


class Rows(Stage):
    """Two datasets: `train` and `test`."""

    config = RowsConfig
    target = f"{__name__}:rows"
    tiny: ClassVar[Mapping[str, Any]] = {"rows": 2}

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return Port("train", DATA), Port("test", DATA)


def rows(context: StageContext) -> Outcome:
    config = context.config
    text = Path(config.path).read_text() if config.path else f"{config.rows} {sorted(config.tags)}"
    for port in ("train", "test"):
        _write(context, port, f"{port} {text}", Kind.DATASET, DatasetFacts(format="text", rows=config.rows))
    return Outcome(figures={"rows": config.rows})


def _write(context: StageContext, port: str, text: str, kind: Kind, facts: Any) -> None:
    (context.output(port) / ROWS).write_text(text)
    context.describe(port, kind, facts)


class MarginConfig(Config):
    beta: float = Field(default=0.1, gt=0, description="strength")


class Margin(Loss):
    """A loss that is never computed."""

    family = Family.PREFERENCE
    config = MarginConfig

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> Any:
        return None


class Plain(Margin):
    """Another one."""

    config = Config


class TrainConfig(StageConfig):
    loss: Annotated[Choice, Uses(Group.LOSS)] = Choice(name="margin")
    learning_rate: float = 1e-3
    epochs: float = 3.0
    steps: int | None = None
    seed: int = 0
    logging: Annotated[int, VolatileMark()] = 10
    token: Secret | None = None
    fail: Annotated[str | None, VolatileMark()] = None

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.steps is not None and self.epochs != 3.0:
            raise ValueError("epochs would be ignored beside steps; give one of them")
        return self


class Train(Stage):
    """Makes a model of a dataset."""

    config = TrainConfig
    inputs = (Port("data", DATA, training=True), Port("model", MODEL, optional=True))
    target = f"{__name__}:train"
    tiny: ClassVar[Mapping[str, Any]] = {"steps": 2, "epochs": None, "loss": {"beta": 0.5}}

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("model", MODEL),)

    def predict(self, config: Any, inputs: Inputs) -> Mapping[str, Prediction]:
        return {"model": Prediction(Kind.MODEL, PolicyFacts(width=8, eos=(1,), pad=0))}

    def estimate(self, config: Any, inputs: Inputs, gpus: int = 0) -> Estimate:
        return Estimate(parameters=1500, trainable=500, memory_bytes=3 * 2**20, note="float32")

    def check(self, config: Any, inputs: Inputs) -> list[Finding]:
        if config.learning_rate <= 1:
            return []
        known = all(each.verified for each in inputs["data"])
        certainty = Certainty.VERIFIED if known else Certainty.UNKNOWN if config.seed else Certainty.PREDICTED
        return [Finding("rate", Level.ERROR, certainty, "this rate is absurd", port="data", fix="lower it")]


def train(context: StageContext) -> Outcome:
    config = context.config
    if config.fail:
        raise ValueError(config.fail)
    if config.token:
        context.note(f"logged in with {context.secret(config.token)}")
    begun = [each.digest for each in context.inputs.get("model", ())]
    text = f"{context.input('data').digest} {begun} {config.loss.options} {config.seed} {config.steps}"
    _write(context, "model", text, Kind.MODEL, PolicyFacts(width=8, parameters=1500, eos=(1,), pad=0))
    context.metrics(1, {"loss": 0.5})
    figures = {name: 0.123456789 for name in ("loss", "accuracy", "margin", "tokens", "entropy", "norm")}
    return Outcome(figures=figures, steps=1, summary="trained")


class GateConfig(StageConfig):
    verdict: Verdict = Verdict.COMPLETED


class Compare(Stage):
    """Takes any number of models and says what its options say."""

    config = GateConfig
    inputs = (Port("models", MODEL, many=True),)
    target = f"{__name__}:compare"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("report", frozenset({Kind.REPORT})),)


def compare(context: StageContext) -> Outcome:
    text = " | ".join(each.file(ROWS).read_text() for each in context.inputs["models"])
    facts = ReportFacts(report="verdict", verdict=context.config.verdict)
    _write(context, "report", text, Kind.REPORT, facts)
    return Outcome(verdict=context.config.verdict, figures={"margin": 0.25}, summary="compared")


class Publish(Stage):
    """Needs a model and a report; puts out a report."""

    inputs = (Port("model", MODEL), Port("report", frozenset({Kind.REPORT})))
    target = f"{__name__}:publish"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("receipt", frozenset({Kind.REPORT})),)


def publish(context: StageContext) -> Outcome:
    _write(context, "receipt", "published", Kind.REPORT, ReportFacts(report="promotion"))
    return Outcome(summary="published")


class Silent(Stage):
    """Puts out nothing."""

    target = f"{__name__}:silent"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return ()


def silent(context: StageContext) -> Outcome:
    print(f"pid {os.getpid()}")
    return Outcome()


STAGES = {
    "rows": Rows,
    "train": Train,
    "compare": Compare,
    "publish": Publish,
    "silent": Silent,
}


@posttrain.hookimpl
def posttrain_stages() -> list[Registration]:
    return [
        Registration(f"try/{name}", f"test stage {name}", f"{__name__}:{cls.__name__}")
        for name, cls in STAGES.items()
    ]


@posttrain.hookimpl
def posttrain_losses() -> list[Registration]:
    return [
        Registration("try/margin", "a loss", f"{__name__}:Margin"),
        Registration("try/plain", "another loss", f"{__name__}:Plain"),
    ]
