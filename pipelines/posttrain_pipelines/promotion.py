"""The stage `promote`: register a model and point an alias at it, if the verdict says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field, field_validator

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import POLICY, Kind, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageConfig,
    StageContext,
)
from posttrain.errors import HandoffError

RECEIPT = "receipt.json"
PASS = "pass"
"""The one verdict that lets a model through."""


class PromoteConfig(StageConfig):
    """Options of `promote`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$", description="the registered name")
    alias: str = Field(
        default="champion",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$",
        description="the alias that will point at the model; `latest` and names such as `v3` are taken in "
        "MLflow",
    )
    expected: int | None = Field(
        default=None,
        ge=0,
        description="the version that the alias must point at now, 0 for none; left out, it is whatever it "
        "points at when the stage starts; either way a change made meanwhile is never overwritten",
    )

    @field_validator("alias")
    @classmethod
    def _free_in_mlflow(cls, alias: str) -> str:
        if alias == "latest" or re.fullmatch(r"[vV][0-9]+", alias):
            raise ValueError("`latest` and names such as `v3` are taken in MLflow")
        return alias


class Promote(Stage):
    """Registers a model under a name and moves an alias to it by compare-and-set.

    It reconciles each time: the registry's history says whether a model was promoted already. A model that
    was promoted and has been superseded since is left where it is; only a new decision moves the alias back.
    """

    config = PromoteConfig
    inputs = (Port("model", POLICY), Port("verdict", frozenset({Kind.REPORT}), optional=True))
    target = "posttrain_pipelines.promotion:run"
    external = True

    def outputs(self, config: PromoteConfig) -> tuple[Port, ...]:
        """Return the receipt."""
        return (Port("receipt", frozenset({Kind.REPORT})),)

    def predict(self, config: PromoteConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict a receipt for the model."""
        model = next(iter(inputs.get("model", ())), None)
        subjects = (model.artifact.digest,) if model and model.artifact else None
        return {"receipt": Prediction(Kind.REPORT, ReportFacts(report="promotion", subjects=subjects))}

    def check(self, config: PromoteConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a verdict that is none, says no, or is about another model."""
        for verdict in inputs.get("verdict", ()):
            certainty = Certainty.VERIFIED if verdict.verified else Certainty.PREDICTED
            for model in inputs.get("model", ()):
                digest = model.artifact.digest if model.artifact else None
                wrong = objection(verdict.facts, digest)
                if wrong:
                    yield Finding(
                        "promote",
                        Level.ERROR,
                        certainty,
                        f"{verdict.origin} {wrong}",
                        port="verdict",
                        fix=f"connect the verdict of a gate whose candidate is {model.origin}",
                    )

    def holds(self, config: PromoteConfig, inputs: Inputs, workspace: Path) -> str | None:
        """Return None when the registry's history shows this promotion, else what is missing."""
        aliases = Aliases(workspace)
        promoted = {change.version for change in aliases.history(config.name, config.alias)}
        digests = [entry.artifact.digest for entry in inputs.get("model", ()) if entry.artifact]
        versions = {entry.digest: entry.version for entry in aliases.versions(config.name)}
        if digests and all(versions.get(digest) in promoted for digest in digests):
            return None
        return f"`{config.alias}` of `{config.name}` was never set to this model"


def objection(facts: ReportFacts, model: str | None) -> str | None:
    """Return what a verdict says against promoting `model`, as far as its facts are known."""
    if facts.report not in (None, "verdict"):
        return f"is a report of the kind `{facts.report}`, not a verdict"
    if facts.verdict not in (None, PASS):
        return f"says `{facts.verdict}`"
    if facts.subjects and model is not None and facts.subjects[0] != model:
        return f"is about the model {facts.subjects[0][:12]}, not about {model[:12]}"
    return None


def run(context: StageContext) -> Outcome:
    """Register the model, move the alias and write the receipt."""
    config: PromoteConfig = context.config
    model = context.input("model")
    figures = _approved(context, model)
    aliases = Aliases(context.workspace)
    holder = aliases.current(config.name, config.alias)
    version = _register(aliases, config.name, model, context, figures)
    if holder is None or holder.version != version:
        found = holder.version if holder else None
        expected = found if config.expected is None else config.expected or None
        aliases.set_alias(config.name, config.alias, version, expected, node=context.node)
    previous = _previous(aliases, config, version)
    receipt = {
        "name": config.name,
        "alias": config.alias,
        "version": version,
        "digest": model.digest,
        "previous": previous,
    }
    path = context.output("receipt") / RECEIPT
    path.write_text(json.dumps(receipt, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    facts = ReportFacts(report="promotion", figures={"version": float(version)}, subjects=(model.digest,))
    context.describe("receipt", Kind.REPORT, facts)
    before = "not set before" if previous is None else f"version {previous} before"
    summary = f"{config.name}@{config.alias} is version {version} ({model.ref}), {before}"
    return Outcome(figures={"version": float(version)}, summary=summary)


def _approved(context: StageContext, model: Artifact) -> Mapping[str, float]:
    """Return the verdict's figures; none without a verdict.

    Raises:
        HandoffError: When the verdict does not let this very model through.
    """
    for verdict in context.inputs.get("verdict", ()):
        facts: ReportFacts = verdict.facts
        wrong = objection(facts, model.digest)
        if wrong or facts.verdict is None or not facts.subjects:
            raise HandoffError(
                f"the verdict {wrong or 'does not say what it decided'}",
                where=f"{context.node}.verdict",
                found=verdict.ref,
                expected=f"a verdict `{PASS}` about {model.ref}",
                fix="connect the verdict of a gate whose candidate is the model to promote",
            )
        return facts.figures or {}
    return {}


def _register(
    aliases: Aliases, name: str, model: Artifact, context: StageContext, figures: Mapping[str, float]
) -> int:
    """Register the model as made by the run and node that made it, whichever run promotes it."""
    origin = Store(context.workspace).provenance(model.digest)
    run, node = (origin.run, origin.node) if origin else ("", context.node)
    return aliases.register(name, model.digest, run, node, figures)


def _previous(aliases: Aliases, config: PromoteConfig, version: int) -> int | None:
    """Return what the alias pointed at before it was last set to `version`, the same after a crash."""
    changes = [entry for entry in aliases.history(config.name, config.alias) if entry.version == version]
    return changes[-1].previous
