"""The MLflow projection: complete, idempotent, and never an obstacle."""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import SyntheticRun, artifact, sft_and_dpo

from posttrain.artifacts.aliases import Aliases
from posttrain.artifacts.kinds import Kind
from posttrain.errors import StoreError
from posttrain_pipelines.tracking import inspection, watermark
from posttrain_pipelines.tracking import tracker as tracker_module
from posttrain_pipelines.tracking.connection import without_login
from posttrain_pipelines.tracking.measures import metric_name
from posttrain_pipelines.tracking.server import configured_server, server_spec
from posttrain_pipelines.tracking.tracker import MlflowTracker, complete

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


def client(workspace: Path) -> Any:
    from posttrain_pipelines.tracking.connection import connect

    return connect(workspace)


def by_node(workspace: Path, run: str = "r1") -> dict[str, Any]:
    """Return every MLflow run of `run` by node, refetched with inputs and outputs."""
    mlflow = client(workspace)
    experiments = [found.experiment_id for found in mlflow.search_experiments()]
    rows = mlflow.search_runs(experiments, f"tags.`posttrain.run` = '{run}'")
    names = Counter(row.data.tags.get("posttrain.node", "") for row in rows)
    assert set(names.values()) == {1}, names
    return {row.data.tags.get("posttrain.node", ""): mlflow.get_run(row.info.run_id) for row in rows}


def dump(workspace: Path) -> list[str]:
    with closing(sqlite3.connect(workspace / "mlflow.db")) as database:
        return list(database.iterdump())


def steps(workspace: Path, run: Any, key: str) -> list[tuple[int, float]]:
    history = client(workspace).get_metric_history(run.info.run_id, key)
    return sorted((entry.step, entry.value) for entry in history)


def test_a_completed_run_is_projected_completely(workspace: Path) -> None:
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    runs = by_node(workspace)
    assert set(runs) == {"", "data", "sft", "dpo"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert {runs[node].data.tags["mlflow.parentRunId"] for node in ("data", "sft", "dpo")} == {
        runs[""].info.run_id
    }
    sft = runs["sft"]
    assert sft.data.params == {"learning_rate": "0.001", "loss.name": "nll"}
    assert sft.data.tags["posttrain.key"] == "key-sft"
    assert sft.data.tags["posttrain.attempt"] == "1"
    assert steps(workspace, sft, "loss") == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]
    assert steps(workspace, sft, "grad norm") == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert steps(workspace, sft, "final/loss") == [(1, 0.25)]
    assert MlflowTracker().behind(workspace, "r1") is False


