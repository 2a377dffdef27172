"""Real runs of small pipelines made of `helpers.fake_stages`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from helpers import fake_stages as stages

from posttrain.contracts.runner import Execution, NodeResult, Runner
from posttrain.execution.records import RunRecord, create_run, find_run, require_resumable
from posttrain.execution.run import PipelineRun
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import RunReport, execute
from posttrain.planning.capacity import Machine
from posttrain.planning.graph import Graph, build_graph
from posttrain.planning.parsing import resolved
from posttrain.planning.spec import PipelineSpec
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover

PLUGIN = Path(stages.__file__)
MACHINE = Machine(2, (), 2**34)

Stages = Mapping[str, Mapping[str, Any]]


def graph_of(pipeline: Stages, base: Path, catalogue: Catalogue) -> Graph:
    """Build the graph of a pipeline written as `{stage: {uses, inputs, with, …}}`."""
    spec = PipelineSpec.model_validate({"stages": pipeline})
    return build_graph(resolved(spec), catalogue, base)


@dataclass
class Lab:
    """A workspace in which pipelines are run and resumed."""

    base: Path
    launcher: Any = "process"
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def workspace(self) -> Path:
        """The `.posttrain` directory."""
        return self.base / ".posttrain"

    def prepare(self, pipeline: Stages, record: RunRecord | None = None, **options: Any) -> PipelineRun:
        """Make a run without executing it."""
        record = record or create_run(self.workspace, {"stages": pipeline})
        options = {"launcher": self.launcher, "machine": MACHINE, "observer": self.events.append, **options}
        catalogue = options.pop("catalogue", None) or discover([PLUGIN], installed=False)
        options.setdefault("plugins", [PLUGIN])
        graph = graph_of(pipeline, self.base, catalogue)
        return PipelineRun(graph, catalogue, record, spec_digest="0" * 64, **options)

    def run(self, pipeline: Stages, *, runner: Runner | None = None, **options: Any) -> RunReport:
        """Run a pipeline in a new run."""
        run = self.prepare(pipeline, **options)
        return execute(run, runner or SequentialRunner(), pipeline="test", runner_name="sequential")

    def resume(self, pipeline: Stages, **options: Any) -> RunReport:
        """Resume the newest run."""
        record = find_run(self.workspace)
        require_resumable(record)
        run = self.prepare(pipeline, record, **options)
        return execute(run, SequentialRunner(), pipeline="test", runner_name="sequential", resumed=True)

    def attempt(self, node: str, number: int = 1) -> Path:
        """The directory of an attempt in the newest run."""
        return find_run(self.workspace).stage(node) / str(number)

    def notes(self, node: str | None = None) -> list[str]:
        """What was noted: by the stage of a node, or about the run."""
        return [e["message"] for e in self.events if e.get("type") == "note" and e.get("node") == node]

    def text(self, report: RunReport, node: str, port: str = "data") -> str:
        """What a node's output holds."""
        digest = report.results[node].outputs[port]
        return (self.workspace / "store" / "objects" / digest / stages.ROWS).read_text()


class Concurrent:
    """A runner that performs every node in a thread of its own as soon as its dependencies are done."""

    def run(self, execution: Execution) -> Mapping[str, NodeResult]:
        """Perform every node."""
        futures: dict[str, Future[NodeResult]] = {}

        def perform(node: str) -> NodeResult:
            for dependency in execution.dependencies[node]:
                futures[dependency].result()
            return execution.perform(node)

        with ThreadPoolExecutor(len(execution.order)) as pool:
            for node in execution.order:
                futures[node] = pool.submit(perform, node)
            return {node: future.result() for node, future in futures.items()}


CHILD = """
import json, sys
sys.path[:0] = [{path!r}]
from pathlib import Path
from helpers.lab import Lab
lab = Lab(Path({base!r}), {launcher!r})
report = getattr(lab, {verb!r})(json.loads({pipeline!r}), grace=float({grace!r}))
print(json.dumps({{name: [r.status, dict(r.outputs)] for name, r in report.results.items()}}))
sys.exit(report.exit_code)
"""


def child_command(lab: Lab, pipeline: Stages, verb: str = "run", grace: float = 60.0) -> list[str]:
    """Return a command that runs a pipeline in a process of its own, as `posttrain run` does."""
    source = CHILD.format(
        path=str(Path(__file__).parents[1]),
        base=str(lab.base),
        launcher=lab.launcher,
        verb=verb,
        pipeline=json.dumps(pipeline),
        grace=grace,
    )
    return [sys.executable, "-c", source]


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what the condition gives as soon as it is true; fail after a time that no machine needs."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "this did not come true"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def marked(marker: Path) -> tuple[int, int, int] | None:
    """Return worker, grandchild and first step of a slow stage once it has begun."""
    if not marker.exists():
        return None
    worker, grandchild, step = map(int, marker.read_text().split())
    return worker, grandchild, step
