"""`posttrain plugins list|info|check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.plugins import install, write_distribution
from typer.testing import CliRunner, Result

from posttrain.cli.output import console
from posttrain.cli.plugins import app, paper
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry.discovery import discover

BUILTIN = """\
import posttrain
from posttrain import Registration

POSTTRAIN_API = ">=1,<2"
print("built-in noise")


@posttrain.hookimpl
def posttrain_losses():
    return [Registration("sigmoid", "The DPO loss.", "fake_parts:Sigmoid", reference="arXiv:2305.18290")]


@posttrain.hookimpl
def posttrain_stages():
    return [Registration("score", "Scores.", "fake_parts:Score")]
"""

PARTS = '''\
from typing import Annotated

from pydantic import Field

from posttrain import Choice, Config, Family, Kind, Loss, Port, Stage, StageConfig, Uses


class SigmoidConfig(Config):
    beta: float = Field(default=0.1, description="strength of the pull")


class Sigmoid(Loss):
    """Log-sigmoid of the margin."""

    family = Family.PREFERENCE
    config = SigmoidConfig

    def __call__(self, batch, config, stats, state):
        return None


class Judge:
    """One for all."""

    def __call__(self, samples, config):
        return [1.0 for _ in samples]


class ScoreConfig(StageConfig):
    limit: int = Field(description="rows to score")
    loss: Annotated[Choice, Uses("loss")] = Choice(name="sigmoid")


class Score(Stage):
    config = ScoreConfig
    inputs = (Port("model", frozenset({Kind.MODEL}), optional=True),)
    target = "fake_parts:run"

    def outputs(self, config):
        return ()
'''

PLUGIN = """\
import posttrain

POSTTRAIN_API = ">=1,<2"


@posttrain.hookimpl
def posttrain_rewards():
    return [posttrain.Registration("{name}", "A reward.", "{target}")]
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_distribution(tmp_path, "posttrain", BUILTIN, entry="builtin", module="fake_builtin")
    (tmp_path / "fake_parts.py").write_text(PARTS)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def add(root: Path, distribution: str, source: str) -> None:
    write_distribution(root, distribution, source)


def invoke(root: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    install(root, monkeypatch)
    return CliRunner().invoke(app, arguments)


def test_list_json_is_clean_and_complete(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "acme-broken", "print('noise')\nraise RuntimeError('no')")
    result = invoke(root, monkeypatch, "list", "--json")
    assert result.exit_code == 0
    listing = json.loads(result.stdout)
    assert [(each["name"], each["status"]) for each in listing["plugins"]] == [
        ("builtin", "loaded"),
        ("acme-broken", "import-error"),
    ]
    assert [(each["group"], each["name"], each["distribution"]) for each in listing["registrations"]] == [
        ("stage", "score", "posttrain"),
        ("loss", "sigmoid", "posttrain"),
    ]
    assert "noise" in result.stderr


def test_list_shows_a_table_and_the_broken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "acme-broken", "raise RuntimeError('no')")
    result = invoke(root, monkeypatch, "list")
    assert result.exit_code == 0
    (row,) = [line.split() for line in result.stdout.splitlines() if "sigmoid" in line]
    assert row == ["sigmoid", "The", "DPO", "loss.", "arXiv:2305.18290"]
    last = result.stdout.splitlines()[-1]
    assert last.startswith("plugin 'acme-broken' of acme-broken 1.0 is import-error: RuntimeError: no (")


def test_only_the_list_of_a_group_imports_what_is_registered(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "heavy_parts.py").write_text("raise RuntimeError('imported')\n")
    add(root, "heavy", PLUGIN.format(name="judge", target="heavy_parts:Judge"))
    told = invoke(root, monkeypatch, "list").stdout
    assert "heavy 1.0 (loaded)" in told and "broken" not in told
    assert "preference" in invoke(root, monkeypatch, "list", "loss").stdout
    assert "heavy 1.0 (broken)" in invoke(root, monkeypatch, "list", "reward").stdout
    (each,) = json.loads(invoke(root, monkeypatch, "list", "reward", "--json").stdout)["registrations"]
    assert (each["name"], each["status"]) == ("judge", "broken")


def test_list_of_one_group_names_papers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(root, monkeypatch, "list", "stage")
    assert result.exit_code == 0
    assert "score" in result.stdout and "sigmoid" not in result.stdout
    wrong = invoke(root, monkeypatch, "list", "losses")
    assert "did you mean `loss`?" in str(wrong.exception)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("group", [Group.LOSS, Group.TRAINER, Group.STAGE])
def test_names_are_whole_at_any_width(group: Group, width: int) -> None:
    console.cache_clear()
    told = CliRunner().invoke(app, ["list", group], env={"COLUMNS": str(width)})
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    assert all(len(line) <= width for line in lines)
    first = [line.split()[0] for line in lines if line.strip() and not line.startswith(" ")]
    assert set(first[2:]) == set(discover().names(group))


def test_json_tells_families_and_whole_references() -> None:
    told = json.loads(CliRunner().invoke(app, ["list", "loss", "--json"]).stdout)["registrations"]
    assert {each["family"] for each in told} >= {"preference", "token", "reward"}
    assert all(each["reference"] is None or "://" in each["reference"] for each in told)


