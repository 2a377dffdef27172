"""The stage `model.average`: one model of several with the same architecture and tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Input,
    Inputs,
    Level,
    Port,
    Prediction,
    Stage,
    StageConfig,
)
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.models.merge import MODEL, Dtype

MODELS = "models"
BASE = "base"
Method = Literal["linear", "slerp", "ties", "dare"]
ON_DIFFERENCES = frozenset({"ties", "dare"})
"""Methods that add up the models' differences from a common base."""
EQUAL = ("architecture", "shape", "layers", "width", "embeddings", "tokenizer")
"""Facts in which all models must agree: a weight means the same in each."""


class AverageConfig(StageConfig):
    """Options of `model.average`; what a method does not use is refused."""

    method: Method = Field(
        default="linear",
        description="`linear`, the weighted mean (https://arxiv.org/abs/2203.05482); `slerp`, two models along the "
        "arc between them; of differences from `base`: `ties`, the largest ones whose signs agree "
        "(https://arxiv.org/abs/2306.01708), or `dare`, random ones (https://arxiv.org/abs/2311.03099)",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        default=[], description="how much each model counts, in the order of the inputs; empty: all the same"
    )
    density: float | None = Field(
        default=None, gt=0, lt=1, description="share of a difference that is kept, by `ties` and `dare`"
    )
    scale: float = Field(
        default=1.0, gt=0, description="what the joined differences of `ties` and `dare` are multiplied by"
    )
    seed: int = Field(default=0, ge=0, description="which differences `dare` keeps")
    dtype: Dtype = Field(
        default="float32", description="precision of the weights; they are computed in float32"
    )

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        differences = self.method in ON_DIFFERENCES
        used = {"density": differences, "scale": differences, "seed": self.method == "dare"}
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        ignored = [name for name in used if not used[name] and getattr(self, name) != defaults[name]]
        if ignored:
            raise ValueError(f"{', '.join(ignored)} would be ignored by `{self.method}`")
        if differences and self.density is None:
            raise ValueError(
                f"`{self.method}` needs `density`, the share of each difference to keep, such as 0.2"
            )
        return self


class Average(Stage):
    """Make one model of several, tensor by tensor. Tokenizer, template and generation config are the first one's."""

    config = AverageConfig
    inputs = (
        Port(MODELS, frozenset({Kind.MODEL}), many=True),
        Port(BASE, frozenset({Kind.MODEL}), optional=True),
    )
    target = "posttrain_plugins.models.averaging:run"
    preload = ("torch",)

    def outputs(self, config: AverageConfig) -> tuple[Port, ...]:
        """Return the model."""
        return (Port(MODEL, frozenset({Kind.MODEL})),)

    def predict(self, config: AverageConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the facts of the first model."""
        facts = inputs[MODELS][0].facts.model_copy(update={"dtype": config.dtype, "merge": None})
        return {MODEL: Prediction(Kind.MODEL, facts)}

    def check(self, config: AverageConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report models that do not fit together and options that do not fit their number."""
        models, base = inputs[MODELS], inputs.get(BASE, ())
        several = " or more" if config.method != "slerp" else ""
        if len(models) < 2 or (config.method == "slerp" and len(models) > 2):
            yield _error(
                f"`{config.method}` takes 2{several} models, not {len(models)}", "connect others to `models`"
            )
        if config.weights and len(config.weights) != len(models):
            yield _error(
                f"there are {len(config.weights)} weights for {len(models)} models",
                "give one for each, or none",
            )
        if (config.method in ON_DIFFERENCES) != bool(base):
            message = "needs the model that all come from" if not base else "would ignore what is connected"
            yield _error(
                f"`{config.method}` {message} at the port `{BASE}`", "change `method` or the inputs", BASE
            )
        first, *others = (*models, *base)
        for other in others:
            yield from _unlike(first, other)


def _unlike(one: Input, other: Input) -> Iterable[Finding]:
    for name in EQUAL:
        own, theirs = getattr(one.facts, name), getattr(other.facts, name)
        if own is not None and theirs is not None and own != theirs:
            yield Finding(
                "average",
                Level.ERROR,
                certainty(one, other),
                f"{one.origin} and {other.origin} differ in {name}: {_shown(own)} and {_shown(theirs)}",
                port=MODELS,
                fix="average models of one architecture with one tokenizer, such as trainings of one base",
            )
            return


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _error(message: str, fix: str, port: str = MODELS) -> Finding:
    return Finding("average", Level.ERROR, Certainty.VERIFIED, message, port=port, fix=fix)
