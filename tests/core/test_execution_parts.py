"""The parts of execution one by one: inline runs, resources, judgement of attempts, the worker by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.lab import Lab, eventually

from posttrain.contracts.runner import NodeStatus
from posttrain.errors import ExitCode, Interrupted, SpecError, StageError
from posttrain.execution.attempt import Attempt, AttemptFailed, judge, log_tail
from posttrain.execution.journal import node_ends
from posttrain.execution.protocol import Result
from posttrain.execution.records import find_run, run_state
from posttrain.execution.resources import Demand, Machine, Pool
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import execute, grace_seconds, overall
from posttrain.execution.signals import Stop, describe_exit
from posttrain.planning.spec import Resources

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


@pytest.mark.parametrize("demand", [Demand(5, 0, 0), Demand(1, 3, 0), Demand(1, 0, 2**31)])
def test_the_impossible_is_refused_at_once(demand: Demand) -> None:
    with (
        pytest.raises(StageError, match="than this machine has"),
        Pool(MACHINE).granted("x", demand, lambda: False),
    ):
        pass


@pytest.mark.parametrize(
    ("visible", "gpus"), [("", ()), ("0,3", ("0", "3")), ("GPU-1234, GPU-5678", ("GPU-1234", "GPU-5678"))]
)
def test_visible_gpus_are_respected(
    visible: str, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = Machine.here()
    assert machine.gpus == gpus and machine.cpus >= 1 and machine.memory > 2**20


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
