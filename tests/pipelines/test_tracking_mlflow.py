"""The MLflow projection: complete, idempotent, and never an obstacle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import SyntheticRun, sft_and_dpo
from helpers.tracked_runs import by_node, client, dump, steps

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
