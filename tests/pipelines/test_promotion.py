"""The stage `promote`: compare-and-set, verdicts, and promotions that are not repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import artifact
from pydantic import ValidationError

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind, ReportFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Certainty, Input
from posttrain.errors import HandoffError, StoreError
from posttrain_pipelines.promotion import Promote, PromoteConfig, run

CONFIG = PromoteConfig(name="assistant")


class Context:
    """The few things of a `StageContext` that the stage uses."""

    node = "promote"

    def __init__(
        self, workspace: Path, config: PromoteConfig, inputs: Mapping[str, Sequence[Artifact]]
    ) -> None:
        self.workspace = workspace
        self.config = config
        self.inputs = inputs
        self.described: dict[str, tuple[Kind, Any]] = {}

    def input(self, port: str) -> Artifact:
        (found,) = self.inputs[port]
        return found

    def output(self, port: str) -> Path:
        path = self.workspace / "out"
        path.mkdir(exist_ok=True)
        return path

    def describe(self, port: str, kind: Kind, facts: Any) -> None:
        self.described[port] = (kind, facts)


def model(workspace: Path, text: str) -> Artifact:
    return artifact(workspace, "dpo", "model", Kind.MODEL, text, run="r7")


def verdict(workspace: Path, subject: Artifact, word: str = "pass") -> Artifact:
    facts = ReportFacts(
        report="verdict", verdict=word, subjects=(subject.digest,), figures={"candidate": 0.5}
    )
    return artifact(workspace, "gate", "verdict", Kind.REPORT, word, facts=facts)


def promote(workspace: Path, candidate: Artifact, config: PromoteConfig = CONFIG, **more: Artifact) -> Any:
    inputs = {"model": [candidate], **{port: [found] for port, found in more.items()}}
    outcome = run(Context(workspace, config, inputs))
    return json.loads((workspace / "out" / "receipt.json").read_text()), outcome


def as_inputs(**found: Artifact) -> dict[str, list[Input]]:
    return {port: [Input(f"x.{port}", item.kind, item.facts, item)] for port, item in found.items()}


def test_first_and_second_promotion(tmp_path: Path) -> None:
    first, second = model(tmp_path, "1"), model(tmp_path, "2")
    receipt, _ = promote(tmp_path, first, verdict=verdict(tmp_path, first))
    assert receipt == {
        "name": "assistant",
        "alias": "champion",
        "version": 1,
        "digest": first.digest,
        "previous": None,
    }
    receipt, outcome = promote(tmp_path, second)
    assert (receipt["version"], receipt["previous"]) == (2, 1)
    assert outcome.figures == {"version": 2.0}
    aliases = Aliases(tmp_path)
    assert aliases.current("assistant", "champion").digest == second.digest
    registered = aliases.versions("assistant")[0]
    assert (registered.run, registered.node, registered.figures) == ("r7", "dpo", {"candidate": 0.5})


def test_a_repetition_after_a_crash_gives_the_same_receipt(tmp_path: Path) -> None:
    promote(tmp_path, model(tmp_path, "1"))
    once, _ = promote(tmp_path, model(tmp_path, "2"))
    twice, _ = promote(tmp_path, model(tmp_path, "2"))
    assert once == twice
    assert len(Aliases(tmp_path).history("assistant", "champion")) == 2


def test_a_superseded_promotion_still_holds(tmp_path: Path) -> None:
    first, second = model(tmp_path, "1"), model(tmp_path, "2")
    stage = Promote()
    assert stage.holds(CONFIG, as_inputs(model=first), tmp_path) is not None
    promote(tmp_path, first)
    promote(tmp_path, second)
    assert stage.holds(CONFIG, as_inputs(model=first), tmp_path) is None
    assert stage.holds(CONFIG, as_inputs(model=second), tmp_path) is None
    other = PromoteConfig(name="assistant", alias="challenger")
    assert "never set" in str(stage.holds(other, as_inputs(model=first), tmp_path))


def test_an_unexpected_holder_is_not_overwritten(tmp_path: Path) -> None:
    promote(tmp_path, model(tmp_path, "1"))
    for expected in (0, 2):
        with pytest.raises(StoreError, match="version 1"):
            promote(tmp_path, model(tmp_path, "3"), PromoteConfig(name="assistant", expected=expected))
    receipt, _ = promote(tmp_path, model(tmp_path, "3"), PromoteConfig(name="assistant", expected=1))
    assert receipt["previous"] == 1


def test_nobody_held_the_alias_as_expected(tmp_path: Path) -> None:
    receipt, _ = promote(tmp_path, model(tmp_path, "1"), PromoteConfig(name="assistant", expected=0))
    assert receipt["previous"] is None


@pytest.mark.parametrize("word", ["rejected", "inconclusive"])
def test_only_a_pass_promotes(tmp_path: Path, word: str) -> None:
    candidate = model(tmp_path, "1")
    with pytest.raises(HandoffError, match=word):
        promote(tmp_path, candidate, verdict=verdict(tmp_path, candidate, word))
    assert Aliases(tmp_path).names() == []


def test_a_verdict_about_another_model_does_not_promote(tmp_path: Path) -> None:
    candidate, other = model(tmp_path, "1"), model(tmp_path, "2")
    with pytest.raises(HandoffError, match=other.digest[:12]):
        promote(tmp_path, candidate, verdict=verdict(tmp_path, other))


def test_a_report_that_is_no_verdict_does_not_promote(tmp_path: Path) -> None:
    candidate = model(tmp_path, "1")
    report = artifact(tmp_path, "evaluate", "report", Kind.REPORT, "report")
    with pytest.raises(HandoffError, match="not a verdict"):
        promote(tmp_path, candidate, verdict=report)


def test_a_verdict_that_says_nothing_does_not_promote(tmp_path: Path) -> None:
    candidate = model(tmp_path, "1")
    silent = artifact(tmp_path, "gate", "verdict", Kind.REPORT, "?", facts=ReportFacts(report="verdict"))
    with pytest.raises(HandoffError, match="does not say"):
        promote(tmp_path, candidate, verdict=silent)


def test_the_plan_finds_a_wrong_verdict(tmp_path: Path) -> None:
    candidate, other = model(tmp_path, "1"), model(tmp_path, "2")
    wrong = as_inputs(model=candidate, verdict=verdict(tmp_path, other))
    (finding,) = Promote().check(CONFIG, wrong)
    assert (finding.certainty, finding.port) == (Certainty.VERIFIED, "verdict")
    right = as_inputs(model=candidate, verdict=verdict(tmp_path, candidate))
    assert list(Promote().check(CONFIG, right)) == []
    predicted = {
        "model": [Input("dpo.model", Kind.MODEL, candidate.facts)],
        "verdict": [Input("gate.verdict", Kind.REPORT, ReportFacts(report="verdict"))],
    }
    assert list(Promote().check(CONFIG, predicted)) == []


@pytest.mark.parametrize("alias", ["latest", "v3", "V12", "a/b", ""])
def test_names_that_mlflow_keeps_for_itself_are_refused(alias: str) -> None:
    with pytest.raises(ValidationError):
        PromoteConfig(name="assistant", alias=alias)
