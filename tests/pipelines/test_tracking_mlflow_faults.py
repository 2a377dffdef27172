"""What becomes of the projection into MLflow when something is killed, locked, secret or gone."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import SyntheticRun, artifact, sft_and_dpo
from helpers.tracked_runs import by_node, client, dump, steps

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind
from posttrain.errors import StoreError
from posttrain_pipelines.tracking.tracker import MlflowTracker

pytestmark = pytest.mark.mlflow


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / ".posttrain"
    path.mkdir()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1, 4, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27])
def test_a_sync_killed_between_two_calls_is_completed_without_duplicates(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    from mlflow.tracking.client import MlflowClient

    class Killed(BaseException):
        pass

    run = sft_and_dpo(workspace)
    aliases = Aliases(workspace)
    model = artifact(workspace, "dpo", "model", Kind.MODEL, "second")
    aliases.set_alias("tiny", "champion", aliases.register("tiny", model.digest, "r1", "dpo", {}), None)
    left = calls
    writes = ("create_run", "log_batch", "log_inputs", "log_outputs", "create_logged_model", "set_terminated")
    more = ("finalize_logged_model", "create_registered_model", "create_model_version", "create_experiment")
    registry = ("set_registered_model_alias", "set_registered_model_tag")

    def counted(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **options)

        return call

    tracker = MlflowTracker()
    with monkeypatch.context() as patch:
        for name in (*writes, *more, *registry):
            patch.setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
        with pytest.raises(Killed):
            tracker.sync(workspace, run.run)
    assert tracker.behind(workspace, run.run) is True
    MlflowTracker().sync(workspace, run.run)
    assert tracker.behind(workspace, run.run) is False
    runs = by_node(workspace)
    assert [step for step, _ in steps(workspace, runs["sft"], "loss")] == [1, 2, 3]
    mlflow = client(workspace)
    experiments = [found.experiment_id for found in mlflow.search_experiments()]
    assert len(mlflow.search_logged_models(experiments)) == 2
    assert len(mlflow.search_model_versions("name = 'tiny'")) == 1
    assert len(runs["sft"].outputs.model_outputs) == len(runs["dpo"].inputs.model_inputs) == 1


def test_secrets_stay_out_of_the_database(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared, named = "canary-4f1c9b7e", "canary-a83d02c6"
    monkeypatch.setenv("JUDGE_LOGIN", declared)
    monkeypatch.setenv("HF_TOKEN", named)
    run = SyntheticRun(workspace)
    run.begin()
    run.start("judge", config={"key": "env:JUDGE_LOGIN", "url": f"https://u:{named}@host/x", "say": declared})
    error = {"message": f"401 for {declared}"}
    run.end("judge", "failed", summary=f"used {named}", error=error)
    run.finish("failed")
    MlflowTracker().sync(workspace, "r1")
    text = "\n".join(dump(workspace))
    assert "env:JUDGE_LOGIN" in text
    assert declared not in text
    assert named not in text


def test_an_unwritable_database_raises_and_a_later_sync_replays(workspace: Path) -> None:
    sft_and_dpo(workspace)
    (workspace / "mlflow.db").mkdir()
    tracker = MlflowTracker()
    assert tracker.behind(workspace, "r1") is True
    with pytest.raises(StoreError, match="cannot be written"):
        tracker.sync(workspace, "r1")
    (workspace / "mlflow.db").rmdir()
    tracker.sync(workspace, "r1")
    assert tracker.behind(workspace, "r1") is False


@pytest.mark.slow
def test_a_locked_database_raises_and_a_later_sync_replays(workspace: Path) -> None:
    sft_and_dpo(workspace)
    tracker = MlflowTracker()
    with closing(sqlite3.connect(workspace / "mlflow.db", isolation_level=None)) as blocker:
        blocker.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="cannot be written"):
            tracker.sync(workspace, "r1")
        blocker.execute("ROLLBACK")
    tracker.sync(workspace, "r1")
    assert tracker.behind(workspace, "r1") is False


def test_a_deleted_experiment_is_reported(workspace: Path) -> None:
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    mlflow = client(workspace)
    mlflow.delete_experiment(mlflow.get_experiment_by_name("tiny").experiment_id)
    with pytest.raises(StoreError, match="deleted"):
        MlflowTracker().sync(workspace, "r1")


@pytest.mark.slow
def test_four_processes_share_a_fresh_database(workspace: Path) -> None:
    for number in range(4):
        run = SyntheticRun(workspace, f"r{number}")
        run.begin()
        run.start("sft")
        run.metrics("sft", 1, loss=1.0)
        run.end("sft")
        run.finish()
    tracker, spawn = MlflowTracker(), multiprocessing.get_context("spawn")
    names = [f"r{number}" for number in range(4)]
    # every process projects all runs, each in another order
    processes = [
        spawn.Process(target=_sync_all, args=(workspace, names[number:] + names[:number]))
        for number in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    for name in names:
        assert steps(workspace, by_node(workspace, name)["sft"], "loss") == [(1, 1.0)]
        assert tracker.behind(workspace, name) is False


def _sync_all(workspace: Path, runs: list[str]) -> None:
    for run in runs:
        MlflowTracker().sync(workspace, run)
