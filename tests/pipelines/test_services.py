"""Local servers: started once, found again, replaced when they must be, and stopped. No Prefect in here."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.artifacts.locks import acquire
from posttrain.execution.processes import alive, start_time, terminate
from posttrain_pipelines import services
from posttrain_pipelines.services import Service, ServiceError, ServiceSpec, ensure, recorded, stop

SERVER = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())
    def log_message(self, *_): pass
print("up", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spec(version: str = "1", script: str = SERVER, patience: float = 60.0) -> ServiceSpec:
    return ServiceSpec(
        name="toy",
        version=version,
        command=lambda port: [sys.executable, "-c", script, str(port)],
        environment={"TOY": "yes"},
        health="/health",
        path="/api",
        patience=patience,
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop(tmp_path)


def test_a_server_is_started_once_and_stopped(workspace: Path) -> None:
    first = ensure(workspace, spec())
    assert ensure(workspace, spec()) == first
    assert recorded(workspace) == {"toy": first}
    assert first.url.startswith("http://127.0.0.1:")
    assert (workspace / "services" / "toy.log").read_text() == "up\n"
    assert [service.name for service in stop(workspace)] == ["toy"]
    assert not first.alive
    assert recorded(workspace) == {}
    assert stop(workspace) == []


def test_it_has_its_own_session_and_no_secrets(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    monkeypatch.setenv("HF_TOKEN", "canary-1")
    monkeypatch.setenv("ANYTHING", "canary-2")
    service = ensure(workspace, spec())
    assert os.getsid(service.pid) == service.pid
    with urllib.request.urlopen(service.url) as answer:
        environment = json.loads(answer.read())
    assert environment["TOY"] == "yes"
    assert not any(value.startswith("canary") for value in environment.values())


def test_a_killed_server_is_replaced(workspace: Path) -> None:
    first = ensure(workspace, spec())
    os.kill(first.pid, signal.SIGKILL)
    while first.alive:
        time.sleep(0.01)
    second = ensure(workspace, spec())
    assert second.pid != first.pid
    assert second.alive


def test_another_version_replaces_it(workspace: Path) -> None:
    first = ensure(workspace, spec("1"))
    second = ensure(workspace, spec("2"))
    assert (first.alive, second.alive, second.version) == (False, True, "2")


def test_a_process_that_got_the_pid_later_is_not_taken_for_the_server(workspace: Path) -> None:
    (workspace / "services").mkdir()
    mine = Service("toy", "http://127.0.0.1:1/api", os.getpid(), time.time() - 1e6, "1")
    record = workspace / "services" / "toy.json"
    record.write_text(json.dumps({**mine.__dict__}))
    assert not mine.alive
    assert stop(workspace) == []
    assert not record.exists()
    assert start_time(os.getpid()) is not None


def test_two_parents_get_one_server(workspace: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    parents = [spawn.Process(target=_ensure, args=(workspace, workspace / f"{n}.pid")) for n in range(3)]
    for parent in parents:
        parent.start()
    for parent in parents:
        parent.join()
    pids = {(workspace / f"{n}.pid").read_text() for n in range(3)}
    assert len(pids) == 1
    service = recorded(workspace)["toy"]
    assert pids == {str(service.pid)}
    assert service.alive  # it outlives the parent that started it


def _ensure(workspace: Path, answer: Path) -> None:
    answer.write_text(str(ensure(workspace, spec()).pid))


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(workspace: Path) -> None:
    with pytest.raises(ServiceError, match="did not start") as raised:
        ensure(workspace, spec(script="import sys; sys.exit('no such port')"))
    assert raised.value.found == "no such port"
    assert recorded(workspace) == {}


def test_a_server_that_never_answers_is_ended(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Service | None] = []
    launch = services._launch
    monkeypatch.setattr(services, "_launch", lambda *args: launched.append(launch(*args)) or launched[-1])
    with pytest.raises(ServiceError, match="does not answer"):
        ensure(workspace, spec(script="import time; time.sleep(600)", patience=0.5))
    (service,) = launched
    assert service is not None
    assert not service.alive


def test_a_zombie_counts_as_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has reaped it
    assert start_time(process.pid) is None
    process.wait()
    assert not alive(process.pid, time.time())


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"name": "toy"}', '{"name": "toy", "url": "u", "pid": 0, "started": 1.0, "version": "1"}'],
)
def test_a_record_that_cannot_be_read_counts_as_none(workspace: Path, content: str) -> None:
    record = workspace / "services" / "toy.json"
    record.parent.mkdir()
    record.write_text(content)
    notes: list[str] = []
    assert recorded(workspace) == {}
    service = ensure(workspace, spec(), note=notes.append)
    assert recorded(workspace) == {"toy": service}
    assert [str(record) in note for note in notes] == [True]
    record.write_text(content)
    assert stop(workspace) == []
    assert not record.exists()
    terminate(service.pid, service.started)


CHILD = (
    """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""
    + SERVER
)


@pytest.mark.parametrize("end", [stop, lambda workspace: ensure(workspace, spec())])
def test_the_children_of_a_dead_server_are_not_forgotten(
    workspace: Path, end: Callable[[Path], object]
) -> None:
    service = ensure(workspace, spec(script=CHILD))
    os.kill(service.pid, signal.SIGKILL)
    while service.alive:
        time.sleep(0.01)
    assert service.remains
    end(workspace)
    assert not service.remains


def test_a_slow_answer_does_not_replace_a_living_server(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ensure(workspace, spec())
    answers = iter([False, False, True])
    monkeypatch.setattr(services, "healthy", lambda service, spec: next(answers))
    assert ensure(workspace, spec()) == first
    assert next(answers, None) is None


def test_a_server_that_stays_silent_is_replaced(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure(workspace, spec())
    healthy = services.healthy
    monkeypatch.setattr(services, "PATIENCE", 0.3)
    monkeypatch.setattr(services, "healthy", lambda known, spec: known != first and healthy(known, spec))
    assert ensure(workspace, spec()) != first
    assert not first.alive


def test_waiting_ends_when_the_run_is_stopped(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Service | None] = []
    launch = services._launch
    monkeypatch.setattr(services, "_launch", lambda *args: launched.append(launch(*args)) or launched[-1])
    silent = spec(script="import time; time.sleep(600)", patience=600.0)
    with pytest.raises(ServiceError, match="was stopped"):
        ensure(workspace, silent, stopping=lambda: bool(launched))
    (service,) = launched
    assert service is not None
    assert not service.alive
    with acquire(workspace / "services" / "toy.lock"), pytest.raises(ServiceError, match="was stopped"):
        ensure(workspace, silent, stopping=lambda: True)
