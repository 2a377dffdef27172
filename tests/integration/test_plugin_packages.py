"""Packages of strangers, installed into an environment of their own: they test themselves and train."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.training import completion_rows, preference_rows

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packages")]

EXAMPLE = Path(__file__).parents[1] / "examples/posttrain-simpo-variant"
NAMES = {"loss": "acme/simpo2", "reward": "acme/words", "trainer": "acme/train.better"}
PIPELINE = """\
name: stranger
{plugins}
defaults:
  "*": {{resources: {{cpus: 1}}}}
stages:
  pairs:
    uses: data.load
    with: {{path: pairs.jsonl, format: preference}}
  base:
    uses: model.init
    inputs: {{data: pairs}}
    with: {{hidden_size: 16, max_position_embeddings: 128}}
  learn:
    uses: {uses}
    inputs: {{model: base, data: pairs}}
    with: {options}
"""


class Environment:
    """A virtual environment that has what this interpreter has, and what is installed into it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.python = base / "env/bin/python"
        self._run([sys.executable, "-m", "venv", str(base / "env")])
        (packages,) = (base / "env/lib").glob("python*/site-packages")
        for number, path in enumerate(site.getsitepackages()):
            line = f"import site; site.addsitedir({path!r})\n"
            (packages / f"outer{number}.pth").write_text(line, encoding="utf-8")

    def __call__(self, *arguments: str | Path, code: int = 0, cwd: Path | None = None) -> str:
        """Run a module of the environment's interpreter; return what it prints."""
        return self._run([str(self.python), "-m", *map(str, arguments)], code, cwd)

    def install(self, package: Path) -> None:
        """Install a package from its directory, with nothing but what is there."""
        offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
        self("pip", "install", "--quiet", *offline, package)

    def _run(self, command: list[str], code: int = 0, cwd: Path | None = None) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            command,
            cwd=cwd or self.base,
            env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With one new package of each kind, and one that was written by hand."""
    made = Environment(tmp_path_factory.mktemp("strangers"))
    for kind, name in NAMES.items():
        made("posttrain", "plugins", "new", kind, name, "--directory", kind)
        made.install(made.base / kind)
    shutil.copytree(EXAMPLE, made.base / "example")
    made.install(made.base / "example")
    rows = [json.dumps(row) + "\n" for row in preference_rows(12)]
    (made.base / "pairs.jsonl").write_text("".join(rows), encoding="utf-8")
    prompts = [json.dumps(row) + "\n" for row in completion_rows(6)]
    (made.base / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
    return made


def trained(environment: Environment, uses: str, options: str, plugins: str = "") -> str:
    text = PIPELINE.format(uses=uses, options=options, plugins=plugins)
    (environment.base / "pipeline.yaml").write_text(text, encoding="utf-8")
    return environment("posttrain", "run", "pipeline.yaml", "--runner", "sequential")


@pytest.mark.parametrize("package", [*NAMES, "example"])
def test_its_own_tests_pass_where_it_is_installed(environment: Environment, package: str) -> None:
    told = environment("pytest", "-q", "-p", "no:cacheprovider", cwd=environment.base / package)
    assert " passed" in told and "failed" not in told and "skipped" not in told


def test_they_are_listed_with_their_distributions(environment: Environment) -> None:
    listed = json.loads(environment("posttrain", "plugins", "list", "--json"))
    found = {
        each["name"]: (each["distribution"], each["version"], each["status"])
        for each in listed["registrations"]
        if each["name"].startswith("acme/")
    }
    assert found == {
        "acme/simpo2": ("posttrain-acme-simpo2", "0.1.0", "loaded"),
        "acme/words": ("posttrain-acme-words", "0.1.0", "loaded"),
        "acme/train.better": ("posttrain-acme-train-better", "0.1.0", "loaded"),
        "acme/simpo-variant": ("posttrain-simpo-variant", "0.3.0", "loaded"),
    }
    assert "problem: " not in environment("posttrain", "plugins", "check")


def test_their_options_are_shown_and_checked(environment: Environment) -> None:
    told = environment("posttrain", "plugins", "info", "acme/simpo-variant")
    assert "weight of the likelihood of the chosen answers" in told
    assert "https://arxiv.org/abs/2405.14734" in told
    text = PIPELINE.format(uses="train.cpo", options="{loss: {name: acme/simpo2, bta: 1.0}}", plugins="")
    (environment.base / "wrong.yaml").write_text(text, encoding="utf-8")
    assert "did you mean `beta`" in environment("posttrain", "plan", "wrong.yaml", code=2)


@pytest.mark.parametrize(
    ("uses", "options", "known"),
    [
        ("train.cpo", "{loss: {name: acme/simpo2, gamma: 0.1}, max_steps: 2}", "acme/simpo2 v1"),
        ("train.cpo", "{loss: simpo-variant, max_steps: 2}", "acme/simpo-variant v1"),
        ("acme/train.better", "{max_steps: 2}", "acme/train.better v1"),
    ],
)
def test_they_train_from_yaml(environment: Environment, uses: str, options: str, known: str) -> None:
    assert "completed" in trained(environment, uses, options)
    assert known in environment("posttrain", "plan", "pipeline.yaml")


def test_the_reward_chooses_answers(environment: Environment) -> None:
    pipeline = """\
name: chosen
stages:
  prompts: {uses: data.load, with: {path: prompts.jsonl, format: prompt_completion}}
  base:
    uses: model.init
    inputs: {data: prompts}
    with: {hidden_size: 16, max_position_embeddings: 128}
  pairs:
    uses: data.best_of_n
    inputs: {model: base, prompts: prompts}
    with: {reward: {name: acme/words, words: 3}, n: 4, max_new_tokens: 12, allow_truncated: true}
"""
    (environment.base / "chosen.yaml").write_text(pipeline, encoding="utf-8")
    assert "completed" in environment("posttrain", "run", "chosen.yaml", "--runner", "sequential")


def test_a_module_of_a_package_is_a_local_file_as_well(environment: Environment) -> None:
    local = environment.base / "local"
    local.mkdir()
    text = (environment.base / "loss/posttrain_acme_simpo2.py").read_text(encoding="utf-8")
    (local / "mine.py").write_text(text.replace("acme/simpo2", "acme/local"), encoding="utf-8")
    told = trained(environment, "train.cpo", "{loss: acme/local, max_steps: 2}", "plugins: [./local/mine.py]")
    assert "completed" in told
    assert "acme/local file" in environment("posttrain", "plan", "pipeline.yaml")
