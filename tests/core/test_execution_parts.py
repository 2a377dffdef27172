"""The parts of execution one by one: inline runs, resources, judgement of attempts, the worker by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from helpers.lab import Lab, eventually, gone

from posttrain.contracts.runner import NodeStatus
from posttrain.errors import ExitCode, Interrupted, SpecError
from posttrain.execution import processes
from posttrain.execution.attempt import Attempt, AttemptFailed, judge, log_tail
from posttrain.execution.blame import explain
from posttrain.execution.journal import node_ends
from posttrain.execution.protocol import Result
from posttrain.execution.records import find_run, run_state
from posttrain.execution.resources import Demand, Pool
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import execute, grace_seconds, overall
from posttrain.execution.signals import Stop, describe_exit
from posttrain.execution.worker import UNSTORED
from posttrain.planning.capacity import Machine
from posttrain.planning.spec import Resources
from posttrain.registry.isolation import isolated, undisturbed

CHAIN = {"rows": {"uses": "test/write"}, "more": {"uses": "test/copy", "inputs": {"data": "rows"}}}
BAD = {"rows": {"uses": "test/write"}, "bad": {"uses": "test/fail", "inputs": {"data": "rows"}}}


def test_inline_runs_in_this_process_and_gives_the_same_artifacts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    inline, process = Lab(tmp_path, "inline"), Lab(tmp_path / "other", "process")
    before = dict(os.environ)
    here, there = inline.run(CHAIN), process.run(CHAIN)
    assert {n: r.outputs for n, r in here.results.items()} == {n: r.outputs for n, r in there.results.items()}
    assert inline.notes("rows") == process.notes("rows")
    assert dict(os.environ) == before


def test_inline_lets_an_exception_through_to_the_debugger(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "inline")
    with pytest.raises(KeyError, match="no such column"):
        lab.run(BAD, debug=True)
    record = find_run(lab.workspace)
    assert not record.live and run_state(record).nodes["bad"].status == NodeStatus.FAILED
    assert lab.run(BAD).results["bad"].status == NodeStatus.FAILED


def test_a_worker_can_be_run_by_hand(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.run(BAD)
    attempt = lab.attempt("bad")
    (attempt / "result.json").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.execution", str(attempt / "request.json")],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == ExitCode.FAILED
    assert "no such column" in done.stderr
    assert json.loads((attempt / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(("arguments", "code"), [([], ExitCode.INVALID), (["nowhere.json"], 1)])
def test_a_worker_without_a_request_says_so(tmp_path: Path, arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.execution", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == code
    assert "usage" in done.stderr or "this request cannot be read" in done.stderr


MACHINE = Machine(4, ("0", "1"), 2**30)


@pytest.mark.parametrize(
    ("resources", "heavy", "expected"),
    [
        ({}, True, Demand(4, 0, 0)),
        ({}, False, Demand(1, 0, 0)),
        ({"cpus": 3}, False, Demand(3, 0, 0)),
        ({"gpus": 1}, True, Demand(2, 1, 0)),
        ({"memory": "2MiB"}, False, Demand(1, 0, 2**21)),
    ],
)
def test_what_a_node_asks_for(resources: dict[str, object], heavy: bool, expected: Demand) -> None:
    assert Demand.of(Resources.model_validate(resources), MACHINE, heavy=heavy) == expected


def test_gpus_are_handed_out_once_and_taken_back() -> None:
    pool = Pool(MACHINE)
    one = Demand(1, 1, 0)
    with pool.granted("a", one, lambda: False) as first, pool.granted("b", one, lambda: False) as second:
        assert {first.gpus, second.gpus} == {("0",), ("1",)}
    with pool.granted("c", Demand(4, 2, 2**30), lambda: False) as third:
        assert third.gpus == ("0", "1")


def test_a_node_waits_for_what_another_holds() -> None:
    pool = Pool(MACHINE)
    order: list[str] = []

    def late() -> None:
        with pool.granted("late", Demand(3, 0, 0), lambda: False):
            order.append("late")

    with ExitStack() as stack:
        stack.enter_context(pool.granted("early", Demand(2, 0, 0), lambda: False))
        thread = threading.Thread(target=late)
        thread.start()
        with pool.granted("small", Demand(2, 0, 0), lambda: False):
            order.append("small")
    thread.join(timeout=30)
    assert order == ["small", "late"]


def test_waiting_for_resources_ends_when_the_run_stops() -> None:
    pool = Pool(MACHINE)
    with (
        pool.granted("all", Demand(4, 0, 0), lambda: False),
        pytest.raises(Interrupted),
        pool.granted("more", Demand(1, 0, 0), lambda: True),
    ):
        pass


def written(tmp_path: Path, result: Result | str | None) -> Attempt:
    attempt = Attempt.next(tmp_path / "stage")
    if isinstance(result, Result):
        attempt.result.write_text(result.model_dump_json())
    elif result is not None:
        attempt.result.write_text(result)
    attempt.log.write_text("\n".join(f"line {n}" for n in range(40)))
    return attempt


@pytest.mark.parametrize(
    ("result", "code", "message"),
    [
        (
            Result(status="ok"),
            -signal.SIGSEGV,
            "the worker was killed by SIGSEGV after it had written its result",
        ),
        (Result(status="ok"), 3, "the worker exited with code 3 after it had written its result"),
        (None, 1, "the worker exited with code 1"),
        ('{"status": "o', 0, "the worker exited with code 0"),
        (Result(status="failed", error={"message": "bad"}), 0, "bad"),
    ],
)
def test_only_exit_0_with_a_valid_result_counts(
    tmp_path: Path, result: Result | str | None, code: int, message: str
) -> None:
    attempt = written(tmp_path, result)
    with pytest.raises(AttemptFailed) as caught:
        judge(attempt, code, frozenset(), Stop())
    assert caught.value.error["message"] == message
    assert caught.value.error["log"].splitlines() == [f"line {n}" for n in range(20, 40)]
    assert log_tail(tmp_path / "absent") == ""


def test_the_log_of_a_failure_lacks_the_traceback_that_its_error_tells(tmp_path: Path) -> None:
    raised = "".join(f"  File {n}, in é\n" for n in range(2000)) + "mine.Odd: p.yaml: bad\n  fix: mend it\n"
    error = {"type": "Odd", "message": "bad", "fix": "mend it"}
    attempt = written(tmp_path, Result(status="failed", error=error, traceback=raised))
    with attempt.log.open("a", encoding="utf-8") as log:
        log.write(f"\n{raised}at exit\n")
    with pytest.raises(AttemptFailed) as caught:
        judge(attempt, 1, frozenset(), Stop())
    expected = [*(f"line {n}" for n in range(21, 40)), "at exit"]
    assert caught.value.error == {**error, "log": "\n".join(expected)}


def test_an_error_names_what_it_was_raised_from(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("no model") from OSError("no such file\n  looked everywhere")
    assert (
        explain(caught.value, [], tmp_path)["message"]
        == "RuntimeError: no model (from OSError: no such file)"
    )


def test_a_worker_without_room_for_its_result_is_told_as_a_full_disk(tmp_path: Path) -> None:
    attempt = written(tmp_path, None)
    with pytest.raises(AttemptFailed, match="the disk is full") as caught:
        judge(attempt, UNSTORED, frozenset(), Stop())
    assert caught.value.error["type"] == "StoreError"
    assert caught.value.error["where"] == str(attempt.result)
    assert "posttrain store gc" in caught.value.error["fix"]


def test_a_result_must_have_every_output(tmp_path: Path) -> None:
    with pytest.raises(AttemptFailed, match="lacks outputs"):
        judge(written(tmp_path, Result(status="ok")), 0, frozenset({"data"}), Stop())


def test_a_death_while_stopping_is_an_interruption(tmp_path: Path) -> None:
    stop = Stop()
    stop.ask()
    with pytest.raises(Interrupted, match="SIGTERM"):
        judge(written(tmp_path, None), -signal.SIGTERM, frozenset(), stop)
    with pytest.raises(AttemptFailed, match="bad"):
        judge(written(tmp_path, Result(status="failed", error={"message": "bad"})), 1, frozenset(), stop)


def test_the_worst_node_decides_how_a_run_ended() -> None:
    order = [
        NodeStatus.CACHED,
        NodeStatus.INCONCLUSIVE,
        NodeStatus.REJECTED,
        NodeStatus.INTERRUPTED,
        NodeStatus.FAILED,
    ]
    ends = [overall(order[: n + 1]) for n in range(len(order))]
    assert ends == ["completed", "inconclusive", "rejected", "interrupted", "failed"]


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-15) == "was killed by SIGTERM"
    assert "out of memory" in describe_exit(-9)
    assert describe_exit(-250) == "was killed by signal 250"


@pytest.mark.parametrize(("text", "seconds"), [(None, 60.0), ("5", 5.0), ("0", 0.0)])
def test_the_grace_is_read(text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_GRACE_SECONDS", raising=False)
    if text is not None:
        monkeypatch.setenv("POSTTRAIN_GRACE_SECONDS", text)
    assert grace_seconds() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_grace_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_GRACE_SECONDS", text)
    with pytest.raises(SpecError):
        grace_seconds()


def test_events_are_forwarded_while_the_stage_still_runs(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    pipeline = {
        "rows": {"uses": "test/write"},
        "slow": {"uses": "test/slow", "inputs": {"data": "rows"}, "with": {"steps": 3000}},
    }
    run = lab.prepare(pipeline)

    def seen() -> bool:
        return any(event["type"] == "metrics" and event["node"] == "slow" for event in lab.events)

    thread = threading.Thread(
        target=lambda: execute(run, SequentialRunner(), pipeline="t", runner_name="sequential")
    )
    thread.start()
    eventually(seen)
    run.stop.ask()
    thread.join(timeout=60)
    ends = node_ends(find_run(lab.workspace).directory)
    assert ends["slow"].status == NodeStatus.INTERRUPTED


class FakeTorch(ModuleType):
    """Knows how many threads it would use."""

    number = 64

    def get_num_threads(self) -> int:
        return self.number

    def set_num_threads(self, number: int) -> None:
        self.number = number


def test_inline_stages_use_the_threads_they_were_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = FakeTorch("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    lab = Lab(tmp_path, "inline")
    report = lab.run({"one": {"uses": "test/threads", "resources": {"cpus": 1}}})
    assert report.exit_code == ExitCode.OK, report.results["one"].error
    assert lab.notes("one") == ["uses 1 threads"]
    assert torch.number == 64


def test_a_second_interrupt_ends_an_inline_stage(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "inline")
    with pytest.raises(KeyboardInterrupt):
        lab.run({"one": {"uses": "test/forever"}})
    state = run_state(find_run(lab.workspace))
    assert (state.status, state.nodes["one"].status) == ("interrupted", NodeStatus.INTERRUPTED)
    assert not list((lab.workspace / "store" / "tmp").iterdir())


def test_a_process_is_known_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    started = processes.start_time(child.pid)
    assert started is not None and processes.start_time(os.getpid()) != started
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert processes.alive(child.pid, started) and not processes.alive(os.getpid(), started)
    assert float(json.loads(json.dumps(started))) == started
    monkeypatch.setattr(processes, "_boot", lambda: 1)
    assert not processes.alive(child.pid, started), "the same ticks after another boot"
    monkeypatch.undo()
    processes.terminate(child.pid, started)
    assert not processes.alive(child.pid, started) and not processes.group_alive(child.pid)
    child.wait()


def test_terminating_ends_what_the_leader_left_behind() -> None:
    source = "trap '' TERM; sleep 300"
    child = subprocess.Popen(["sh", "-c", f'(sh -c "{source}") & exec sleep 300'], start_new_session=True)
    eventually(lambda: len(psutil.Process(child.pid).children(recursive=True)) >= 2)
    members = psutil.Process(child.pid).children(recursive=True)
    started = processes.start_time(child.pid)
    assert started is not None
    processes.terminate(child.pid, started, patience=0.5)
    assert all(gone(member.pid) for member in members)
    child.wait()


def test_a_group_outlives_its_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(
        ["sh", "-c", "sleep 300 & read line"], stdin=subprocess.PIPE, start_new_session=True
    )
    eventually(lambda: psutil.Process(child.pid).children())
    started = processes.start_time(child.pid)
    assert started is not None and processes.group_alive(child.pid, started)
    assert not processes.group_alive(child.pid, started + 1), "another process has its number"
    child.communicate(b"go on\n")
    assert not processes.alive(child.pid, started) and processes.group_alive(child.pid, started)
    with monkeypatch.context() as rebooted:
        rebooted.setattr(processes, "_boot", lambda: 1)
        assert not processes.group_alive(child.pid, started), "a group without a leader, after another boot"
    processes.terminate(child.pid, started, patience=30)
    assert not processes.group_alive(child.pid, started)


def test_standard_output_is_left_alone_in_threads_and_during_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def speak() -> None:
        isolated("speaking", "nothing", lambda: print("words"))

    speak()
    assert capsys.readouterr().out == ""
    thread = threading.Thread(target=speak)
    thread.start()
    thread.join()
    with undisturbed():
        speak()
    assert capsys.readouterr().out == "words\nwords\n"
    speak()
    assert capsys.readouterr().out == ""