def test_lineage_is_by_reference(workspace: Path, tmp_path: Path) -> None:
    run = sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, run.run)
    runs = by_node(workspace)
    (entry,) = runs["sft"].inputs.dataset_inputs
    assert entry.dataset.name == "data.train"
    assert len(entry.dataset.digest) == 36
    source = json.loads(entry.dataset.source)
    assert source["digest"].startswith(entry.dataset.digest)
    assert entry.tags[0].value == "data"
    (made,) = runs["sft"].outputs.model_outputs
    (taken,) = runs["dpo"].inputs.model_inputs
    assert made.model_id == taken.model_id
    model = client(workspace).get_logged_model(made.model_id)
    assert str(model.status) == "READY"
    assert model.source_run_id == runs["sft"].info.run_id
    assert Path(model.tags["posttrain.path"]).name == model.tags["posttrain.digest"]
    assert not list(tmp_path.rglob("mlartifacts/**/*.txt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".posttrain"]


def test_a_second_sync_changes_nothing(workspace: Path) -> None:
    sft_and_dpo(workspace)
    tracker = MlflowTracker()
    tracker.sync(workspace, "r1")
    before = dump(workspace)
    tracker.sync(workspace, "r1")
    MlflowTracker().sync(workspace, "r1")
    assert dump(workspace) == before


def test_a_live_run_is_streamed_and_each_step_is_there_once(workspace: Path) -> None:
    run, tracker = SyntheticRun(workspace), MlflowTracker()
    with run.record.claimed():
        run.begin()
        run.start("sft")
        for step in range(1, 5):
            run.metrics("sft", step, loss=float(step))
            tracker.sync(workspace, "r1")
            assert tracker.behind(workspace, "r1") is False
        assert by_node(workspace)["sft"].info.status == "RUNNING"
        assert by_node(workspace)[""].info.status == "RUNNING"
        run.end("sft")
        run.finish()
    assert tracker.behind(workspace, "r1") is True
    tracker.sync(workspace, "r1")
    sft = by_node(workspace)["sft"]
    assert (sft.info.status, steps(workspace, sft, "loss")) == (
        "FINISHED",
        [(step, float(step)) for step in range(1, 5)],
    )


def test_a_resumed_attempt_goes_on_in_the_same_run(workspace: Path) -> None:
    run, tracker = SyntheticRun(workspace), MlflowTracker()
    run.begin()
    run.start("sft", attempt=1, config={"lr": 0.1})
    for step in (1, 2, 3):
        run.metrics("sft", step, loss=1.0)
    tracker.sync(workspace, "r1")  # no process holds the run: it was killed
    first = by_node(workspace)
    assert {node: found.info.status for node, found in first.items()} == {"": "KILLED", "sft": "KILLED"}
    with run.record.claimed():
        run.begin(resumed=True)
        run.start("sft", attempt=2, config={"lr": 0.1, "log_every": 5})
        tracker.sync(workspace, "r1")
        assert {found.info.status for found in by_node(workspace).values()} == {"RUNNING"}
        for step in (3, 4, 5):
            run.metrics("sft", step, attempt=2, loss=2.0)
        run.end("sft", attempt=2, figures={"loss": 2.0})
        run.finish()
    tracker.sync(workspace, "r1")
    second = by_node(workspace)
    assert {node: found.info.run_id for node, found in first.items()} == {
        node: found.info.run_id for node, found in second.items()
    }
    assert {found.info.status for found in second.values()} == {"FINISHED"}
    assert [step for step, _ in steps(workspace, second["sft"], "loss")] == [1, 2, 3, 4, 5]
    assert second["sft"].data.params == {"lr": "0.1", "log_every": "5"}
    assert second["sft"].data.tags["posttrain.attempt"] == "2"


def test_a_replay_takes_the_later_attempt_of_a_repeated_step(workspace: Path) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    run.start("sft", attempt=1)
    run.metrics("sft", 1, loss=9.0)
    run.metrics("sft", 2, loss=8.0)
    run.begin(resumed=True)
    run.start("sft", attempt=2)
    run.metrics("sft", 2, attempt=2, loss=7.0)
    run.end("sft", attempt=2)
    run.finish()
    MlflowTracker().sync(workspace, "r1")
    assert steps(workspace, by_node(workspace)["sft"], "loss") == [(1, 9.0), (2, 7.0)]


@pytest.mark.parametrize(
    ("ends", "finish", "expected"),
    [
        ("failed", "failed", "FAILED"),
        ("interrupted", "interrupted", "KILLED"),
        ("rejected", "rejected", "FINISHED"),
        ("inconclusive", "inconclusive", "FINISHED"),
        (None, None, "KILLED"),
    ],
)
def test_terminal_states(workspace: Path, ends: str | None, finish: str | None, expected: str) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    run.start("gate")
    if ends and finish:
        run.end("gate", ends)
        run.end("after", "skipped", attempt=None)
        run.finish(finish)
    MlflowTracker().sync(workspace, "r1")
    runs = by_node(workspace)
    assert set(runs) == {"", "gate"}
    assert {found.info.status for found in runs.values()} == {expected}
    verdict = ends if ends in ("rejected", "inconclusive") else None
    assert {found.data.tags.get("posttrain.verdict") for found in runs.values()} == {verdict}
    assert MlflowTracker().behind(workspace, "r1") is False


def test_a_failure_after_a_success_leaves_each_run_its_own_state(workspace: Path) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    run.start("one")
    run.end("one", "failed", error={"message": "it broke"})
    run.start("two")
    run.end("two")
    run.finish("failed")
    MlflowTracker().sync(workspace, "r1")
    runs = by_node(workspace)
    assert {node: found.info.status for node, found in runs.items()} == {
        "": "FAILED",
        "one": "FAILED",
        "two": "FINISHED",
    }
    assert runs["one"].data.tags["posttrain.error"] == "it broke"


def test_cached_nodes_link_to_the_same_model(workspace: Path) -> None:
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    made = by_node(workspace)["sft"]
    again = SyntheticRun(workspace, "r2")
    again.begin()
    again.end(
        "sft",
        "cached",
        attempt=None,
        outputs={"model": made.data.tags["posttrain.output.model"]},
        config={"learning_rate": 1e-3},
    )
    again.finish()
    MlflowTracker().sync(workspace, "r2")
    cached = by_node(workspace, "r2")["sft"]
    assert cached.data.tags["posttrain.cached"] == "true"
    assert cached.data.params == {"learning_rate": "0.001"}
    assert cached.outputs.model_outputs[0].model_id == made.outputs.model_outputs[0].model_id
    model = client(workspace).get_logged_model(cached.outputs.model_outputs[0].model_id)
    assert model.source_run_id == made.info.run_id


def test_a_resumed_run_that_finds_its_own_node_in_the_cache_keeps_it(workspace: Path) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    run.start("one")
    run.end("one", figures={"x": 1.0})
    run.start("two")
    run.end("two", "failed")
    run.finish("failed")
    run.begin(resumed=True)
    run.end("one", "cached", attempt=None, figures={"x": 1.0})
    run.end("two", "interrupted", attempt=None)
    run.finish("interrupted")
    MlflowTracker().sync(workspace, "r1")
    runs = by_node(workspace)
    assert "posttrain.cached" not in runs["one"].data.tags
    assert {node: found.info.status for node, found in runs.items()} == {
        "": "KILLED",
        "one": "FINISHED",
        "two": "FAILED",
    }


def test_non_finite_metrics_are_left_out_and_named(workspace: Path) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    run.start("sft")
    events = run.record.stage("sft") / "1" / "events.jsonl"
    lines = ['{"loss": NaN, "lr": 0.5}', '{"loss": Infinity}', '{"loss": 1.5}']
    text = "".join(
        f'{{"type":"metrics","time":1.0,"step":{n},"values":{line}}}\n' for n, line in enumerate(lines, 1)
    )
    events.write_text(text)
    run.end("sft")
    run.finish()
    MlflowTracker().sync(workspace, "r1")
    sft = by_node(workspace)["sft"]
    assert steps(workspace, sft, "loss") == [(3, 1.5)]
    assert sft.data.tags["posttrain.nonfinite"] == "loss"


def test_long_and_odd_options_and_names_are_taken(workspace: Path) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    node = "dpo[seed=1,lr=1e-3]"
    run.start(node, config={"text": "x" * 9000, "a|b": [1, 2], **{f"p{n}": n for n in range(150)}})
    run.metrics(node, 1, **{"a//b": 1.0, "é|x": 2.0, "..": 3.0, "rewards/margin": 4.0})
    run.end(node)
    run.finish()
    MlflowTracker().sync(workspace, "r1")
    found = by_node(workspace)[node]
    assert len(found.data.params) == 152
    assert (len(found.data.params["text"]), found.data.params["a_b"]) == (6000, "[1, 2]")
    assert len(found.data.metrics) == 4
    assert found.data.metrics["rewards/margin"] == 4.0


def test_many_metrics_go_through_in_batches(workspace: Path) -> None:
    run = SyntheticRun(workspace)
    run.begin()
    run.start("sft")
    for step in range(1, 1201):
        run.metrics("sft", step, loss=1.0, lr=2.0)
    run.end("sft")
    run.finish()
    MlflowTracker().sync(workspace, "r1")
    assert len(steps(workspace, by_node(workspace)["sft"], "loss")) == 1200


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


def test_versions_and_aliases_follow_the_registry(workspace: Path) -> None:
    sft_and_dpo(workspace)
    aliases, tracker = Aliases(workspace), MlflowTracker()
    models = [artifact(workspace, "x", "model", Kind.MODEL, text) for text in ("first", "second", "third")]
    one = aliases.register("assistant", models[0].digest, "r1", "sft", {})
    aliases.set_alias("assistant", "champion", one, None)
    assert tracker.behind(workspace, "r1") is True
    tracker.sync(workspace, "r1")
    mlflow = client(workspace)
    version = mlflow.get_model_version_by_alias("assistant", "champion")
    assert version.tags["posttrain.digest"] == models[0].digest
    assert version.run_id == by_node(workspace)["sft"].info.run_id
    two = aliases.register("assistant", models[1].digest, "r1", "dpo", {})
    three = aliases.register("assistant", models[2].digest, "elsewhere", "dpo", {})
    aliases.set_alias("assistant", "champion", two, one)
    aliases.set_alias("assistant", "challenger", three, None)
    assert tracker.behind(workspace, "r1") is True
    tracker.sync(workspace, "r1")
    MlflowTracker().sync(workspace, "r1")
    assert tracker.behind(workspace, "r1") is False
    assert mlflow.get_registered_model("assistant").aliases == {"champion": 2, "challenger": 3}
    found = mlflow.search_model_versions("name = 'assistant'")
    assert sorted(entry.tags["posttrain.version"] for entry in found) == ["1", "2", "3"]


def test_an_alias_moved_by_somebody_else_is_left_alone(workspace: Path) -> None:
    run = sft_and_dpo(workspace)
    aliases, tracker = Aliases(workspace), MlflowTracker()
    first = artifact(workspace, "x", "model", Kind.MODEL, "first")
    second = artifact(workspace, "x", "model", Kind.MODEL, "second")
    one = aliases.register("assistant", first.digest, "r1", "sft", {})
    two = aliases.register("assistant", second.digest, "r1", "dpo", {})
    aliases.set_alias("assistant", "champion", one, None)
    tracker.sync(workspace, run.run)
    mlflow = client(workspace)
    theirs = mlflow.create_model_version("assistant", source="s3://theirs", run_id=None)
    mlflow.set_registered_model_alias("assistant", "champion", theirs.version)
    aliases.set_alias("assistant", "champion", two, one)
    (remark,) = tracker.sync(workspace, run.run)
    assert f"points at MLflow version {theirs.version}, not at version 2" in remark
    assert "Set it to version 2 in MLflow, or promote" in remark
    assert mlflow.get_registered_model("assistant").aliases == {"champion": int(theirs.version)}
    assert tracker.behind(workspace, run.run) is False
    os.utime(run.record.journal.path)  # even where the database itself is compared
    assert tracker.behind(workspace, run.run) is False
    third = artifact(workspace, "x", "model", Kind.MODEL, "third")
    aliases.set_alias(
        "assistant", "champion", aliases.register("assistant", third.digest, "r1", "sft", {}), two
    )
    assert tracker.behind(workspace, run.run) is True
    tracker.sync(workspace, run.run)
    mlflow.set_registered_model_alias("assistant", "champion", "4")
    assert tracker.sync(workspace, run.run) == []
    assert tracker.behind(workspace, run.run) is False


def test_an_alias_moved_back_by_somebody_else_is_left_alone(workspace: Path) -> None:
    run = sft_and_dpo(workspace)
    aliases, tracker = Aliases(workspace), MlflowTracker()
    digests = [
        artifact(workspace, "x", "model", Kind.MODEL, text).digest for text in ("first", "second", "third")
    ]
    versions = [aliases.register("assistant", digest, "r1", "sft", {}) for digest in digests]
    aliases.set_alias("assistant", "champion", versions[0], None)
    tracker.sync(workspace, run.run)
    aliases.set_alias("assistant", "champion", versions[1], versions[0])
    tracker.sync(workspace, run.run)
    mlflow = client(workspace)
    mlflow.set_registered_model_alias("assistant", "champion", "1")  # a roll-back by hand
    aliases.set_alias("assistant", "champion", versions[2], versions[1])
    (remark,) = tracker.sync(workspace, run.run)
    assert "somebody else" in remark
    assert mlflow.get_registered_model("assistant").aliases == {"champion": 1}


def test_a_foreign_run_id_in_the_environment_changes_nothing(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    assert set(by_node(workspace)) == {"", "data", "sft", "dpo"}


def test_the_users_tracking_address_is_respected(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/team.db")
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    assert (tmp_path / "team.db").is_file()
    assert not (workspace / "mlflow.db").exists()
    assert MlflowTracker().behind(workspace, "r1") is False


def test_behind_imports_no_mlflow(workspace: Path) -> None:
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    script = (
        "import sys; from pathlib import Path\n"
        "from posttrain_pipelines.tracking.tracker import MlflowTracker\n"
        "assert MlflowTracker().behind(Path(sys.argv[1]), 'r1') is False\n"
        "assert not {'mlflow', 'sqlalchemy', 'torch', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(workspace)], check=True)


def test_behind_for_a_server_is_answered_from_the_note_alone(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sft_and_dpo(workspace)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    tracker = MlflowTracker()
    assert tracker.behind(workspace, "r1") is True
    watermark.write(workspace, "r1", {**complete(workspace, "r1"), "status": "completed"})
    assert tracker.behind(workspace, "r1") is False
    run.begin(resumed=True)
    assert tracker.behind(workspace, "r1") is True


@pytest.mark.parametrize(
    "name",
    ["exact_match[998a4022]", "final/exact_match[998a4022]", "rewards/margin", "a//b", "..", "é|x", "/a"],
)
def test_every_figure_has_a_name_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_name(name))
    assert metric_name("exact_match[998a4022]") == "exact_match_998a4022_"


def test_the_password_of_a_server_is_written_nowhere(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sft_and_dpo(workspace)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://someone:canary-pw@127.0.0.1:9")
    with pytest.raises(StoreError, match="did not answer") as raised:
        MlflowTracker().sync(workspace, "r1")
    assert "canary" not in str(raised.value)
    assert raised.value.__cause__ is None
    watermark.write(workspace, "r1", {**complete(workspace, "r1"), "status": "completed"})
    assert MlflowTracker().behind(workspace, "r1") is False
    assert configured_server() == "http://127.0.0.1:9"
    for file in workspace.rglob("*"):
        assert not file.is_file() or b"canary" not in file.read_bytes(), file
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://u:canary-pw@host/db")
    spec = server_spec(workspace)
    assert "canary" not in " ".join(spec.command(1))
    assert spec.environment["MLFLOW_BACKEND_STORE_URI"].startswith("postgresql://u:canary-pw@")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("https://u:p@host:1/x", "https://host:1/x"),
        ("https://host/@x", "https://host/@x"),
        ("sqlite:////a/b@c/x.db", "sqlite:////a/b@c/x.db"),
        ("databricks", "databricks"),
    ],
)
def test_an_address_without_its_login(uri: str, expected: str) -> None:
    assert without_login(uri) == expected


def test_a_server_gets_little_time_unless_the_user_says_otherwise() -> None:
    script = (
        "import os, sys\n"
        "from posttrain_pipelines.tracking.connection import load_mlflow\n"
        "load_mlflow()\n"
        "from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES as tries\n"
        "from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as seconds\n"
        "print(tries.get(), seconds.get())\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    ask = [sys.executable, "-c", script]
    assert subprocess.check_output(ask, env=environment, text=True).split() == ["1", "10"]
    environment["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "77"
    assert subprocess.check_output(ask, env=environment, text=True).split() == ["1", "77"]


def test_behind_reads_no_events_while_nothing_has_changed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    with monkeypatch.context() as patch:
        patch.delattr(tracker_module, "view_run")
        patch.delattr(inspection, "lacks")
        patch.delattr(inspection, "measures_of")
        assert MlflowTracker().behind(workspace, "r1") is False
    events = run.record.stage("sft") / "1" / "events.jsonl"
    os.utime(events)
    assert MlflowTracker().behind(workspace, "r1") is False
    with monkeypatch.context() as patch:
        patch.delattr(tracker_module, "view_run")  # the comparison was noted
        assert MlflowTracker().behind(workspace, "r1") is False
    run.metrics("sft", 4, loss=0.1)
    assert MlflowTracker().behind(workspace, "r1") is True


def test_a_database_that_was_made_anew_lacks_everything(workspace: Path) -> None:
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    (workspace / "mlflow.db").unlink()
    assert MlflowTracker().behind(workspace, "r1") is True
    client(workspace)
    assert MlflowTracker().behind(workspace, "r1") is True


def test_an_older_run_does_not_answer_for_the_registry(workspace: Path) -> None:
    sft_and_dpo(workspace)
    MlflowTracker().sync(workspace, "r1")
    newer = SyntheticRun(workspace, "r2")
    newer.begin()
    newer.finish()
    MlflowTracker().sync(workspace, "r2")
    model = artifact(workspace, "x", "model", Kind.MODEL, "first")
    Aliases(workspace).register("assistant", model.digest, "r1", "sft", {})
    assert MlflowTracker().behind(workspace, "r1") is False
    assert MlflowTracker().behind(workspace, "r2") is True
