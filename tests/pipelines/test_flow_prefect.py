"""The Prefect runner against one real local server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from helpers.executions import FakeExecution

from posttrain.contracts.runner import NodeStatus
from posttrain_pipelines import services
from posttrain_pipelines.flow import runner as runner_module
from posttrain_pipelines.flow.runner import Ledger, PrefectRunner
from posttrain_pipelines.flow.server import ensure_server, token, token_file
from posttrain_pipelines.services import ServiceError, ServiceSpec, recorded, stop

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.xdist_group("flow")]

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("prefect") / ".posttrain"
    path.mkdir()
    yield path
    stop(path)


@pytest.fixture(autouse=True)
def no_configured_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def login(workspace: Path) -> str:
    return base64.b64encode(token(workspace).encode()).decode()


def ask(workspace: Path, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        recorded(workspace)["prefect"].url + path,
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Basic {login(workspace)}"},
    )
    with urllib.request.urlopen(request) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())
        return found


def flow_run(workspace: Path, run: str) -> dict[str, Any]:
    (found,) = ask(workspace, "/flow_runs/filter", {"flow_runs": {"name": {"any_": [run]}}})
    return found


def task_runs(workspace: Path, run: str, count: int) -> dict[str, dict[str, Any]]:
    """Return the task runs by node. They reach the database through events, a moment after the flow's end."""
    identity = flow_run(workspace, run)["id"]
    deadline = time.monotonic() + 60
    while True:
        found = ask(workspace, "/task_runs/filter", {"flow_runs": {"id": {"any_": [identity]}}})
        done = [task for task in found if task["state_type"] in ("COMPLETED", "FAILED", "CRASHED")]
        if len(done) >= count or time.monotonic() > deadline:
            return {task["name"]: task for task in found}
        time.sleep(0.1)


def perform(execution: FakeExecution) -> dict[str, str]:
    results = PrefectRunner().run(execution)
    assert sorted(execution.performed) == sorted(execution.order)
    return {node: result.status.value for node, result in results.items()}


