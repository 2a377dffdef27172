"""The preloaded interpreter: it forks clean workers, several at a time, and its loss is neither silent nor harmful."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.lab import Concurrent, Lab, eventually, gone, marked

from posttrain.contracts.registration import Group
from posttrain.contracts.runner import NodeStatus
from posttrain.errors import ExitCode
from posttrain.execution import fork
from posttrain.execution.environment import worker_environment
from posttrain.execution.run import PipelineRun
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import RunReport, execute
from posttrain.registry.discovery import discover

pytestmark = pytest.mark.slow

CANARY = "canary-8d1f0c2b7a"
WIDE: dict[str, Any] = {"rows": {"uses": "test/write"}} | {
    f"f{n}": {
        "uses": "test/forked",
        "inputs": {"data": "rows"},
        "with": {"text": str(n)},
        "resources": {"cpus": 1},
    }
    for n in range(4)
}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, "auto")


def go(run: PipelineRun, runner: Any = None) -> RunReport:
    return execute(run, runner or SequentialRunner(), pipeline="test", runner_name="sequential")


def zygote_pid(run: PipelineRun) -> int | None:
    zygote = run._launchers.zygote
    return None if zygote is None else zygote.pid


def test_stages_that_want_it_are_forked_with_their_modules_loaded(lab: Lab) -> None:
    run = lab.prepare(WIDE)
    report = go(run)
    assert report.exit_code == ExitCode.OK
    assert lab.text(report, "f3") == "sea3"
    assert lab.notes("f3") == [f"parent {zygote_pid(run)}", "preloaded True"]
    assert (lab.attempt("f3") / "output.log").read_text() == "output of f3\n"
    eventually(lambda: gone(zygote_pid(run) or 0))


def test_forking_gives_what_a_fresh_interpreter_gives(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Lab(tmp_path / "other", "process")
    forked, fresh = go(lab.prepare(WIDE)), go(other.prepare(WIDE))
    assert other.notes("f0") == [f"parent {os.getpid()}", "preloaded False"]
    assert {n: r.outputs for n, r in forked.results.items()} == {
        n: r.outputs for n, r in fresh.results.items()
    }


def test_it_serves_several_workers_at_once(lab: Lab) -> None:
    report = go(lab.prepare(WIDE), Concurrent())
    assert report.exit_code == ExitCode.OK
    assert sorted(lab.text(report, f"f{n}") for n in range(4)) == [f"sea{n}" for n in range(4)]
    assert {(lab.attempt(f"f{n}") / "output.log").read_text() for n in range(4)} == {
        f"output of f{n}\n" for n in range(4)
    }


def test_it_holds_no_secrets_and_no_end_of_the_lifeline(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_TEST_TOKEN", CANARY)
    monkeypatch.setenv("SOME_DATABASE", f"postgres://user:{CANARY}@host/db")
    seen: list[str] = []

    def look(event: dict[str, Any]) -> None:
        if event["type"] == "node-started" and event["node"] == "slow":
            process = psutil.Process(zygote_pid(run) or 0)
            seen.extend(process.environ().values())

    pipeline = {
        "rows": {"uses": "test/write"},
        "slow": {"uses": "test/slow.forked", "inputs": {"data": "rows"}, "with": {"steps": 1}},
    }
    run = lab.prepare(pipeline, observer=look, expected=pipeline.keys())
    assert go(run).exit_code == ExitCode.OK
    assert seen and not any(CANARY in value for value in seen)


def test_when_it_dies_under_a_worker_the_stage_is_started_afresh_and_a_note_says_so(lab: Lab) -> None:
    marker = lab.base / "marker"
    pipeline = {
        "rows": {"uses": "test/write"},
        "slow": {
            "uses": "test/slow.forked",
            "inputs": {"data": "rows"},
            "with": {"steps": 40, "marker": str(marker)},
        },
        "next": {"uses": "test/forked", "inputs": {"data": "slow"}},
    }
    run = lab.prepare(pipeline)
    done: list[RunReport] = []
    thread = threading.Thread(target=lambda: done.append(go(run)))
    thread.start()
    worker, grandchild, _ = eventually(lambda: marked(marker))
    os.kill(zygote_pid(run) or 0, signal.SIGKILL)
    thread.join(timeout=60)
    (report,) = done
    assert report.exit_code == ExitCode.OK
    assert gone(worker) and gone(grandchild)
    assert (lab.attempt("slow", 2) / "result.json").exists()
    assert lab.notes("next") == [f"parent {os.getpid()}", "preloaded False"]
    first, second = lab.notes()
    assert first.startswith("the preloaded interpreter ended by itself") and "fresh interpreters" in first
    assert second.startswith("slow: its worker went down")


def test_when_it_does_not_start_stages_run_in_fresh_interpreters(lab: Lab) -> None:
    run = lab.prepare(WIDE)
    run._launchers._preload = ("a_module_that_does_not_exist",)
    report = go(run)
    assert {result.status for result in report.results.values()} == {NodeStatus.COMPLETED}
    assert any("the preloaded interpreter ended by itself" in note for note in lab.notes())
    assert "a_module_that_does_not_exist" in (run.record.directory / "zygote.log").read_text()


def test_a_module_that_starts_threads_makes_it_refuse_to_fork(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
    (tmp_path / "threaded_module.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = lab.prepare(WIDE)
    run._launchers._preload = ("threaded_module",)
    assert go(run).exit_code == ExitCode.OK
    assert "started threads" in (run.record.directory / "zygote.log").read_text()


@pytest.mark.parametrize(
    "own",
    [{"runtime": {"env": {"GREETING": "hello"}}}, {"runtime": {"python": sys.executable}}],
    ids=["environment", "interpreter"],
)
def test_a_stage_with_a_runtime_of_its_own_is_not_forked(lab: Lab, own: dict[str, Any]) -> None:
    pipeline = {
        "rows": {"uses": "test/write"},
        "f": {"uses": "test/forked", "inputs": {"data": "rows"}, **own},
    }
    run = lab.prepare(pipeline)
    assert go(run).exit_code == ExitCode.OK
    assert zygote_pid(run) is None


def test_what_the_built_in_stages_preload_starts_no_threads() -> None:
    catalogue = discover()
    stages = [catalogue.stage(name) for name in catalogue.names(Group.STAGE)]
    modules = sorted({module for stage in stages for module in stage.preload})
    assert "torch" in modules
    source = "from posttrain.execution import zygote\n"
    source += "".join(f"import {module}\n" for module in modules) + "print(zygote._threads())"
    environ = worker_environment(os.environ, threads=2)
    done = subprocess.run(
        [sys.executable, "-P", "-c", source], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_a_run_that_is_cached_starts_nothing(lab: Lab) -> None:
    go(lab.prepare(WIDE))
    again = lab.prepare(WIDE)
    assert go(again).exit_code == ExitCode.OK
    assert zygote_pid(again) is None


ENDLESS = "import time\ntime.sleep(300)\n"


def test_it_is_not_started_for_a_run_whose_forkable_stages_are_cached(lab: Lab) -> None:
    go(lab.prepare(WIDE))
    changed = {**WIDE, "new": {"uses": "test/copy", "inputs": {"data": "rows"}, "with": {"text": "!"}}}
    for expected in (None, {"new"}):
        run = lab.prepare(changed, expected=expected)
        report = go(run)
        assert zygote_pid(run) is None
        changed["new"]["with"]["text"] += "!"
        assert report.results["new"].status == NodeStatus.COMPLETED
        assert report.results["f0"].status == NodeStatus.CACHED


def test_it_starts_with_the_run_when_a_plan_says_that_it_is_needed(lab: Lab) -> None:
    begun: list[int | None] = []

    def look(event: dict[str, Any]) -> None:
        if event["type"] == "node-started" and event["node"] == "rows":
            begun.append(zygote_pid(run))

    run = lab.prepare(WIDE, observer=look, expected={"rows", "f0"})
    assert go(run).exit_code == ExitCode.OK
    assert begun == [zygote_pid(run)] and begun[0] is not None


def test_closing_does_not_wait_for_its_imports(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_module.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = lab.prepare(WIDE)
    run._launchers._preload = ("endless_module",)
    run._launchers.warm()
    zygote = run._launchers.zygote
    assert zygote is not None
    patience = []
    wait = zygote._process.wait
    monkeypatch.setattr(zygote._process, "wait", lambda seconds=None: patience.append(seconds) or wait(60))
    run.close()
    assert patience == [fork._END_SECONDS] and zygote._process.returncode == -signal.SIGKILL
