"""The whole product in a temporary directory: a tiny pipeline, and the `posttrain` command in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from posttrain.execution.journal import NodeStarted, read_journal
from posttrain.execution.records import RunRecord, list_runs

COMMAND = Path(sys.executable).with_name("posttrain")

TINY = """\
name: tiny
defaults:
  "*": {resources: {cpus: 1}}
stages:
  task:
    uses: data.synthetic
    with:
      generator: {name: reverse, min_length: 2, max_length: 4, alphabet: abcd}
      rows: 200
      split: {prompts: 0.2, test: 0.1}
  base:
    uses: model.init
    inputs: {data: [task.train, task.prompts, task.test]}
    with: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,
           max_position_embeddings: 64}
  sft:
    uses: train.sft
    inputs: {model: base, data: task.train}
    with: {learning_rate: 2e-3, batch_size: 16, max_steps: 6, logging_steps: 1, save_steps: 2}
  pairs:
    uses: data.best_of_n
    inputs: {model: sft, prompts: task.prompts}
    with: {reward: exact, n: 4, max_new_tokens: 8, allow_ties: true, allow_truncated: true}
  dpo:
    uses: train.dpo
    inputs: {model: sft, data: pairs}
    with: {learning_rate: 1e-4, batch_size: 8, max_steps: 3, logging_steps: 1, save_steps: 1,
           loss: {name: sigmoid, beta: 0.5}}
  eval:
    uses: evaluate
    inputs: {models: [sft, dpo], data: task.test}
    with: {answer_column: answer, max_new_tokens: 8}
  gate:
    uses: gate
    inputs: {report: eval, candidate: dpo, baseline: sft}
    with: {metric: exact_match, min_improvement: -0.5, check_answers: false}
  promote:
    uses: promote
    inputs: {model: dpo, verdict: gate}
    with: {name: tiny}
