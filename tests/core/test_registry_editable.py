"""Plugins that are installed editably: their source is part of what identifies them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.plugins import install, status_of, write_distribution

from posttrain.artifacts.digest import hash_file
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry import editable
from posttrain.registry.discovery import discover
from posttrain.registry.editable import project_of, source_digest

SOURCE = """\
    import posttrain
    POSTTRAIN_API = ">=1,<2"

    @posttrain.hookimpl
    def posttrain_losses():
        return [posttrain.Registration("acme/one", "s", "acme_parts.one:One", numerics=3)]
    """


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin whose registrations are in one module and whose losses are in a package beside it."""
    file = write_distribution(tmp_path, "acme-losses", SOURCE)
    (tmp_path / "acme_parts").mkdir()
    for name in ("__init__", "one", "two"):
        (tmp_path / "acme_parts" / f"{name}.py").write_text(f"# {name}\n", encoding="utf-8")
    install(tmp_path, monkeypatch)
    return file


def installed_from(root: Path, **info: bool) -> None:
    told = {"url": root.as_uri(), "dir_info": info}
    (root / "acme_losses-1.0.dist-info" / "direct_url.json").write_text(json.dumps(told), encoding="utf-8")


def identity() -> dict[str, object]:
    return discover().identity(Group.LOSS, "acme/one")


def test_an_edited_source_is_another_plugin(module: Path) -> None:
    installed_from(module.parent, editable=True)
    first = identity()
    assert first.keys() == {"name", "numerics", "distribution", "version", "source"}
    assert identity() == first
    for file in (module, module.parent / "acme_parts" / "two.py"):
        before = identity()["source"]
        file.write_text(f"{file.read_text(encoding='utf-8')}# edited\n", encoding="utf-8")
        assert identity()["source"] != before


def test_what_is_no_source_counts_for_nothing(module: Path) -> None:
    installed_from(module.parent, editable=True)
    first = identity()
    cache = module.parent / "acme_parts" / "__pycache__"
    cache.mkdir()
    for file in (cache / "one.pyc", module.parent / "acme_parts" / ".hidden", module.parent / "README.md"):
        file.write_text("more", encoding="utf-8")
    assert identity() == first


@pytest.mark.parametrize("info", [{}, {"editable": False}])
def test_a_usual_installation_is_known_by_its_version(module: Path, info: dict[str, bool]) -> None:
    installed_from(module.parent, **info)
    assert "source" not in identity()
    assert project_of("acme-losses") is None


def test_where_nothing_is_told_nothing_is_known(module: Path) -> None:
    assert project_of("acme-losses") is None and project_of(None) is None and project_of("nobody") is None
    (module.parent / "acme_losses-1.0.dist-info" / "direct_url.json").write_text("{", encoding="utf-8")
    assert project_of("acme-losses") is None


@pytest.mark.parametrize("layout", ["src", "listed", "beside"])
def test_packages_that_no_registration_names_count_where_they_can_be_imported(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "src" if layout == "src" else tmp_path
    for name in ("acme_parts", "acme_helpers", "tests"):
        (place / name).mkdir(parents=True)
        (place / name / "__init__.py").write_text("", encoding="utf-8")
    write_distribution(place, "acme-losses", SOURCE)
    if layout == "listed":
        told = place / "acme_losses-1.0.dist-info" / "top_level.txt"
        told.write_text("acme_losses\nacme_parts\nacme_helpers\n", encoding="utf-8")
    install(place, monkeypatch)
    told = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    (place / "acme_losses-1.0.dist-info" / "direct_url.json").write_text(json.dumps(told), encoding="utf-8")
    first = identity()
    (place / "acme_helpers" / "words.txt").write_text("data of a package", encoding="utf-8")
    second = identity()
    assert second != first
    (place / "tests" / "test_it.py").write_text("", encoding="utf-8")
    assert (identity() == second) is (layout == "listed")
    third = identity()
    (tmp_path / "README.md").write_text("", encoding="utf-8")
    (place / "acme.egg-info").mkdir()
    (place / "acme.egg-info" / "PKG-INFO").write_text("", encoding="utf-8")
    assert identity() == third


def test_a_file_is_read_once_and_one_that_vanishes_counts_for_nothing(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(module.parent, editable=True)
    first = identity()
    monkeypatch.setattr(editable, "hash_file", lambda file: pytest.fail(f"{file} is read again"))
    assert identity() == first
    found = editable._files
    gone = module.parent / "acme_parts" / "gone.py"
    monkeypatch.setattr(editable, "_files", lambda place: [*found(place), gone])
    assert identity() == first


def test_source_that_cannot_be_read_is_named(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from(module.parent, editable=True)

    def locked(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(editable, "hash_file", locked)
    module.write_text(f"{module.read_text(encoding='utf-8')}# read anew\n", encoding="utf-8")
    with pytest.raises(PluginError, match="cannot be read") as caught:
        identity()
    assert str(caught.value.where).startswith(str(module.parent))


def test_packages_of_other_projects_are_left_out(module: Path) -> None:
    packages = ["acme_losses", "acme_parts"]
    own = source_digest(module.parent, packages)
    assert source_digest(module.parent, [*packages, "json", "no_such_package"]) == own
    assert source_digest(module.parent / "acme_parts", packages) != own


def test_a_local_file_and_an_installed_package_are_both_named(module: Path, tmp_path: Path) -> None:
    local = tmp_path / "local" / "mine.py"
    local.parent.mkdir()
    local.write_text(SOURCE.replace("    ", "", 1).replace("\n    ", "\n"), encoding="utf-8")
    (conflict,) = discover([local]).conflicts()
    error = conflict.error()
    assert f"mine.py ({local}), named in `plugins:`" in str(error.found)
    assert f"acme-losses 1.0 ({module}), installed" in str(error.found)
    assert f"take {local} out of `plugins:`" in str(error.fix)
    assert "POSTTRAIN_DISABLE_PLUGINS=acme-losses" in str(error.fix)


def test_a_local_file_that_is_installed_as_well_is_one_plugin(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(module)
    for local in (module, link):
        catalogue = discover([local])
        assert catalogue.conflicts() == [] and catalogue.troubles() == []
        assert catalogue.identity(Group.LOSS, "acme/one") == {"name": "acme/one", "file": hash_file(module)}
        installed = status_of(catalogue, "acme-losses")
        assert installed.denied and installed.error == f"{module} is named in `plugins:`"
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", module.name)
    assert discover([module]).entry(Group.LOSS, "acme/one").plugin.distribution == "acme-losses"
    monkeypatch.delenv("POSTTRAIN_DISABLE_PLUGINS")
    module.write_text(f"if __name__ != 'acme_losses': raise ImportError\n{module.read_text()}")
    monkeypatch.delitem(sys.modules, "acme_losses")
    assert discover([module]).entry(Group.LOSS, "acme/one").plugin.distribution == "acme-losses"
