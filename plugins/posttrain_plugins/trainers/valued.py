"""What trainers of models that give numbers share: a head on a policy in, and what it came to on held-out rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.artifacts.kinds import POLICY, Kind, PolicyFacts
from posttrain.contracts.stage import Finding, Input, Inputs, Level, Port, Prediction
from posttrain.contracts.trainer import Example
from posttrain_plugins.handoffs.lineage import certainty
from posttrain_plugins.trainers.reference_free import WithoutDropout
from posttrain_plugins.training.offline import OfflineTrainer

Trunk = Literal["trained", "frozen"]


class ValuedOptions(WithoutDropout):
    """Options of trainers of models that give numbers."""

    learning_rate: float = Field(default=1e-4, gt=0, description="peak learning rate")
    trunk: Trunk = Field(
        default="trained",
        description="whether all of the model is trained, or with `frozen` its new head alone, on the hidden states "
        "of the policy as it is: the layers below stay those of the policy, weight by weight",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in ("lora", "peft", "quantization") if getattr(self, name) is not None]
        if self.trunk == "frozen" and given:
            raise ValueError(f"trunk: frozen trains the head alone, so {', '.join(given)} would be ignored")
        return self


class ValuedTrainer(OfflineTrainer):
    """Base of trainers of models that give numbers; dropout is off, so that equal answers get equal numbers.

    Class attributes:
        kind: What they put out.
        numbers: What the numbers of such a model are, in words.
    """

    valued = True
    dropout = False
    kind: ClassVar[Kind]
    numbers: ClassVar[str] = "numbers"

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if hasattr(cls, "formats"):
            first, *others = cls.inputs
            cls.inputs = (replace(first, kinds=POLICY | {cls.kind}), *others)

    def trained(self, config: ValuedOptions, parameters: int, width: int) -> int:
        """All weights, or those of the new head, of two outputs at most."""
        return 2 * width if config.trunk == "frozen" else parameters

    @abstractmethod
    def judged(self, examples: Sequence[Example], values: Mapping[int, Sequence[float]]) -> tuple[int, int]:
        """Count how often the model's numbers say what the rows say.

        Args:
            examples: Some examples.
            values: The model's numbers by row, at the supervised places of its sequences.

        Returns:
            How often they do, and out of how many.
        """

    def outputs(self, config: Any) -> tuple[Port, ...]:
        """A model of the trainer's kind, as weights or as an adapter."""
        return tuple(replace(port, kinds=frozenset({self.kind})) for port in super().outputs(config))

    def predict(self, config: Any, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict the input's facts with another head, and weights that are trained."""
        source = inputs["model"][0]
        unknown = {"head": None, "scores": None, "parameters": None, "missing": None, "merge": None}
        facts: PolicyFacts = source.facts.model_copy(update={**unknown, "dtype": "float32"})
        if config.adapter is not None:
            base = source.artifact.digest if source.artifact else None
            facts = facts.model_copy(update={"base": base, "adapter": None})
        elif source.kind is not self.kind:
            facts = facts.model_copy(update={"base": None, "adapter": None, "quantization": None})
        return dict.fromkeys(super().predict(config, inputs), Prediction(self.kind, facts))

    def check(self, config: Any, inputs: Inputs) -> Iterable[Finding]:
        """Report options that do not suit what training starts from."""
        yield from super().check(config, inputs)
        model = inputs["model"][0]
        adapted = model.kind is self.kind and model.facts.base is not None
        if adapted and config.adapter is not None:
            yield self._misfit(
                model,
                f"{model.origin} is an adapter with a head already, and would get a second one",
                "leave `lora` and `peft` out to go on training it, or start from the policy",
            )
        if adapted and config.trunk == "frozen":
            yield self._misfit(
                model, f"trunk: frozen would be ignored: {model.origin} is an adapter", "leave `trunk` out"
            )
        whole = model.kind is not Kind.MODEL and not adapted
        if whole and config.quantization is not None and config.adapter is None:
            yield self._misfit(
                model,
                f"all weights of {model.origin} would be trained, which quantization does not let",
                "leave `quantization` out, or merge an adapter before and train a new one with `lora`",
            )

    @staticmethod
    def _misfit(model: Input, message: str, fix: str) -> Finding:
        return Finding("trainer", Level.ERROR, certainty(model), message, port="model", fix=fix)