def test_papers_are_short() -> None:
    assert paper("https://arxiv.org/abs/2305.18290") == "arXiv 2305.18290"
    assert paper("https://doi.org/10.2307/2346567") == "doi.org/10.2307/2346567"


def test_list_marks_names_in_conflict(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        add(root, name, PLUGIN.format(name="judge", target="fake_parts:Judge"))
    listing = json.loads(invoke(root, monkeypatch, "list", "--json").stdout)
    states = {(each["name"], each["plugin"]): each["status"] for each in listing["registrations"]}
    assert states["judge", "one"] == states["judge", "two"] == "ambiguous"
    assert states["sigmoid", "builtin"] == "loaded"


def test_list_takes_local_files(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "local" / "rewards.py"
    file.parent.mkdir()
    file.write_text(PLUGIN.format(name="short", target="fake_parts:Sigmoid"))
    listing = json.loads(invoke(root, monkeypatch, "list", "--json", "--file", str(file)).stdout)
    assert [each["file"] for each in listing["registrations"] if each["name"] == "short"] == [str(file)]


def test_info_of_a_component(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(root, monkeypatch, "info", "sigmoid")
    assert result.exit_code == 0
    for text in ("loss sigmoid: The DPO loss.", "arXiv:2305.18290", "fake_parts:Sigmoid", "numerics: 1"):
        assert text in result.stdout
    assert "Log-sigmoid of the margin." in result.stdout
    (row,) = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["beta"]]
    assert row == ["beta", "float", "0.1", "strength", "of", "the", "pull"]


def test_info_of_a_stage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (detail,) = json.loads(invoke(root, monkeypatch, "info", "score", "--json").stdout)["registrations"]
    assert detail["ports"] == [
        {"name": "model", "kinds": ["model"], "formats": [], "optional": True, "many": False}
    ]
    assert [(each["name"], each["type"], each["required"]) for each in detail["options"]] == [
        ("limit", "int", True),
        ("loss", "loss", False),
    ]
    text = invoke(root, monkeypatch, "info", "score").stdout
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["limit"]]
    assert row == ["limit", "int", "required", "rows", "to", "score"]


def test_info_of_a_plugin(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "acme-broken", "raise RuntimeError('no')")
    result = invoke(root, monkeypatch, "info", "acme-broken")
    assert result.exit_code == 0 and "error: RuntimeError: no (" in result.stdout


def test_info_of_something_broken_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "acme", PLUGIN.format(name="judge", target="no_such_module:Judge"))
    result = invoke(root, monkeypatch, "info", "judge")
    assert result.exit_code == 0 and "cannot be imported: ModuleNotFoundError" in result.stdout


def test_info_of_an_unknown_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = invoke(root, monkeypatch, "info", "sigmod").exception
    assert isinstance(error, PluginError)
    assert (error.message, error.fix) == ("nothing is registered as 'sigmod'", "did you mean `sigmoid`?")


def test_check_passes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "acme", PLUGIN.format(name="judge", target="fake_parts:Judge"))
    result = invoke(root, monkeypatch, "check", "--all")
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["loaded", "builtin"],
        ["loaded", "acme"],
    ]


def test_a_blocked_plugin_is_no_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "acme", "raise RuntimeError('no')")
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "acme,acne")
    result = invoke(root, monkeypatch, "check")
    assert result.exit_code == 0
    assert "blocked      acme of acme 1.0" in result.stdout
    assert "warning: POSTTRAIN_DISABLE_PLUGINS lists 'acne', but no plugin has that name" in result.stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no')", "plugin 'acme' of acme 1.0 is import-error: RuntimeError: no"),
        (
            PLUGIN.format(name="Bad", target="a:b"),
            "is invalid: posttrain_rewards: the name 'Bad' does not match",
        ),
        (PLUGIN.format(name="judge", target="no_such_module:J"), "cannot be imported: ModuleNotFoundError"),
        (PLUGIN.format(name="judge", target="fake_parts:PARTS"), "cannot be imported: AttributeError"),
        (PLUGIN.format(name="judge", target="fake_parts:Score"), "breaks the contract of a reward"),
    ],
)
def test_check_fails(root: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    add(root, "acme", source)
    result = invoke(root, monkeypatch, "check", "--json")
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert message in problem


def test_check_fails_for_a_conflict(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        add(root, name, PLUGIN.format(name="judge", target="fake_parts:Judge"))
    result = invoke(root, monkeypatch, "check")
    assert result.exit_code == 1
    assert "problem: the reward 'judge' is claimed by 2 plugins" in result.stdout


def test_builtin_targets_are_loaded_only_with_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "fake_parts.py").write_text("raise RuntimeError('no')\n")
    assert invoke(root, monkeypatch, "check").exit_code == 0
    result = invoke(root, monkeypatch, "check", "--all")
    assert result.exit_code == 1
    assert result.stdout.count("problem: ") == 2


def test_the_installed_plugins_are_listed_without_heavy_imports() -> None:
    code = (
        "import sys; from posttrain.cli.plugins import app; app(['list', '--json'], standalone_mode=False);"
        "bad = {'torch', 'transformers', 'numpy', 'prefect', 'mlflow', 'datasets'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {each["name"] for each in json.loads(done.stdout)["plugins"]} >= {"builtin", "flows"}
