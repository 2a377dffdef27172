"""What a run takes from the store, builds again or refuses, and what several nodes, runs and observers do at once."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.lab import PLUGIN, Concurrent, Lab, child_command
from helpers.small_pipelines import CHAIN, failing

from posttrain.artifacts.store import Store
from posttrain.contracts.runner import Execution, NodeResult, NodeStatus
from posttrain.errors import ExitCode, PluginError, SpecError, StageError, StoreError
from posttrain.execution.journal import (
    RunNote,
    RunStarted,
    read_journal,
)
from posttrain.execution.records import find_run, list_runs, require_resumable, run_state
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import execute
from posttrain.registry.discovery import discover


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_what_does_not_fit_is_refused_before_launch(lab: Lab) -> None:
    pipeline = {"rows": {"uses": "test/write"}, "next": {"uses": "test/picky", "inputs": {"data": "rows"}}}
    report = lab.run(pipeline)
    error = report.results["next"].error
    assert error is not None
    assert (error["type"], error["message"], error["where"], error["fix"]) == (
        "HandoffError", "picky: these rows do not fit", "next.data", "take others",
    )  # fmt: skip
    assert not find_run(lab.workspace).stage("next").exists()
    pipeline["next"]["with"] = {"level": "warning"}
    assert lab.run(pipeline).results["next"].status == NodeStatus.COMPLETED
    assert lab.notes() == ["next: picky: these rows do not fit"]
    lab.run(pipeline)
    assert len(lab.notes()) == 1, "a stage that is reused is not judged again"


def test_a_damaged_artifact_is_noticed_and_built_again(lab: Lab) -> None:
    first = lab.run(CHAIN)
    digest = first.results["rows"].outputs["data"]
    file = lab.workspace / "store" / "objects" / digest / "rows.jsonl"
    file.chmod(0o644)
    file.write_text("!")
    again = lab.run(CHAIN)
    assert again.results["rows"].status == NodeStatus.COMPLETED
    assert again.results["rows"].outputs["data"] == digest
    assert again.results["more"].status == NodeStatus.CACHED
    (note,) = lab.notes()
    assert note.startswith("rows: output `data`:") and note.endswith("building it again")
    assert Store(lab.workspace).verify(digest, full=True) == []


def test_a_moving_source_is_never_cached_but_kept_within_its_run(lab: Lab) -> None:
    pipeline = {
        "rows": {"uses": "test/moving"},
        "bad": {"uses": "test/fail", "inputs": {"data": "rows"}},
    }
    assert lab.run(pipeline).results["rows"].status == NodeStatus.COMPLETED
    assert lab.run(pipeline).results["rows"].status == NodeStatus.COMPLETED
    assert lab.resume(pipeline).results["rows"].status == NodeStatus.CACHED


def test_an_external_effect_that_is_gone_is_made_again(lab: Lab) -> None:
    pipeline = {"out": {"uses": "test/external"}}
    assert lab.run(pipeline).results["out"].status == NodeStatus.COMPLETED
    assert lab.run(pipeline).results["out"].status == NodeStatus.CACHED
    (lab.workspace / "effect").unlink()
    assert lab.run(pipeline).results["out"].status == NodeStatus.COMPLETED
    assert lab.notes() == ["out: its effect is gone; running it again"]


def test_a_full_disk_at_commit_fails_the_node_clearly(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Store, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "objects")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_place", full)
        report = lab.run(CHAIN)
    error = report.results["rows"].error
    assert error is not None
    assert (error["type"], error["message"]) == (
        "StoreError",
        "could not commit an artifact: the disk is full",
    )
    assert "gc" in error["fix"] and "bytes free" in error["found"]
    assert report.results["more"].status == NodeStatus.SKIPPED
    assert lab.resume(CHAIN).exit_code == ExitCode.OK


def test_a_node_that_asks_for_too_much_fails_without_waiting(lab: Lab) -> None:
    report = lab.run({"rows": {"uses": "test/write", "resources": {"gpus": 1}}})
    error = report.results["rows"].error
    assert error is not None
    assert (error["found"], error["expected"]) == ("1", "at most 0")


def test_nodes_run_at_the_same_time_when_the_runner_says_so(lab: Lab) -> None:
    pipeline = {"rows": {"uses": "test/write"}} | {
        f"copy{n}": {"uses": "test/copy", "inputs": {"data": "rows"}, "with": {"text": str(n)}}
        for n in range(3)
    }
    report = lab.run(pipeline, runner=Concurrent())
    assert report.exit_code == ExitCode.OK
    assert sorted(lab.text(report, f"copy{n}") for n in range(3)) == ["sea0", "sea1", "sea2"]


def test_two_nodes_with_one_key_build_once(lab: Lab) -> None:
    pipeline = {name: {"uses": "test/write", "with": {"text": "same"}} for name in ("one", "two")}
    report = lab.run(pipeline, runner=Concurrent())
    assert sorted(result.status for result in report.results.values()) == ["cached", "completed"]
    assert report.results["one"].outputs == report.results["two"].outputs


class Lazy:
    """A runner that forgets the last node."""

    def run(self, execution: Execution) -> dict[str, NodeResult]:
        return {node: execution.perform(node) for node in execution.order[:-1]}


class Backwards:
    """A runner that ignores dependencies."""

    def run(self, execution: Execution) -> dict[str, NodeResult]:
        return {node: execution.perform(node) for node in reversed(execution.order)}


@pytest.mark.parametrize(
    ("runner", "message"), [(Lazy(), "without performing"), (Backwards(), "before what it")]
)
def test_a_runner_that_breaks_its_contract_fails_the_run(lab: Lab, runner: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        lab.run(CHAIN, runner=runner)
    assert run_state(find_run(lab.workspace)).status == "failed"


def test_states_of_runs_and_what_can_be_resumed(lab: Lab) -> None:
    lab.run(CHAIN)
    lab.run(failing("raise"))
    done, failed = list_runs(lab.workspace)
    assert run_state(done).nodes["more"].status == NodeStatus.COMPLETED
    with pytest.raises(StoreError, match="there is nothing to do"):
        require_resumable(done)
    assert require_resumable(failed).nodes["bad"].attempts == 1
    assert find_run(lab.workspace, failed.run[-4:]) == failed
    with pytest.raises(SpecError, match="there is no such run"):
        find_run(lab.workspace, "nothing")
    lab.resume(failing("raise"))
    assert run_state(failed).resumed == 1
    with failed.claimed():
        assert run_state(failed).status == "failed"
        with pytest.raises(StoreError, match="is running already"), failed.claimed():
            pass


def test_a_run_that_is_resumed_forgets_how_its_nodes_ended(lab: Lab) -> None:
    lab.run(failing("raise"))
    (record,) = list_runs(lab.workspace)
    ended = {name: state.status for name, state in run_state(record).nodes.items()}
    assert ended == {"rows": NodeStatus.COMPLETED, "bad": NodeStatus.FAILED}
    with record.claimed():
        beginning = RunStarted(run=record.run, pipeline="p", spec_digest="s", runner="r", pid=1, resumed=True)
        record.journal.append(beginning)
        states = {name: state.status for name, state in run_state(record).nodes.items()}
    assert states == {"rows": NodeStatus.COMPLETED, "bad": NodeStatus.PENDING}


def test_two_processes_build_each_output_once(lab: Lab) -> None:
    pipeline = {
        "rows": {"uses": "test/write"},
        "slow": {"uses": "test/slow", "inputs": {"data": "rows"}, "with": {"steps": 10}},
    }
    processes = [
        subprocess.Popen(child_command(lab, pipeline), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    ended = [(process.communicate(timeout=60), process.returncode) for process in processes]
    assert [code for _, code in ended] == [0, 0], ended
    results = [json.loads(out) for (out, _), _ in ended]
    assert sorted(result["slow"][0] for result in results) == ["cached", "completed"]
    assert results[0]["slow"][1] == results[1]["slow"][1]


@pytest.mark.parametrize("node", ["a/b=1", "..", "x" * 300])
def test_any_node_name_gets_a_directory_of_its_own(lab: Lab, node: str) -> None:
    lab.run({"rows": {"uses": "test/write"}})
    record = find_run(lab.workspace)
    assert record.stage(node).parent == record.directory / "stages"
    assert len(record.stage(node).name) < 200
    assert record.stage(node) != record.stage(node.replace("/", "_") + "_")


def test_a_worker_with_other_plugins_than_the_key_was_made_for_refuses(lab: Lab, tmp_path: Path) -> None:
    plugin = tmp_path / "stages.py"
    plugin.write_bytes(PLUGIN.read_bytes())
    run = lab.prepare(CHAIN, plugins=[plugin], catalogue=discover([plugin], installed=False))
    plugin.write_text(plugin.read_text() + "\n# edited while the run was going on\n")
    report = execute(run, SequentialRunner(), pipeline="test", runner_name="sequential")
    error = report.results["rows"].error
    assert error is not None
    assert error["message"] == "the plugins of test/write are not those that the run was started with"
    assert "file" in error["found"]


def test_a_source_that_changes_while_it_is_read_gives_no_artifact(lab: Lab) -> None:
    source = lab.base / "rows.txt"
    source.write_text("first")
    age(source)
    pipeline: dict[str, Any] = {"rows": {"uses": "test/read", "with": {"path": "rows.txt", "then": "second"}}}
    error = lab.run(pipeline).results["rows"].error
    assert error is not None
    assert (error["type"], error["message"], error["where"]) == (
        "DataError", "this source changed while it was read", "rows.with.path",
    )  # fmt: skip
    store = Store(lab.workspace)
    assert list(store.digests()) == [] and list(store.records()) == []
    assert not list(store.tmp.iterdir()) and not list(store.works.iterdir())
    source.write_text("first")
    pipeline["rows"]["with"]["then"] = None
    report = lab.run(pipeline)
    assert report.results["rows"].status == NodeStatus.COMPLETED
    assert lab.text(report, "rows") == "first"


def age(path: Path) -> None:
    os.utime(path, (1_000_000_000, 1_000_000_000))


@pytest.mark.parametrize("moment", ["node-started", "metrics", "node-ended"])
def test_an_observer_that_fails_fails_no_stage_and_is_noted_once(lab: Lab, moment: str) -> None:
    seen: list[str] = []

    def observer(event: dict[str, Any]) -> None:
        seen.append(event["type"])
        if event["type"] == moment:
            raise BrokenPipeError("nobody reads")

    pipeline: dict[str, Any] = {
        "rows": {"uses": "test/write"},
        "slow": {"uses": "test/slow", "inputs": {"data": "rows"}, "with": {"steps": 2}},
    }
    assert lab.run(pipeline, observer=observer).exit_code == ExitCode.OK
    assert seen[-1] == moment and seen.count(moment) == 1
    notes = [e.message for e in read_journal(find_run(lab.workspace).directory) if isinstance(e, RunNote)]
    assert notes == ["the observer failed and is told nothing more (BrokenPipeError: nobody reads)"]


class Broken:
    """A runner of somebody else's that fails half-way."""

    def run(self, execution: Execution) -> dict[str, NodeResult]:
        execution.perform("rows")
        raise ConnectionError("the server is gone")


def test_a_runner_that_fails_is_named(lab: Lab) -> None:
    with pytest.raises(PluginError, match="the runner 'sequential' failed") as caught:
        lab.run(CHAIN, runner=Broken())
    assert caught.value.found == "ConnectionError: the server is gone"
    state = run_state(find_run(lab.workspace))
    assert state.status == "failed" and state.nodes["rows"].status == NodeStatus.COMPLETED
