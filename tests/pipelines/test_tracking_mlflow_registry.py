"""MLflow's registry of models, foreign servers, and what lags behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.runs import SyntheticRun, artifact, sft_and_dpo
from helpers.tracked_runs import by_node, client

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