"""
"""All stages of the quickstart, so small that the fixed costs are what one waits for. Its gate lets everything pass."""

NODES = ("task", "base", "sft", "pairs", "dpo", "eval", "gate", "promote")

_HIDDEN = (
    "PREFECT_API_URL",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "POSTTRAIN_WORKSPACE",
    "PYTHONPATH",
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All it printed."""
        return self.out + self.err

    def json(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Product:
    """A directory with a pipeline file, and the command run there.

    Args:
        base: The directory.
        env: Added to the environment of every command; None takes a variable away.
        wrapper: Put before the command, such as a command that mounts a file system first.
    """

    base: Path
    env: Mapping[str, str | None] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()

    @classmethod
    def tiny(cls, base: Path, **parts: Any) -> Product:
        """Make a directory with the tiny pipeline."""
        product = cls(base, **parts)
        product.write("tiny.yaml", TINY)
        return product

    @property
    def workspace(self) -> Path:
        """The `.posttrain` directory."""
        return self.base / ".posttrain"

    @property
    def objects(self) -> Path:
        """Where the artifacts are."""
        return self.workspace / "store" / "objects"

    def write(self, name: str, text: str) -> Path:
        """Write a file beside the pipeline."""
        path = self.base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, as a shell's foreground job is."""
        return subprocess.Popen(
            [*self.wrapper, str(COMMAND), *arguments],
            cwd=self.base,
            env=self._environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: str, **env: str) -> Done:
        """Run a command to its end."""
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=240)
        return Done(process.returncode, out, err)

    def run(
        self, *arguments: str, pipeline: str = "tiny.yaml", runner: str = "sequential", **env: str
    ) -> Done:
        """Run the pipeline."""
        return self("run", pipeline, "--runner", runner, *arguments, **env)

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
        wanted = {"HOME": str(self.base / "home"), "COLUMNS": "160", **self.env, **extra}
        (self.base / "home").mkdir(exist_ok=True)
        kept |= {name: value for name, value in wanted.items() if value is not None}
        return {name: value for name, value in kept.items() if wanted.get(name, value) is not None}

    @property
    def runs(self) -> list[RunRecord]:
        """The runs so far, oldest first."""
        return list_runs(self.workspace)

    def status(self) -> dict[str, Any]:
        """What `posttrain status` says about the newest run."""
        found: dict[str, Any] = self("status", self.runs[-1].run, "--json").json()["runs"][0]
        return found

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes of the newest run as `posttrain status` shows them."""
        return {node["node"]: node for node in self.status()["nodes"]}

    def digests(self) -> dict[str, dict[str, str]]:
        """The outputs of every node of the newest run, by port."""
        return {name: node["end"]["outputs"] for name, node in self.nodes().items() if node["end"]}

    def started(self) -> list[NodeStarted]:
        """The attempts of the newest run that have begun; none while there is no run."""
        runs = self.runs
        entries = read_journal(runs[-1].directory) if runs else ()
        return [entry for entry in entries if isinstance(entry, NodeStarted)]

    def events(self, node: str, attempt: int = 1) -> list[dict[str, Any]]:
        """What a stage reported in one attempt of the newest run."""
        path = self.runs[-1].stage(node) / str(attempt) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """The journal entries of one type of the newest run."""
        lines = (self.runs[-1].directory / "journal.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["type"] == kind]

    def notes(self) -> list[str]:
        """What was noted about the newest run as a whole."""
        return [entry["message"] for entry in self.entries("note")]


def steps_of(events: list[dict[str, Any]]) -> list[int]:
    """The steps whose metrics were reported."""
    return [event["step"] for event in events if event["type"] == "metrics"]


@dataclass(frozen=True)
class Tracked:
    """What MLflow's database holds, read without MLflow."""

    workspace: Path

    def rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with contextlib.closing(sqlite3.connect(self.workspace / "mlflow.db")) as database:
            return database.execute(query, values).fetchall()

    def runs(self, run: str) -> dict[str, list[tuple[str, str]]]:
        """Return (id, status) of every MLflow run of a run, by node; the parent stands under the empty name."""
        tagged = "SELECT run_uuid FROM tags WHERE key = 'posttrain.run' AND value = ?"
        found: dict[str, list[tuple[str, str]]] = {}
        for identity, status in self.rows(
            f"SELECT run_uuid, status FROM runs WHERE run_uuid IN ({tagged})", run
        ):
            found.setdefault(self.tags(identity).get("posttrain.node", ""), []).append((identity, status))
        return found

    def tags(self, identity: str) -> dict[str, str]:
        """Return the tags of one MLflow run."""
        return dict(self.rows("SELECT key, value FROM tags WHERE run_uuid = ?", identity))  # type: ignore[arg-type]

    def metrics(self, identity: str) -> dict[str, list[int]]:
        """Return the steps of every metric of one MLflow run, in order."""
        found: dict[str, list[int]] = {}
        for key, step in self.rows(
            "SELECT key, step FROM metrics WHERE run_uuid = ? ORDER BY key, step", identity
        ):
            found.setdefault(key, []).append(step)
        return found

    def repeated(self) -> list[tuple[Any, ...]]:
        """Return what is there more than once: a metric's step, or a node of a run."""
        twice = self.rows(
            "SELECT run_uuid, key, step, count(*) FROM metrics GROUP BY 1, 2, 3 HAVING count(*) > 1"
        )
        runs = {value for (value,) in self.rows("SELECT value FROM tags WHERE key = 'posttrain.run'")}
        return twice + [
            (run, node, found) for run in runs for node, found in self.runs(run).items() if len(found) > 1
        ]


def processes_in(base: Path, server: bool = False) -> Iterator[psutil.Process]:
    """Yield the living processes that work in a directory or name it; Prefect's server only if asked for."""
    for process in psutil.process_iter():
        try:
            command, place = " ".join(process.cmdline()), process.cwd()
            dead = process.status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        ours = str(base) in command or Path(place).is_relative_to(base)
        if ours and not dead and process.pid != os.getpid() and (server or "prefect" not in command):
            yield process


def workers_of(parent: int) -> list[int]:
    """Return the process ids of the living workers of a run's process, forked or started afresh."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid for child in psutil.Process(parent).children() for pid in _workers_under(child)]
    return []


def _workers_under(child: psutil.Process) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        command = child.cmdline()
        if "posttrain.execution.zygote" in command:
            return [fork.pid for fork in child.children() if fork.status() != psutil.STATUS_ZOMBIE]
        return [child.pid] if "posttrain.execution" in command else []
    return []


def read_all(
    directory: Path, skip: Callable[[Path], bool] = lambda path: False
) -> Iterator[tuple[Path, bytes]]:
    """Yield every file below a directory with its bytes; files that vanish meanwhile are left out."""
    for path in sorted(directory.rglob("*")):
        try:
            if path.is_file() and not skip(path):
                yield path, path.read_bytes()
        except FileNotFoundError:
            continue