def test_a_run_is_one_flow_with_a_task_for_each_node(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    execution = FakeExecution(workspace, "ok", DIAMOND, {"c": "cached"})
    statuses = perform(execution)
    assert statuses == {"a": "completed", "b": "completed", "c": "cached", "d": "completed"}
    assert execution.notes == []
    assert capfd.readouterr() == ("", "")
    flow = flow_run(workspace, "ok")
    assert (flow["state_type"], flow["state_name"]) == ("COMPLETED", "Completed")
    assert flow["parameters"] == {"run": "ok", "spec": "5" * 64}
    tasks = task_runs(workspace, "ok", 4)
    assert set(tasks) == {"a", "b", "c", "d"}
    assert tasks["c"]["state_name"] == "Cached"
    assert {tuple(sorted(task["task_inputs"])) for task in tasks.values()} == {
        ("node", "run", "spec"),
        ("node", "run", "spec", "wait_for"),
    }
    assert {task["cache_key"] for task in tasks.values()} == {None}
    assert {task["empirical_policy"]["retries"] for task in tasks.values()} == {0}
    storage = workspace / "prefect" / "storage"
    assert not storage.exists() or not list(storage.iterdir())


@pytest.mark.parametrize(
    ("run", "end", "flow_state", "task_state"),
    [
        ("failed", "failed", ("FAILED", "Failed"), ("FAILED", "Failed")),
        ("rejected", "rejected", ("COMPLETED", "Rejected"), ("COMPLETED", "Rejected")),
        ("unsure", "inconclusive", ("COMPLETED", "Inconclusive"), ("COMPLETED", "Inconclusive")),
        ("stopped", "interrupted", ("CANCELLED", "Interrupted"), ("FAILED", "Interrupted")),
    ],
)
def test_how_a_node_ends_is_how_the_flow_ends(
    workspace: Path, run: str, end: str, flow_state: tuple[str, str], task_state: tuple[str, str]
) -> None:
    statuses = perform(FakeExecution(workspace, run, DIAMOND, {"b": end}))
    assert statuses == {"a": "completed", "b": end, "c": "completed", "d": "skipped"}
    flow = flow_run(workspace, run)
    assert (flow["state_type"], flow["state_name"]) == flow_state
    tasks = task_runs(workspace, run, 4)
    assert (tasks["b"]["state_type"], tasks["b"]["state_name"]) == task_state
    assert (tasks["d"]["state_type"], tasks["d"]["state_name"]) == ("COMPLETED", "Skipped")


def test_independent_nodes_run_at_the_same_time(workspace: Path) -> None:
    meeting = threading.Barrier(2, timeout=60)
    perform(
        FakeExecution(workspace, "both", DIAMOND, act=lambda node: _meet(meeting) if node in "bc" else None)
    )


def _meet(meeting: threading.Barrier) -> None:
    meeting.wait()


def test_secrets_do_not_reach_the_server(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-77aa10")
    perform(FakeExecution(workspace, "secret", {"canary-77aa10": []}, {"canary-77aa10": "failed"}))
    flow = json.dumps(flow_run(workspace, "secret"))
    assert "failed: [redacted]" in flow
    assert "canary" not in flow


def test_what_the_execution_itself_raises_is_raised_and_the_flow_is_failed(workspace: Path) -> None:
    def break_off(node: str) -> None:
        if node == "b":
            raise ZeroDivisionError("a defect")

    execution = FakeExecution(workspace, "defect", {"a": [], "b": ["a"], "d": ["b"]}, act=break_off)
    with pytest.raises(ZeroDivisionError):
        PrefectRunner().run(execution)
    assert execution.performed == ["a", "b"]
    assert flow_run(workspace, "defect")["state_type"] == "FAILED"


def test_the_server_is_reused_and_nothing_is_written_at_home(workspace: Path, tmp_path: Path) -> None:
    before = ensure_server(workspace)
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from helpers.executions import FakeExecution
from posttrain_pipelines.flow.runner import PrefectRunner
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
def act(node):
    if node == "b":
        os.kill(os.getpid(), signal.SIGTERM)
execution = FakeExecution(Path({str(workspace)!r}), "child", {DIAMOND!r}, act=act)
results = PrefectRunner().run(execution)
assert len(results) == 4, results
assert caught == [signal.SIGTERM], caught
assert not [name for name in os.environ if name.startswith("PREFECT")]
"""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    assert ensure_server(workspace) == before
    # what the process had to tell reached the server before it ended
    assert {task["state_name"] for task in task_runs(workspace, "child", 4).values()} == {"Completed"}
    assert flow_run(workspace, "child")["state_name"] == "Completed"


def test_a_server_that_cannot_start_does_not_stop_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(workspace: Path) -> ServiceSpec:
        return ServiceSpec(
            "prefect", "0", lambda port: [sys.executable, "-c", "raise SystemExit(3)"], {}, "/"
        )

    monkeypatch.setattr("posttrain_pipelines.flow.server.server_spec", broken)
    execution = FakeExecution(tmp_path, "alone", DIAMOND)
    assert set(perform(execution).values()) == {"completed"}
    (note,) = execution.notes
    assert note.startswith(
        "Prefect server could not be started (ServiceError: the local prefect server did not"
    )
    assert note.endswith("running without it")


def test_a_configured_server_is_respected_and_its_outage_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    execution = FakeExecution(tmp_path, "alone", DIAMOND)
    assert set(perform(execution).values()) == {"completed"}
    assert "the configured Prefect server does not answer" in execution.notes[0]
    assert recorded(tmp_path) == {}


def test_a_configured_server_is_used(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", ensure_server(workspace).url)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", token(workspace))
    execution = FakeExecution(tmp_path, "team", DIAMOND)
    perform(execution)
    assert execution.notes == []
    assert recorded(tmp_path) == {}
    assert flow_run(workspace, "team")["state_name"] == "Completed"


def test_a_server_that_dies_on_the_way_does_not_stop_the_stages(workspace: Path) -> None:
    def act(node: str) -> None:
        if node == "b":
            stop(workspace)

    execution = FakeExecution(workspace, "outage", DIAMOND, act=act)
    assert set(perform(execution).values()) == {"completed"}
    assert execution.notes == [note for note in execution.notes if note.endswith("going on without it")]
    assert len(execution.notes) == 1


def test_nodes_that_prefect_left_out_are_performed_without_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(ledger: runner_module.Ledger, *_: object) -> None:
        ledger.perform("a")
        raise ConnectionError("gone")

    monkeypatch.setattr(runner_module, "_run_flow", half)
    execution = FakeExecution(workspace, "half", DIAMOND)
    assert set(perform(execution).values()) == {NodeStatus.COMPLETED.value}
    assert execution.performed == ["a", "b", "c", "d"]
    assert execution.notes == ["Prefect failed (ConnectionError: gone): going on without it"]


def test_the_server_keeps_no_secret_and_listens_on_loopback(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-77aa10")
    stop(workspace)
    service = ensure_server(workspace)
    assert service.url.startswith("http://127.0.0.1:")
    with pytest.raises(HTTPError, match="401"):
        urllib.request.urlopen(service.url + "/admin/version")
    assert urllib.request.urlopen(service.url.removesuffix("/api")).status == 200  # the page asks by itself
    assert token_file(workspace).stat().st_mode & 0o777 == 0o600
    command_line = Path(f"/proc/{service.pid}/cmdline")
    if command_line.exists():
        assert token(workspace).encode() not in command_line.read_bytes()
    environment = Path(f"/proc/{service.pid}/environ")
    if environment.exists():
        assert b"canary" not in environment.read_bytes()
    with pytest.raises(ServiceError):
        services.ensure(workspace, ServiceSpec("none", "1", lambda port: [sys.executable, "-c", ""], {}, "/"))


def test_two_threads_that_ask_for_a_node_get_one_performance(tmp_path: Path) -> None:
    entered = threading.Event()

    def act(node: str) -> None:
        entered.set()
        time.sleep(0.2)

    execution = FakeExecution(tmp_path, "twice", {"a": []}, act=act)
    ledger = Ledger(execution)
    first = threading.Thread(target=ledger.perform, args=("a",))
    first.start()
    entered.wait()
    assert ledger.perform("a").status is NodeStatus.COMPLETED
    first.join()
    assert execution.performed == ["a"]


def test_a_run_that_is_stopped_does_not_wait_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(workspace: Path) -> ServiceSpec:
        sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
        return ServiceSpec("prefect", "0", lambda port: sleeping, {}, "/", patience=600.0)

    monkeypatch.setattr("posttrain_pipelines.flow.server.server_spec", silent)
    execution = FakeExecution(tmp_path, "stopped", DIAMOND)
    execution.stopping = True
    perform(execution)
    assert "was stopped" in execution.notes[0]


def test_a_flow_run_of_an_earlier_process_is_marked_as_crashed(workspace: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from helpers.executions import FakeExecution
from posttrain_pipelines.flow.runner import PrefectRunner
PrefectRunner().run(FakeExecution(Path({str(workspace)!r}), "killed", {{"a": []}}, act=lambda node: os._exit(9)))
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == 9
    assert flow_run(workspace, "killed")["state_type"] == "RUNNING"
    perform(FakeExecution(workspace, "killed", {"a": []}))
    found = ask(workspace, "/flow_runs/filter", {"flow_runs": {"name": {"any_": ["killed"]}}})
    assert sorted(flow["state_type"] for flow in found) == ["COMPLETED", "CRASHED"]
