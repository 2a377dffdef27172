"""How to install what is missing."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from posttrain.registry.extras import extra_with, installing

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: needed for name, needed in PROJECT["optional-dependencies"].items() if name != "all"}


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata that the project's file comes to, however old the installed one is."""
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


def test_without_metadata_every_package_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    assert installing(["wandb"]) == "pip install wandb"
