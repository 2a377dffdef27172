"""The stage `gate`: may what follows use the candidate? Pass, reject, or say that this does not decide it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from posttrain.artifacts.kinds import POLICY, Kind, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Input,
    Inputs,
    Level,
    Outcome,
    Port,
    Prediction,
    Stage,
    StageConfig,
    StageContext,
    Verdict,
)
from posttrain_plugins.evaluation.deciding import undecided
from posttrain_plugins.evaluation.report import Item, Metric, read_items
from posttrain_plugins.evaluation.verdicts import (
    SIGN,
    Demands,
    Judgement,
    judge,
    no_answers,
    require_answers,
    require_items,
    worst,
)
from posttrain_plugins.handoffs.lineage import certainty

VERDICT = "verdict.json"
WORDS = {Verdict.COMPLETED: "pass", Verdict.REJECTED: "rejected", Verdict.INCONCLUSIVE: "inconclusive"}
"""What a verdict is called in the facts and for people."""


JUDGED = POLICY | {Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL}
"""The kinds that reports are about."""


class GateConfig(StageConfig):
    """Options of `gate`."""

    metric: Metric = Field(
        default=Metric.EXACT_MATCH,
        description="what is compared; the improvement in `exact_match`, in the `pair_accuracy` and in "
        "the `step_accuracy` of process reward models is the difference of the shares; in "
        "`perplexity`, where lower is better, the difference in nats per token (0.05 is about 5 % "
        "less perplexity)",
    )
    min_improvement: float = Field(
        default=0.0,
        description="the candidate must be better than the baseline by more than this; below 0 a candidate "
        "passes that is surely not worse by more than so much",
    )
    threshold: float | None = Field(
        default=None, description="the candidate itself must be better than this value of the metric"
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1.0, description="coverage of the intervals that decide"
    )
    check_answers: bool = Field(
        default=True,
        description="refuse a candidate whose score of exactly 0 or 1 rests on empty or cut-off answers alone: it "
        "says that generation failed, not how good the model is; of a baseline it is noted, as an untrained "
        "model may never stop; smoke runs leave this out",
    )


class Gate(Stage):
    """Judges candidates on an evaluation report, item by item against a baseline.

    The confidence interval decides: all of it above a demand passes, all of it at or below rejects, else the
    verdict is inconclusive. Of several candidates, such as the seeds of a matrix, all must pass; the verdict
    then names the one with the best value.
    """

    config = GateConfig
    inputs = (
        Port("report", frozenset({Kind.REPORT})),
        Port("candidate", JUDGED, many=True),
        Port("baseline", JUDGED, optional=True),
    )
    target = "posttrain_plugins.evaluation.gate:run"
    tiny: ClassVar[Mapping[str, Any]] = {"check_answers": False}

    def outputs(self, config: GateConfig) -> tuple[Port, ...]:
        """Return the verdict."""
        return (Port("verdict", frozenset({Kind.REPORT})),)

    def predict(self, config: GateConfig, inputs: Inputs) -> Mapping[str, Prediction]:
        """Predict a verdict without saying which."""
        return {"verdict": Prediction(Kind.REPORT, ReportFacts(report="verdict"))}

    def check(self, config: GateConfig, inputs: Inputs) -> Iterable[Finding]:
        """Report a gate that demands nothing, and a report that is about other models."""
        if not inputs.get("baseline") and config.threshold is None:
            yield _error(
                "baseline",
                "this gate has neither a baseline nor a threshold, so it would decide nothing",
                "connect `baseline`, or set `threshold`",
            )
        for report in inputs.get("report", ()):
            if report.facts.report not in (None, "evaluation"):
                yield _error(
                    "report",
                    f"{report.origin} is a report of the kind `{report.facts.report}`, not an evaluation",
                    "connect the output of an `evaluate` stage",
                    certainty(report),
                )
            yield from _absent(report, inputs)


def _absent(report: Input, inputs: Inputs) -> Iterable[Finding]:
    """Find models to judge that the report is known not to cover."""
    subjects = report.facts.subjects
    for port in ("candidate", "baseline"):
        for model in inputs.get(port, ()):
            if subjects is not None and model.artifact is not None and model.artifact.digest not in subjects:
                yield _error(
                    port,
                    f"{report.origin} does not cover the {port} {model.origin}",
                    f"add {model.origin} to the `models` of the evaluation",
                )


def _error(port: str, message: str, fix: str, basis: Certainty = Certainty.VERIFIED) -> Finding:
    return Finding("gate", Level.ERROR, basis, message, port=port, fix=fix)


def run(context: StageContext) -> Outcome:
    """Judge every candidate and write the verdict."""
    config: GateConfig = context.config
    demands = Demands(config.metric, config.min_improvement, config.threshold, config.confidence)
    items = read_items(context.input("report").path)
    candidates = list({model.digest: model for model in context.inputs["candidate"]}.values())
    baseline = next(iter(context.inputs.get("baseline", ())), None)
    reference = None if baseline is None else _baseline(context, items, baseline)
    judgements = [judge(_candidate(items, model, config), reference, demands) for model in candidates]
    best = max(judgements, key=lambda judgement: SIGN[demands.metric] * judgement.value.value)
    verdict = worst(judgement.verdict for judgement in judgements)
    figures = _figures(best)
    record = {
        "verdict": WORDS[verdict],
        "chosen": best.digest,
        "candidates": {judgement.digest: _record(judgement) for judgement in judgements},
    }
    text = json.dumps(record, indent=2, sort_keys=True, allow_nan=False)
    (context.output("verdict") / VERDICT).write_text(text + "\n", encoding="utf-8")
    subjects = (best.digest,) if baseline is None else (best.digest, baseline.digest)
    facts = ReportFacts(report="verdict", figures=figures, subjects=subjects, verdict=WORDS[verdict])
    context.describe("verdict", Kind.REPORT, facts)
    lines = [
        "; ".join([_sentence(own, model, baseline), *undecided(own, demands)])
        for own, model in zip(judgements, candidates, strict=True)
    ]
    summary = lines[0] if len(lines) == 1 else f"{WORDS[verdict]}; " + "; ".join(lines)
    return Outcome(verdict, figures, summary=summary)


def _candidate(items: Mapping[str, Sequence[Item]], model: Artifact, config: GateConfig) -> Sequence[Item]:
    """Return a candidate's items; its answers must be answers."""
    own = items.get(model.digest, ())
    require_items(own, model.ref)
    if _checks_answers(config):
        require_answers(own, model.ref)
    return own


