"""`posttrain plugins new`: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from helpers.planning import command

from posttrain.contracts.registration import Group
from posttrain.registry.discovery import discover

MADE = {"loss": "acme/simpo2", "reward": "acme/words", "trainer": "acme/train.better"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(kind: str, name: str, *arguments: str) -> None:
    told = command("plugins", "new", kind, name, *arguments)
    assert told.code == 0, told.err


@pytest.mark.parametrize(("kind", "name"), MADE.items())
def test_it_writes_a_module_a_test_and_what_installs_them(kind: str, name: str, tmp_path: Path) -> None:
    made(kind, name, "--directory", "mine")
    (module,) = (tmp_path / "mine").glob("*.py")
    found = sorted(
        path.relative_to(tmp_path / "mine").as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    (test,) = (tmp_path / "mine/tests").iterdir()
    assert found == sorted(["README.md", module.name, "pyproject.toml", f"tests/{test.name}"])
    project = tomllib.loads((tmp_path / "mine/pyproject.toml").read_text(encoding="utf-8"))
    assert list(project["project"]["entry-points"]["posttrain"].values()) == [module.stem]
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [module.name]
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 50
    for path in (module, test):
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
        assert "$" not in text
    assert "$" not in (tmp_path / "mine/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("kind", "name"), MADE.items())
def test_the_module_works_as_a_local_file(kind: str, name: str, tmp_path: Path) -> None:
    made(kind, name)
    (module,) = tmp_path.glob("*/*.py")
    loaded = discover([module]).load(Group(kind), name)
    assert loaded.__doc__
    assert command("plugins", "info", name, "--file", module).code == 0


def test_names_become_modules_classes_and_distributions(tmp_path: Path) -> None:
    made("loss", "acme-lab/sim_po.v2")
    assert (tmp_path / "posttrain-acme-lab-sim-po-v2/posttrain_acme_lab_sim_po_v2.py").is_file()
    assert "class SimPoV2(Loss)" in next(tmp_path.glob("*/*.py")).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("loss", "acme/loss"),
        ("loss", "acme/none"),
        ("loss", "acme/config"),
        ("loss", "acme/term"),
        ("loss", "acme/loss-output"),
        ("loss", "acme/preference-batch"),
        ("loss", "acme/test-conformance"),
        ("trainer", "acme/token-batch"),
        ("trainer", "acme/training"),
        ("reward", "acme/sample"),
    ],
)
def test_a_class_is_called_unlike_what_the_module_imports(kind: str, name: str, tmp_path: Path) -> None:
    made(kind, name)
    (module,) = tmp_path.glob("*/*.py")
    loaded = discover([module]).load(Group(kind), name)
    assert loaded.__name__.endswith(kind.capitalize())
    imported = ast.parse(module.read_text(encoding="utf-8"))
    names = {
        each.name for node in ast.walk(imported) if isinstance(node, ast.ImportFrom) for each in node.names
    }
    assert names.isdisjoint({loaded.__name__, loaded.config.__name__})


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("loss", "sigmoid", "there is a loss 'sigmoid' already"),
        ("reward", "exact", "there is a reward 'exact' already"),
        ("trainer", "train.sft", "there is a trainer 'train.sft' already"),
        ("trainer", "data.load", "there is a stage 'data.load' already"),
        ("loss", "Acme/Simpo", "this cannot be the name of a plugin"),
        ("loss", "acme/lab/simpo", "this cannot be the name of a plugin"),
        ("loss", "../simpo", "this cannot be the name of a plugin"),
        ("loss", "plugins", "this cannot be the name of a plugin"),
        ("loss", "builtin", "this cannot be the name of a plugin"),
        ("loss", "2simpo", "this cannot be the name of a plugin"),
        ("loss", "", "this cannot be the name of a plugin"),
    ],
)
def test_names_that_are_taken_or_none_are_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    told = command("plugins", "new", kind, name)
    assert told.code == 2
    assert message in told.err
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_a_namespace_may_be_that_of_a_built_in_plugin() -> None:
    made("loss", "acme/sigmoid")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    told = command("plugins", "new", "loss", "acme/simpo2", "--directory", "mine")
    assert told.code == 2
    assert "there is something already" in told.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_only_what_there_is_a_template_for_can_be_begun() -> None:
    assert command("plugins", "new", "recipe", "acme/mine").code == 2
