"""`posttrain explain` of a stage that has no outputs says so, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.planning import CHAIN, command, write_pipeline

from posttrain.cli import output
from posttrain.cli.findingview import show_findings
from posttrain.contracts.stage import Certainty, Finding, Level
from posttrain.execution.resumption import repeats

AFTER = "      after: {uses: try/rows, needs: [eval]}\n"


def test_a_skipped_stage_is_explained_by_what_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")
    no = CHAIN.replace(
        "inputs: {models: [sft, dpo]}", "inputs: {models: [sft, dpo]}, with: {verdict: rejected}"
    )
    pipeline = write_pipeline(Path("chain.yaml"), no.rstrip() + "\n" + AFTER)
    assert command("run", pipeline, "--runner", "inline", "--json").code == 3
    told = command("explain", "after")
    assert told.code == 1
    assert "after has no outputs yet" in told.err and "skipped: needs eval (rejected)" in told.err


@pytest.mark.parametrize("name", ["H070", "h070", "leakage", "Leakage"])
def test_a_rule_goes_by_its_code_and_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = command("explain", name)
    assert told.code == 0 and told.out.startswith("H070 leakage: ")


def test_what_may_be_a_digest_is_no_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = command("explain", "a1b2")
    assert told.code != 0 and "no rule" not in told.err
    told = command("explain", "h99")
    assert "no rule has this code" in told.err


def finding(node: str, message: str, level: Level, certainty: Certainty, fix: str | None = None) -> Finding:
    return Finding("r", level, certainty, message, port="model", fix=fix, node=node, code="X1")


def test_findings_come_by_weight_and_notes_that_are_alike_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output.console.cache_clear()
    predicted, unknown = Certainty.PREDICTED, Certainty.UNKNOWN
    show_findings(
        [
            finding(
                "a", "pad of x.model is its end", Level.NOTE, predicted, "nothing here; elsewhere, mind it"
            ),
            finding(
                "b", "pad of y.model is its end", Level.NOTE, predicted, "nothing here; elsewhere, mind it"
            ),
            finding("b", "whether y.model fits z.data is not known yet", Level.NOTE, unknown),
            finding("c", "whether z.data fits is not known yet", Level.NOTE, unknown),
            finding("b", "y.model is odd", Level.WARNING, predicted, "mend it"),
            finding("c", "x.model is odd", Level.WARNING, predicted, "mend it"),
            finding("c", "x.model is bad", Level.ERROR, predicted),
        ]
    )
    output.console.cache_clear()
    told = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert told == [
        "hand-offs",
        "error   predicted c.model: x.model is bad [X1 r]",
        "warning predicted b.model: y.model is odd [X1 r]",
        "fix: mend it",
        "warning predicted c.model: x.model is odd [X1 r]",
        "fix: mend it",
        "note    predicted a.model, b.model: pad of x.model is its end (and 1 more like it) [X1 r]",
        "note    unknown   b.model, c.model: whether y.model fits z.data is not known yet (and 1 more like it) [X1 r]",
    ]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], False),
        (["DataError"], True),
        (["TrainingDiverged"], True),
        (["SpecError", "StageError"], False),
        ([None], False),
    ],
)
def test_errors_in_options_or_data_would_come_again(kinds: list[str | None], expected: bool) -> None:
    assert repeats([None if kind is None else {"type": kind} for kind in kinds]) is expected
