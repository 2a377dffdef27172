"""Plugin files that a pipeline names."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from helpers.plugins import plugin, status_of

from posttrain.contracts.component import Choice
from posttrain.contracts.registration import Group, Registration
from posttrain.contracts.reward import Sample
from posttrain.errors import PluginError
from posttrain.registry.components import resolve
from posttrain.registry.discovery import discover
from posttrain.registry.status import Status

REWARD = """\
import posttrain

POSTTRAIN_API = ">=1,<2"


def short(samples, config):
    return [float(len(sample.completion) < 5) for sample in samples]


@posttrain.hookimpl
def posttrain_rewards():
    return [posttrain.Registration("short", "One for short answers.", short)]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD, encoding="utf-8")
    return file


def test_a_function_in_a_file_is_a_reward(rewards: Path) -> None:
    catalogue = discover([rewards], installed=False)
    assert status_of(catalogue, "rewards.py").status is Status.LOADED
    component = resolve(Choice(name="short"), Group.REWARD, catalogue)
    assert component.plugin([Sample([], "yes"), Sample([], "certainly")], component.config) == [1.0, 0.0]


def test_the_identity_is_the_digest_of_the_file(rewards: Path) -> None:
    digest = hashlib.sha256(REWARD.encode()).hexdigest()
    catalogue = discover([rewards], installed=False)
    assert status_of(catalogue, "rewards.py").digest == digest
    assert catalogue.identity(Group.REWARD, "short") == {"name": "short", "file": digest}


def test_imported_once_for_each_content(rewards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = discover([rewards], installed=False).load(Group.REWARD, "short")
    monkeypatch.chdir(rewards.parent)
    assert discover([Path("rewards.py"), rewards], installed=False).load(Group.REWARD, "short") is first
    rewards.write_text(REWARD.replace("< 5", "< 9"), encoding="utf-8")
    second = discover([rewards], installed=False).load(Group.REWARD, "short")
    assert second is not first
    assert second.__module__ != first.__module__


def test_equal_files_in_two_places_are_two_plugins(rewards: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other" / "rewards.py"
    copy.parent.mkdir()
    copy.write_text(REWARD, encoding="utf-8")
    catalogue = discover([rewards, copy], installed=False)
    with pytest.raises(PluginError, match="claimed by 2 plugins") as error:
        catalogue.load(Group.REWARD, "short")
    assert str(rewards) in str(error.value) and str(copy) in str(error.value)


def test_no_byte_code_is_written_beside_the_file(rewards: Path) -> None:
    discover([rewards], installed=False)
    assert [each.name for each in rewards.parent.iterdir()] == ["rewards.py"]


def test_a_failing_file_is_reported_with_its_line_and_leaves_no_module(rewards: Path) -> None:
    rewards.write_text("import posttrain\n\nraise ValueError('no')\n", encoding="utf-8")
    before = set(sys.modules)
    status = status_of(discover([rewards], installed=False), "rewards.py")
    assert (status.status, status.error) == (Status.IMPORT_ERROR, f"ValueError: no ({rewards}:3)")
    assert {name for name in set(sys.modules) - before if name.startswith("_posttrain_local")} == set()


def test_a_missing_file_is_a_status(tmp_path: Path) -> None:
    status = status_of(discover([tmp_path / "none.py"], installed=False), "none.py")
    assert status.status is Status.IMPORT_ERROR
    assert status.error is not None and "No such file" in status.error


def test_a_module_beside_the_file_is_not_importable(rewards: Path) -> None:
    (rewards.parent / "sibling_of_rewards.py").write_text("", encoding="utf-8")
    for line in ("from . import sibling_of_rewards", "import sibling_of_rewards"):
        rewards.write_text(f"{line}\n{REWARD}", encoding="utf-8")
        assert status_of(discover([rewards], installed=False), "rewards.py").status is Status.IMPORT_ERROR


def test_a_target_may_name_the_module_itself(rewards: Path) -> None:
    rewards.write_text(REWARD.replace('answers.", short', 'answers.", f"{__name__}:short"'), encoding="utf-8")
    assert discover([rewards], installed=False).load(Group.REWARD, "short").__name__ == "short"


def test_a_local_file_is_a_third_party(rewards: Path) -> None:
    other = plugin("other", rewards=[Registration("short", "Another.", "a:b")])
    catalogue = discover([rewards], extra=[other], installed=False)
    with pytest.raises(PluginError, match="the reward 'short' is claimed by 2 plugins"):
        catalogue.entry(Group.REWARD, "short")


@pytest.mark.parametrize("name", ["rewards.py", "rewards"])
def test_a_local_file_can_be_denied_and_allowed(
    rewards: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("POSTTRAIN_ALLOW_PLUGINS", "other")
    assert status_of(discover([rewards], installed=False), "rewards.py").status is Status.BLOCKED
    monkeypatch.setenv("POSTTRAIN_ALLOW_PLUGINS", f"other,{name}")
    assert status_of(discover([rewards], installed=False), "rewards.py").status is Status.LOADED
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", name)
    assert status_of(discover([rewards], installed=False), "rewards.py").status is Status.BLOCKED


def test_a_directory_is_no_plugin_file(tmp_path: Path) -> None:
    (status,) = discover([tmp_path], installed=False).plugins
    assert status.status is Status.IMPORT_ERROR
