"""A run of light stages: what is built, reused, skipped and recorded, and how stages fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.lab import Lab
from helpers.small_pipelines import CHAIN, failing

from posttrain.artifacts.store import Store
from posttrain.contracts.runner import NodeStatus
from posttrain.errors import ExitCode
from posttrain.execution.journal import (
    NodeEnded,
    NodeStarted,
    RunEnded,
    RunStarted,
    node_ends,
    read_journal,
)
from posttrain.execution.protocol import Request
from posttrain.execution.records import find_run, run_state


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_chain_is_built_and_then_reused(lab: Lab) -> None:
    first = lab.run(CHAIN)
    assert first.exit_code == ExitCode.OK
    assert [result.status for result in first.results.values()] == [NodeStatus.COMPLETED] * 2
    assert lab.text(first, "more") == "ab"
    again = lab.run(CHAIN)
    assert again.exit_code == ExitCode.OK
    assert [result.status for result in again.results.values()] == [NodeStatus.CACHED] * 2
    assert {n: r.outputs for n, r in again.results.items()} == {
        n: r.outputs for n, r in first.results.items()
    }
    assert again.results["rows"].figures == {"length": 1.0}


def test_a_changed_option_reruns_the_stage_and_what_depends_on_it(lab: Lab) -> None:
    lab.run(CHAIN)
    changed = {**CHAIN, "more": {**CHAIN["more"], "with": {"text": "c"}}}
    report = lab.run(changed)
    assert report.results["rows"].status == NodeStatus.CACHED
    assert report.results["more"].status == NodeStatus.COMPLETED


def test_the_record_of_a_run_is_complete(lab: Lab) -> None:
    report = lab.run(CHAIN)
    record = find_run(lab.workspace)
    kinds = [type(entry) for entry in read_journal(record.directory)]
    assert kinds == [RunStarted, NodeStarted, NodeEnded, NodeStarted, NodeEnded, RunEnded]
    end = node_ends(record.directory)["more"]
    assert end.inputs == {"data": [report.results["rows"].outputs["data"]]}
    store = Store(lab.workspace)
    kept = store.lookup(end.key or "")
    assert kept is not None and kept.outputs == end.outputs
    provenance = store.provenance(end.outputs["data"])
    assert provenance is not None
    assert (provenance.node, provenance.run) == ("more", record.run)
    assert provenance.parents == {"data": (report.results["rows"].outputs["data"],)}
    assert set(kept.versions) >= {"python"} and kept.threads == 1 and kept.device is not None
    assert not list((lab.workspace / "work").iterdir())
    assert [path for path in store.tmp.iterdir() if path.suffix != ".lock"] == []
    request = Request.model_validate_json((lab.attempt("more") / "request.json").read_bytes())
    assert request.inputs == end.inputs and request.device == "cpu"


def test_a_failure_skips_what_depends_on_it_and_nothing_else(lab: Lab) -> None:
    pipeline = {
        **failing("raise"),
        "after": {"uses": "test/copy", "inputs": {"data": "bad"}},
        "later": {"uses": "test/copy", "inputs": {"data": "after"}},
        "apart": {"uses": "test/copy", "inputs": {"data": "rows"}},
    }
    report = lab.run(pipeline)
    statuses = {name: str(result.status) for name, result in report.results.items()}
    assert statuses == {
        "rows": "completed", "bad": "failed", "after": "skipped", "later": "skipped", "apart": "completed",
    }  # fmt: skip
    assert report.results["after"].summary == "needs bad (failed)"
    assert report.status == "failed" and report.exit_code == ExitCode.FAILED
    assert run_state(find_run(lab.workspace)).status == "failed"


def test_an_exception_is_shown_with_the_plugins_line_and_kept_with_its_traceback(lab: Lab) -> None:
    error = lab.run(failing("raise")).results["bad"].error
    assert error is not None
    assert error["message"] == "KeyError: 'no such column'"
    assert "helpers/fake_stages.py:" in error["where"]
    assert "about to fail by raise" in error["log"] and "Traceback" not in error["log"]
    log = (lab.attempt("bad") / "output.log").read_text()
    assert "Traceback" in log and "no such column" in log


def test_a_posttrain_error_keeps_its_parts(lab: Lab) -> None:
    error = lab.run(failing("refuse")).results["bad"].error
    assert error is not None
    expected = {
        "type": "DataError", "message": "this row is bad", "where": "rows.jsonl:3", "found": "nothing",
        "expected": "text", "fix": "mend it",
    }  # fmt: skip
    assert {name: error[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("vanish", "the worker exited with code 0"),
        ("exit", "SystemExit: 7"),
        ("nothing", "test/fail did not write to its output port 'data'"),
        ("undescribed", "test/fail did not describe its output port 'data'"),
        ("wrong_kind", "output port 'data' was given the wrong kind of artifact"),
        ("no_outcome", "the target of test/fail did not return an Outcome"),
        ("full_disk", "could not write: the disk is full"),
        ("steal", "this stage asked for a secret that its options do not declare"),
    ],
)
def test_what_is_no_success_fails_and_says_why(lab: Lab, how: str, message: str) -> None:
    report = lab.run(failing(how))
    assert report.results["bad"].status == NodeStatus.FAILED
    error = report.results["bad"].error
    assert error is not None and error["message"] == message
    assert [path for path in (lab.workspace / "store" / "tmp").iterdir() if path.suffix != ".lock"] == []


def test_exit_0_without_a_result_is_told_as_such(lab: Lab) -> None:
    error = lab.run(failing("vanish")).results["bad"].error
    assert error is not None and error["found"] == "no result.json"


def test_a_failed_node_is_tried_again_and_not_taken_from_the_cache(lab: Lab) -> None:
    lab.run(failing("raise"))
    report = lab.resume(failing("raise"))
    assert report.results["rows"].status == NodeStatus.CACHED
    assert report.results["bad"].status == NodeStatus.FAILED
    assert lab.attempt("bad", 2).is_dir()


@pytest.mark.parametrize(("steps", "word"), [(0, "0 steps"), (None, "no step count")])
def test_a_trainer_that_advanced_no_step_failed(lab: Lab, steps: int | None, word: str) -> None:
    pipeline = {
        "rows": {"uses": "test/write"},
        "sft": {"uses": "test/train", "inputs": {"data": "rows"}, "with": {"steps": steps}},
    }
    report = lab.run(pipeline)
    error = report.results["sft"].error
    assert error is not None and (error["message"], error["found"]) == (
        "test/train advanced no step, so it trained nothing", word,
    )  # fmt: skip
    pipeline["sft"]["with"] = {"steps": 3}
    assert lab.run(pipeline).exit_code == ExitCode.OK


def test_numbers_that_are_not_finite_are_left_out_and_told_once(lab: Lab) -> None:
    report = lab.run(failing("infinite"))
    assert report.results["bad"].figures == {"rate": 0.5}
    assert lab.notes("bad") == ["loss is not finite at step 0 (nan); left out"]
    metrics = [event for event in lab.events if event["type"] == "metrics"]
    assert [(event["step"], event["values"]) for event in metrics] == [(0, {"rate": 0.5}), (1, {"rate": 0.5})]
    assert node_ends(find_run(lab.workspace).directory)["bad"].figures == {"rate": 0.5}


@pytest.mark.parametrize(
    ("verdict", "code"), [("rejected", ExitCode.REJECTED), ("inconclusive", ExitCode.INCONCLUSIVE)]
)
def test_a_gates_no_is_no_failure_and_stays_no_when_cached(lab: Lab, verdict: str, code: ExitCode) -> None:
    pipeline = {
        "rows": {"uses": "test/write"},
        "gate": {"uses": "test/gate", "inputs": {"data": "rows"}, "with": {"verdict": verdict}},
        "promoted": {"uses": "test/copy", "inputs": {"data": "rows"}, "needs": ["gate"]},
    }
    for report in (lab.run(pipeline), lab.run(pipeline)):
        assert report.exit_code == code and report.status == verdict
        assert report.results["gate"].status == verdict
        assert report.results["gate"].figures == {"margin": 0.25}
        assert report.results["promoted"].summary == f"needs gate ({verdict})"
    assert sum(event["type"] == "node-started" and event["node"] == "gate" for event in lab.events) == 1
