"""Which plugins are let in: lists that allow and deny, and plugins that need no installation."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from helpers.plugins import install, plugin, status_of, write_distribution
from helpers.wrong_plugins import BUILTIN, HEAD, HEALTHY, IMPORT_ERROR, REWARD, assert_rest_works

import posttrain
from posttrain.contracts.registration import Group, Registration
from posttrain.errors import PluginError
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain.registry.isolation import isolated
from posttrain.registry.status import Status


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Discover with a built-in plugin, a healthy one and the given broken one, `acme-losses`."""

    def look(source: str, **options: object) -> Catalogue:
        write_distribution(tmp_path, "posttrain", BUILTIN, entry="builtin", module="fake_builtin")
        write_distribution(tmp_path, "healthy", HEALTHY, module="fake_healthy")
        write_distribution(tmp_path, "acme-losses", source, entry="acme")
        install(tmp_path, monkeypatch)
        return discover(**options)

    return look


@pytest.mark.parametrize("name", ["acme", "acme-losses", "Acme_Losses"])
def test_denied_by_the_environment(found, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", f" {name} ,")
    catalogue = found(IMPORT_ERROR)
    assert_rest_works(catalogue)
    acme = status_of(catalogue, "acme")
    assert acme.status is Status.BLOCKED
    assert acme.error is not None and "denied by POSTTRAIN_DISABLE_PLUGINS" in acme.error
    with pytest.raises(PluginError) as error:
        catalogue.entry(Group.LOSS, "simpo2")
    assert "plugin 'acme' of acme-losses 1.0 is blocked" in str(error.value)


def test_denied_by_the_caller(found) -> None:
    catalogue = found(IMPORT_ERROR, deny=["acme"])
    assert_rest_works(catalogue)
    assert status_of(catalogue, "acme").error == "'acme' is denied by the caller"


def test_a_builtin_plugin_can_be_denied(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "builtin")
    catalogue = found(HEAD + REWARD.format(name="judge"))
    assert status_of(catalogue, "builtin").status is Status.BLOCKED
    assert catalogue.names(Group.REWARD) == ["healthy", "judge"]


def test_allow_list_admits_the_listed_and_the_builtin(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_ALLOW_PLUGINS", "healthy")
    catalogue = found(IMPORT_ERROR)
    assert_rest_works(catalogue)
    assert status_of(catalogue, "acme").error == "not in the allow list of POSTTRAIN_ALLOW_PLUGINS"


def test_an_empty_allow_list_admits_the_builtin_alone(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_ALLOW_PLUGINS", "")
    catalogue = found(HEALTHY)
    assert [each.status for each in catalogue.plugins] == [Status.LOADED, Status.BLOCKED, Status.BLOCKED]


def test_the_callers_allow_list_replaces_the_environments(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_ALLOW_PLUGINS", "acme")
    assert_rest_works(found(IMPORT_ERROR, allow=["healthy"]))


def test_unknown_names_in_the_lists_are_warned_about(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "healty")
    catalogue = found(HEAD + REWARD.format(name="judge"))
    assert catalogue.warnings == [
        "POSTTRAIN_DISABLE_PLUGINS lists 'healty', but no plugin has that name (did you mean `healthy`?)"
    ]


def test_trace(found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("POSTTRAIN_TRACE_PLUGINS", "1")
    found(IMPORT_ERROR)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("posttrain: plugin healthy of healthy 1.0: import: done, ") for line in lines)
    assert any(
        "acme: import: failed: " in line or "acme-losses 1.0: import: failed: " in line for line in lines
    )
    assert all(line.endswith(" ms") for line in lines)


def test_extra_plugins_need_no_installation() -> None:
    item = Registration("judge", "A reward.", "a:b")
    catalogue = discover(extra=[plugin("one", rewards=[item])], installed=False)
    assert [each.name for each in catalogue.plugins] == ["one"]
    assert catalogue.entry(Group.REWARD, "judge").registration is item


def test_an_instance_can_be_a_plugin() -> None:
    class Plugin:
        POSTTRAIN_API = ">=1,<2"

        @posttrain.hookimpl
        def posttrain_rewards(self) -> list[Registration]:
            return [Registration("judge", "A reward.", "a:b")]

    catalogue = discover(extra=[("object", Plugin())], installed=False)
    assert catalogue.names(Group.REWARD) == ["judge"]


def test_the_output_stream_comes_back_when_two_threads_load(capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stdout
    first_is_in, second_may_end = threading.Event(), threading.Event()

    def first() -> None:
        first_is_in.set()
        second_may_end.wait(0.2)  # without exclusion the second one would start and end its redirection now

    def second() -> None:
        second_may_end.set()

    threads = [threading.Thread(target=isolated, args=("x", "x", call)) for call in (first, second)]
    threads[0].start()
    first_is_in.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sys.stdout is stream
