"""Signals and sudden deaths: nothing is lost, nothing is left running, and the record tells what happened."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.lab import Lab, child_command, eventually, gone, marked

from posttrain.contracts.runner import NodeStatus
from posttrain.errors import ExitCode, StoreError
from posttrain.execution.journal import Journal, RunNote, RunStarted, read_journal
from posttrain.execution.records import find_run, list_runs, require_resumable, run_state

pytestmark = pytest.mark.slow

LAUNCHERS = ["process", "auto"]
STEPS = 12


def slow(tmp_path: Path, launcher: str, **options: Any) -> dict[str, Any]:
    uses = {"process": "test/slow", "auto": "test/slow.forked"}[launcher]
    options = {"steps": STEPS, "marker": str(tmp_path / "marker"), **options}
    return {
        "rows": {"uses": "test/write"},
        "slow": {"uses": uses, "inputs": {"data": "rows"}, "with": options},
        "last": {"uses": "test/copy", "inputs": {"data": "slow"}},
    }


def begun(lab: Lab, at_least: int = 3) -> tuple[int, int, int]:
    """Wait until the slow stage has made some checkpoints."""
    found: tuple[int, int, int] = eventually(lambda: marked(lab.base / "marker"))
    eventually(lambda: any(int(file.read_text()) >= at_least for file in lab.workspace.glob("work/*/step")))
    return found


def start(lab: Lab, pipeline: dict[str, Any], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        child_command(lab, pipeline, **options), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def undisturbed(tmp_path: Path, launcher: str) -> dict[str, Any]:
    """The outputs of the same pipeline when nothing happens to it."""
    (tmp_path / "calm").mkdir()
    report = Lab(tmp_path / "calm", launcher).run(slow(tmp_path / "calm", launcher, pause=0.0))
    return {name: result.outputs for name, result in report.results.items()}


def test_a_worker_that_is_killed_is_named_and_leaves_no_orphan(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    report = lab.run(
        {
            "rows": {"uses": "test/write"},
            "bad": {"uses": "test/fail", "inputs": {"data": "rows"}, "with": {"how": "kill"}},
        }
    )
    error = report.results["bad"].error
    assert error is not None
    assert error["message"] == "the worker was killed by SIGKILL; perhaps the machine ran out of memory"
    grandchild = int(error["log"].split("grandchild ")[1])
    eventually(lambda: gone(grandchild))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_when_the_parent_is_killed_its_workers_die_and_resume_goes_on(tmp_path: Path, launcher: str) -> None:
    lab = Lab(tmp_path, launcher)
    pipeline = slow(tmp_path, launcher, pause=0.2)
    parent = start(lab, pipeline)
    worker, grandchild, _ = begun(lab)
    parent.kill()
    parent.communicate()
    eventually(lambda: gone(worker) and gone(grandchild))
    state = run_state(find_run(lab.workspace))
    assert (state.status, state.pid) == ("killed", parent.pid)
    assert state.nodes["slow"].status == NodeStatus.INTERRUPTED
    (tmp_path / "marker").unlink()
    report = lab.resume(slow(tmp_path, launcher, pause=0.0))
    assert report.exit_code == ExitCode.OK
    assert report.results["rows"].status == NodeStatus.CACHED
    assert report.results["slow"].figures["resumed_from"] >= 3
    assert {n: r.outputs for n, r in report.results.items()} == undisturbed(tmp_path, launcher)
    assert lab.attempt("slow", 2).is_dir()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_stage_checkpoint(tmp_path: Path, launcher: str, number: signal.Signals) -> None:
    lab = Lab(tmp_path, launcher)
    parent = start(lab, slow(tmp_path, launcher, pause=0.2))
    worker, grandchild, _ = begun(lab)
    parent.send_signal(number)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == ExitCode.INTERRUPTED, err
    assert gone(worker) and gone(grandchild)
    state = run_state(find_run(lab.workspace))
    assert state.status == "interrupted"
    assert {name: str(node.status) for name, node in state.nodes.items()} == {
        "rows": "completed", "slow": "interrupted", "last": "interrupted",
    }  # fmt: skip
    report = lab.resume(slow(tmp_path, launcher, pause=0.0))
    assert report.exit_code == ExitCode.OK
    assert report.results["slow"].figures["resumed_from"] >= 3
    assert {n: r.outputs for n, r in report.results.items()} == undisturbed(tmp_path, launcher)
    starts = [
        entry for entry in read_journal(find_run(lab.workspace).directory) if isinstance(entry, RunStarted)
    ]
    assert [entry.resumed for entry in starts] == [False, True]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stage_that_does_not_stop_is_killed_after_the_grace(tmp_path: Path, launcher: str) -> None:
    lab = Lab(tmp_path, launcher)
    parent = start(lab, slow(tmp_path, launcher, steps=3000, stubborn=True), grace=0.1)
    worker, grandchild, _ = begun(lab)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=60)
    assert parent.returncode == ExitCode.INTERRUPTED
    eventually(lambda: gone(worker) and gone(grandchild))


def test_a_second_interrupt_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    parent = start(lab, slow(tmp_path, "process", steps=3000, stubborn=True), grace=3600)
    worker, _, _ = begun(lab)
    parent.send_signal(signal.SIGINT)
    journal = find_run(lab.workspace).directory / "journal.jsonl"
    eventually(lambda: "asked to checkpoint and stop" in journal.read_text())
    assert not gone(worker)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == ExitCode.INTERRUPTED
    eventually(lambda: gone(worker))


def test_a_stage_that_claims_to_be_interrupted_when_nobody_asked_failed(tmp_path: Path) -> None:
    report = Lab(tmp_path).run(
        {
            "rows": {"uses": "test/write"},
            "bad": {"uses": "test/fail", "inputs": {"data": "rows"}, "with": {"how": "interrupted"}},
        }
    )
    assert report.results["bad"].status == NodeStatus.FAILED


def test_a_stop_reaches_a_run_that_waits_for_another_process(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    pipeline = slow(tmp_path, "process", steps=3000)
    builder = start(lab, pipeline)
    worker, _, _ = begun(lab)
    waiter = start(lab, pipeline)
    eventually(
        lambda: any(
            "waits for another" in path.read_text() for path in lab.workspace.glob("runs/*/journal.jsonl")
        )
    )
    waiter.send_signal(signal.SIGTERM)
    waiter.communicate(timeout=60)
    assert waiter.returncode == ExitCode.INTERRUPTED
    assert not gone(worker)
    builder.kill()
    builder.communicate()
    eventually(lambda: gone(worker))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at threads through /proc")
def test_a_worker_holds_its_key_until_it_is_dead(tmp_path: Path) -> None:
    """A resumed run must not meet the worker of the killed one in the same work directory."""
    lab = Lab(tmp_path)
    parent = start(lab, slow(tmp_path, "process", steps=3000))
    worker, grandchild, _ = begun(lab)
    os.kill(worker, signal.SIGSTOP)
    eventually(
        lambda: all(") T " in file.read_text() for file in Path(f"/proc/{worker}/task").glob("*/stat"))
    )
    parent.kill()
    parent.communicate()
    done: list[Any] = []
    key_in_use = slow(tmp_path, "process", steps=3000, pause=0.0)
    thread = threading.Thread(target=lambda: done.append(lab.resume(key_in_use)))
    thread.start()
    eventually(lambda: any("waits for another" in note for note in lab.notes()))
    assert not done
    os.kill(worker, signal.SIGCONT)
    eventually(lambda: gone(worker) and gone(grandchild))
    thread.join(timeout=60)
    assert done and done[0].exit_code == ExitCode.OK


TORN = b'{"time": 1.0, "type": "node-ended", "node": "ro'


@pytest.mark.parametrize("tail", [TORN, b'{"type": "note", "message": "whole but for its end"}'])
def test_a_torn_line_is_cut_off_before_a_resume_writes(tmp_path: Path, tail: bytes) -> None:
    lab = Lab(tmp_path)
    chain = {"rows": {"uses": "test/write"}, "more": {"uses": "test/copy", "inputs": {"data": "rows"}}}
    lab.run(chain)
    record = find_run(lab.workspace)
    journal = record.directory / "journal.jsonl"
    begun, *_ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(begun + tail)
    assert run_state(record).status == "killed"
    assert lab.resume(chain).exit_code == ExitCode.OK
    assert run_state(record).status == "completed"
    assert journal.read_bytes().startswith(begun + b'{"time"')


@pytest.mark.parametrize("after", [0, 7])
def test_an_entry_that_cannot_be_written_whole_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    journal = Journal(tmp_path)
    journal.append(RunNote(message="first"))
    whole = journal.path.read_bytes()

    def full(descriptor: int) -> None:
        os.write(descriptor, b"x" * after)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="disk is full"):
            journal.append(RunNote(message="second"))
    assert journal.path.read_bytes() == whole
    journal.append(RunNote(message="third"))
    assert [entry.message for entry in read_journal(tmp_path) if isinstance(entry, RunNote)] == [
        "first", "third",
    ]  # fmt: skip


def test_a_damaged_run_shows_its_damage_and_hides_no_other(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for _ in range(2):
        lab.run({"rows": {"uses": "test/write"}})
    first, second = list_runs(lab.workspace)
    journal = first.directory / "journal.jsonl"
    begun, *rest = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(begun + TORN + b"".join(rest))
    damaged, whole = (run_state(record) for record in list_runs(lab.workspace))
    assert (damaged.status, damaged.pipeline, whole.status) == ("damaged", "test", "completed")
    assert damaged.damage is not None and damaged.damage.where == f"{journal}:2"
    with pytest.raises(StoreError, match="journal is damaged"):
        require_resumable(first)
    journal.write_bytes(b"")
    assert "no beginning" in str(run_state(first).damage)
    assert run_state(second).damage is None
