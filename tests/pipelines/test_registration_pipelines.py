"""What the package announces, how light that is, and the three verbs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from helpers.runs import sft_and_dpo
from typer.testing import CliRunner

from posttrain.errors import SpecError
from posttrain_pipelines import registration
from posttrain_pipelines.services import answers, recorded, stop


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".posttrain"
    path.mkdir()
    yield path
    stop(path)


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    """The verbs as the main command mounts them."""
    main = typer.Typer()
    for entry in registration.posttrain_commands():
        main.command(entry.name)(entry.load())
    return main


def call(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_target_loads() -> None:
    hooks = [
        registration.posttrain_runners,
        registration.posttrain_trackers,
        registration.posttrain_stages,
        registration.posttrain_commands,
    ]
    for hook in hooks:
        for entry in hook():
            assert callable(entry.load()), entry
            assert entry.summary


def test_recipes_are_absolute_paths_of_files_that_exist() -> None:
    for entry in registration.posttrain_recipes():
        assert Path(entry.target).is_absolute()
        assert Path(entry.target).is_file()
        assert entry.summary


def test_registration_and_plugin_objects_import_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from posttrain_pipelines import registration as r\n"
        "for hook in (r.posttrain_runners, r.posttrain_trackers, r.posttrain_stages, r.posttrain_commands):\n"
        "    [entry.load() for entry in hook()]\n"
        "heavy = {'prefect', 'mlflow', 'torch', 'transformers', 'sqlalchemy', 'pandas', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_run_is_an_error(app: typer.Typer, workspace: Path) -> None:
    with pytest.raises(SpecError, match="no such run"):
        call(app, "sync", "r9", "--workspace", str(workspace))


def test_nothing_to_sync_and_nothing_to_stop(app: typer.Typer, workspace: Path) -> None:
    assert call(app, "sync", "--workspace", str(workspace)) == "nothing to bring up to date\n"
    assert call(app, "down", "--workspace", str(workspace)) == "no server was running\n"


def test_the_workspace_comes_from_the_environment(
    app: typer.Typer, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_WORKSPACE", str(workspace))
    damaged = workspace / "runs" / "r0"
    damaged.mkdir(parents=True)
    (damaged / "journal.jsonl").write_text("")
    result = CliRunner().invoke(app, ["sync", "--json"])
    assert set(json.loads(result.stdout)["failed"]) == {"r0"}
    record = workspace / "services" / "toy.json"
    record.parent.mkdir()
    record.write_text("{")
    assert call(app, "down") == "no server was running\n"
    assert not record.exists()


def test_the_page_of_a_configured_server_is_shown_without_its_login(
    app: typer.Typer, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://u:canary@prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://u:canary@mlflow.example")
    pages = json.loads(call(app, "ui", "--workspace", str(workspace), "--json"))
    assert pages == {
        "prefect": "https://prefect.example",
        "mlflow": "https://mlflow.example",
        "prefect_password_file": None,
    }


@pytest.mark.mlflow
def test_one_damaged_run_does_not_hold_up_the_others(app: typer.Typer, workspace: Path) -> None:
    sft_and_dpo(workspace)
    damaged = workspace / "runs" / "r0"
    damaged.mkdir()
    (damaged / "journal.jsonl").write_text("")
    result = CliRunner().invoke(app, ["sync", "--workspace", str(workspace)], catch_exceptions=False)
    assert result.exit_code == 1
    assert "brought up to date: r1" in result.stdout
    assert "r0: this run's journal is empty" in result.stdout


@pytest.mark.mlflow
def test_sync_replays_what_is_behind(app: typer.Typer, workspace: Path) -> None:
    sft_and_dpo(workspace)
    assert call(app, "sync", "--workspace", str(workspace)) == "brought up to date: r1\n"
    answer = json.loads(call(app, "sync", "r1", "--workspace", str(workspace), "--json"))
    assert answer == {"synced": [], "remarks": [], "failed": {}}


@pytest.mark.mlflow
def test_a_sync_that_fails_says_so_and_goes_on(app: typer.Typer, workspace: Path) -> None:
    sft_and_dpo(workspace)
    (workspace / "mlflow.db").mkdir()
    result = CliRunner().invoke(
        app, ["sync", "--workspace", str(workspace), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 1
    assert "cannot be written" in json.loads(result.stdout)["failed"]["r1"]["message"]


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.mlflow
def test_the_pages_come_up_and_go_down(app: typer.Typer, workspace: Path) -> None:
    pages = json.loads(call(app, "ui", "--workspace", str(workspace), "--json"))
    password_file = Path(pages.pop("prefect_password_file"))
    assert password_file.stat().st_mode & 0o777 == 0o600
    assert set(pages) == {"prefect", "mlflow"} == set(recorded(workspace))
    assert all(url.startswith("http://127.0.0.1:") and answers(url) for url in pages.values())
    again = json.loads(call(app, "ui", "--workspace", str(workspace), "--json"))
    assert again == {**pages, "prefect_password_file": str(password_file)}
    text = call(app, "ui", "--workspace", str(workspace))
    assert str(password_file) in text
    assert password_file.read_text().strip() not in text
    for service in recorded(workspace).values():
        command_line = Path(f"/proc/{service.pid}/cmdline")
        if command_line.exists():
            assert b"mlflow.db" not in command_line.read_bytes()
    stopped = json.loads(call(app, "down", "--workspace", str(workspace), "--json"))
    assert stopped == {"stopped": ["mlflow", "prefect"]}
    assert not any(answers(url) for url in pages.values())