def _baseline(context: StageContext, items: Mapping[str, Sequence[Item]], model: Artifact) -> Sequence[Item]:
    """Return the baseline's items. That it gives no answers is a fact about it, to be known, not a fault."""
    own = items.get(model.digest, ())
    require_items(own, model.ref)
    if _checks_answers(context.config) and (problem := no_answers(own)) is not None:
        context.note(f"the baseline {model.ref} gave no answers to compare with: {problem}", Level.WARNING)
    return own


def _checks_answers(config: GateConfig) -> bool:
    return config.check_answers and config.metric == Metric.EXACT_MATCH


def _figures(best: Judgement) -> dict[str, float]:
    """Return the figures of the chosen candidate; unbounded ends are left out."""
    figures: dict[str, float | int | None] = {"candidate": best.value.value}
    if best.baseline is not None and best.comparison is not None:
        improvement = best.comparison.estimate.as_dict()
        figures |= {"baseline": best.baseline.value, "improvement": improvement["value"]}
        figures |= {"improvement.low": improvement["low"], "improvement.high": improvement["high"]}
    return {name: float(value) for name, value in figures.items() if value is not None}


def _record(judgement: Judgement) -> dict[str, Any]:
    record: dict[str, Any] = {
        "verdict": WORDS[judgement.verdict],
        "demands": {name: WORDS[verdict] for name, verdict in judgement.verdicts.items()},
        "value": judgement.value.as_dict(),
    }
    if judgement.baseline is not None and judgement.comparison is not None:
        comparison = judgement.comparison
        record["baseline"] = judgement.baseline.as_dict()
        record["improvement"] = comparison.estimate.as_dict()
        if comparison.p_value is not None:
            record["mcnemar"] = {
                "wins": comparison.wins,
                "losses": comparison.losses,
                "p_value": comparison.p_value,
            }
    return record


def _sentence(judgement: Judgement, model: Artifact, baseline: Artifact | None) -> str:
    """Return `model:ab12 0.412 → model:cd34 0.655: +0.243 [0.190, 0.290], n=400: pass`."""
    value, word = judgement.value, WORDS[judgement.verdict]
    own = f"{model.ref} {value.value:.3f}"
    if baseline is None or judgement.baseline is None or judgement.comparison is None:
        return f"{own} [{value.low:.3f}, {value.high:.3f}], n={value.count}: {word}"
    gain = judgement.comparison.estimate
    before = f"{baseline.ref} {judgement.baseline.value:.3f}"
    return f"{before} → {own}: {gain.value:+.3f} [{gain.low:.3f}, {gain.high:.3f}], n={gain.count}: {word}"
