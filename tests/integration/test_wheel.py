"""The wheel in a clean environment with the base dependencies alone: no torch, no tokenizers, no jinja2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).parents[2]
PACKAGES = ("posttrain", "posttrain_plugins", "posttrain_pipelines")
EXTRAS = ("torch", "transformers", "tokenizers", "jinja2", "safetensors", "prefect", "mlflow")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(directory),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = directory.glob("*.whl")
    return made


def sources() -> Iterator[str]:
    """Yield every file of the packages as the wheel has to name it."""
    for root in ("core", "plugins", "pipelines"):
        for package in (ROOT / root).iterdir():
            if package.name in PACKAGES:
                files = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
                yield from (path.relative_to(ROOT / root).as_posix() for path in files)


def test_the_wheel_holds_all_packages_and_nothing_else(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in held if ".dist-info/" in name}
    assert held - info == set(sources())
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    assert {
        "posttrain_pipelines/recipes/quickstart.yaml",
        "posttrain_pipelines/flow/logging.yml",
    } <= held
    assert any(name.endswith("LICENSE") for name in info)


class Installed:
    """A clean environment with the wheel in it, used from another directory."""

    def __init__(self, base: Path, wheel: Path) -> None:
        self.base = base
        self.bin = base / "env" / "bin"
        self._run(sys.executable, "-m", "venv", str(base / "env"))
        self._run(
            str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--constraint", str(ROOT / "constraints.txt"), str(wheel),
        )  # fmt: skip
        (base / "elsewhere").mkdir()

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and "No matching distribution" in done.stderr + done.stdout:
            pytest.skip("no package registry can be reached")
        assert done.returncode == 0, done.stdout + done.stderr

    def __call__(self, *arguments: str, code: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [str(self.bin / "posttrain"), *arguments],
            cwd=self.base / "elsewhere",
            env={**environment, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("clean"), wheel)


def test_nothing_heavy_came_with_it(installed: Installed) -> None:
    code = f"import importlib.util as u; print([n for n in {EXTRAS!r} if u.find_spec(n)])"
    done = subprocess.run(
        [str(installed.bin / "python"), "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_verbs_that_need_no_extra(installed: Installed) -> None:
    from posttrain import __version__

    assert installed("--version") == f"posttrain {__version__}\n"
    assert "resume" in installed("--help")
    assert "quickstart" in installed("recipes")
    assert "stages" in json.loads(installed("schema"))["properties"]
    assert "no runs yet" in installed("status")
    assert "0 artifacts" in installed("store", "verify")
    assert "wrote mine.yaml" in installed("init", "quickstart", "--to", "mine.yaml")


def test_all_plugins_are_listed_and_none_is_broken(installed: Installed) -> None:
    listed = json.loads(installed("plugins", "list", "--json"))
    assert "import-error" not in json.dumps(listed)
    names = json.dumps(listed)
    for name in ("train.dpo", "sigmoid", "mlflow", "prefect", "quickstart", "leakage"):
        assert f'"{name}"' in names


def test_the_doctor_names_the_extras(installed: Installed) -> None:
    told = installed("doctor", code=1)
    assert "pip install 'posttrain[train]'" in told
    assert "pip install 'posttrain[flows]'" in told


def test_the_quickstart_can_be_planned(installed: Installed) -> None:
    plan = json.loads(installed("plan", "quickstart", "--json"))
    assert plan["refused"] == 0
    assert {node["standing"] for node in plan["nodes"]} == {"new"}
    installed("plan", "quickstart")


def test_a_run_needs_no_extra_that_no_stage_needs(installed: Installed) -> None:
    told = installed("run", "quickstart", "--tiny", "--only", "task")
    assert "completed" in told
    assert "mlflow" not in told and "prefect" not in told


def test_a_run_says_which_extra_is_missing(installed: Installed) -> None:
    told = installed("run", "quickstart", "--tiny", code=1)
    assert "pip install 'posttrain[train]'" in told
    told = installed("run", "quickstart", "--tiny", "--runner", "prefect", code=2)
    assert "pip install 'posttrain[flows]'" in told
