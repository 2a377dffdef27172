"""How to install what is missing."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from posttrain.registry import extras
from posttrain.registry.extras import extra_with, installing, installing_extra

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: needed for name, needed in PROJECT["optional-dependencies"].items() if name != "all"}


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata that the project's file comes to, however old the installed one is."""
    monkeypatch.setattr(extras, "installed_from", lambda name: (None, False))
    told = [f"{each}; extra == '{name}'" for name, needed in EXTRAS.items() for each in needed]
    monkeypatch.setattr(metadata, "requires", lambda name: [*PROJECT["dependencies"], *told])


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_package_of_an_extra_is_found_in_it(extra: str) -> None:
    for requirement in EXTRAS[extra]:
        (package,) = re.findall(r"^[\w.-]+", requirement)
        assert extra_with(package) == extra_with(package.replace("-", "_").upper()) == extra


def test_others_are_installed_by_their_name() -> None:
    assert installing(["some_library"]) == "pip install some_library"
    assert installing(["prefect", "mlflow.client"]) == "pip install 'posttrain[flows]'"
    assert installing(["wandb", "x", "trackio", "x"]) == "pip install 'posttrain[wandb,trackio]' x"


@pytest.mark.parametrize(("editable", "flag"), [(True, "-e "), (False, "")])
def test_what_came_from_a_directory_gets_its_extras_from_there(
    editable: bool, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "installed_from", lambda name: (tmp_path / "here", editable))
    assert installing_extra("flows") == "pip install 'posttrain[flows]'"
    (tmp_path / "here").mkdir()
    assert installing_extra("flows") == f"pip install {flag}'{tmp_path}/here[flows]'"
    assert installing(["wandb", "x"]) == f"pip install {flag}'{tmp_path}/here[wandb]' x"


def test_without_metadata_every_package_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    assert installing(["wandb"]) == "pip install wandb"
