"""The stage `evaluate.preferences`: how often models prefer the better answer, with intervals."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.contracts.stage import Finding, Inputs, Level, Port
from posttrain_plugins.evaluation.reporting import ReportOptions, ReportStage
from posttrain_plugins.handoffs.lineage import certainty


class PreferencesConfig(ReportOptions):
    """Options of `evaluate.preferences`."""

    length_normalized: bool = Field(
        default=False,
        description="compare the mean log-prob of the tokens of a policy's answers in place of the sum, which favours "
        "short answers; reward models give one number for an answer",
    )


class Preferences(ReportStage):
    """Scores both answers of preference pairs; `gate` judges the report by `pair_accuracy`.

    A reward model prefers the answer with the larger reward, a policy the one that it is likelier to give.
    """

    config = PreferencesConfig
    inputs = (
        Port("models", POLICY | {Kind.REWARD_MODEL}, many=True),
        Port("data", frozenset({Kind.DATASET}), formats=frozenset({"preference"})),
    )
    target = "posttrain_plugins.evaluation.pairs:run"

    def check(self, config: PreferencesConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report an option that no model takes notice of."""
        models = inputs.get("models", ())
        if config.length_normalized and all(model.kind is Kind.REWARD_MODEL for model in models):
            message = "length_normalized would be ignored: all models are reward models"
            known = certainty(*models)
            yield Finding("evaluate", Level.ERROR, known, message, port="models", fix="leave it out")
