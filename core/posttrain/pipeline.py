"""A pipeline, whether written as YAML or built in Python: plan it, run it, resume it.

>>> pipeline = Pipeline({"task": {"uses": "data.synthetic", "with": {"generator": "reverse", "rows": 8}}})
>>> sorted(pipeline.spec.stages)
['task']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

from posttrain.artifacts.store import Store
from posttrain.contracts.registration import Group
from posttrain.contracts.runner import Runner
from posttrain.errors import SpecError, StoreError
from posttrain.execution.arrears import catch_up
from posttrain.execution.projection import Projection
from posttrain.execution.records import RunRecord, create_run
from posttrain.execution.resumption import resumable
from posttrain.execution.run import LauncherName, Observer, PipelineRun
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import RunReport, execute, grace_seconds
from posttrain.planning.graph import Graph, build_graph, select
from posttrain.planning.guards import require_usable
from posttrain.planning.overrides import override
from posttrain.planning.parsing import Resolved, parse, resolved, snapshot, spec_digest
from posttrain.planning.plan import Plan, Standing, require_allowed, require_room
from posttrain.planning.planner import Planner
from posttrain.planning.source import Source, load
from posttrain.planning.spec import PipelineSpec, StageDefaults, StageSpec
from posttrain.planning.tiny import shrunk
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain.wording import did_you_mean, listed

__all__ = ["Pipeline", "Selection", "require_allowed", "require_room"]

WORKSPACE = ".posttrain"
DEFAULT_RUNNER = "prefect"
"""Used when it is installed; else the core's sequential runner."""

_CORE_RUNNERS: dict[str, tuple[Callable[[], Runner], LauncherName]] = {
    "sequential": (SequentialRunner, "auto"),
    "process": (SequentialRunner, "process"),
    "inline": (SequentialRunner, "inline"),
}


@dataclass(frozen=True)
class Selection:
    """Which part of a pipeline to run, and how small.

    Args:
        only: Stages or nodes to run with what they need.
        start: Stages or nodes to run with what follows; everything before must be cached (`--from`).
        tiny: Overlay every stage's smoke-run options.
    """

    only: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    tiny: bool = False


class Pipeline:
    """A pipeline.

    Args:
        stages: Stage specs by name, as `StageSpec` objects or as the mappings a YAML file would hold.
        name: What runs are called; defaults to the file's name.
        plugins: Local plugin files, relative to `base`.
        defaults: Options by glob on `uses`.
        base: Directory that relative paths are resolved against; the working directory by default.

    Raises:
        SpecProblems: Everything that is wrong with the spec.
    """

    def __init__(
        self,
        stages: Mapping[str, StageSpec | Mapping[str, Any]],
        *,
        name: str | None = None,
        plugins: Sequence[str] = (),
        defaults: Mapping[str, StageDefaults | Mapping[str, Any]] | None = None,
        base: Path | None = None,
    ) -> None:
        data = {"plugins": list(plugins), "defaults": _plain(defaults or {}), "stages": _plain(stages)}
        source = Source("pipeline", data if name is None else {"name": name, **data})
        self._set(parse(source), source, (base or Path()).absolute(), name or "pipeline")

    def _set(self, spec: PipelineSpec, source: Source, base: Path, name: str) -> None:
        self.spec = spec
        self.source = source
        self.base = base
        self.name = name

    @classmethod
    def from_file(cls, path: str | PathLike[str], sets: Sequence[str] = ()) -> Pipeline:
        """Read a pipeline file, with `--set` overrides.

        Raises:
            SpecError: The file cannot be read; SpecProblems: everything that is wrong with it.
        """
        file = Path(path)
        return cls._from_source(override(load(file), sets), file.absolute().parent, file.stem)

    @classmethod
    def find(cls, text: str, sets: Sequence[str] = ()) -> Pipeline:
        """Read the pipeline file of that path, or the shipped recipe of that name."""
        path = Path(text)
        if path.exists() or path.suffix in (".yaml", ".yml"):
            return cls.from_file(path, sets)
        catalogue = discover()
        recipes = catalogue.names(Group.RECIPE)
        if text not in recipes:
            raise SpecError(
                "there is neither a pipeline file nor a recipe of that name",
                where=text,
                expected=f"a path, or one of {listed(recipes)}",
                fix=did_you_mean(text, recipes),
            )
        recipe = Path(catalogue.load(Group.RECIPE, text))
        return cls._from_source(override(load(recipe), sets), Path().absolute(), text)

    @classmethod
    def _from_source(cls, source: Source, base: Path, name: str) -> Pipeline:
        pipeline = cls.__new__(cls)
        spec = parse(source)
        pipeline._set(spec, source, base, spec.name or name)
        return pipeline

    @property
    def plugin_files(self) -> list[Path]:
        """The local plugin files, absolute."""
        return [(self.base / file).absolute() for file in self.spec.plugins]

    @cached_property
    def catalogue(self) -> Catalogue:
        """The plugins this pipeline sees.

        Raises:
            SpecProblems: A plugin file of the pipeline cannot be used; other people's plugins only give warnings.
        """
        found = discover(self.plugin_files)
        require_usable(found, self.plugin_files, self.source)
        return found

    @property
    def warnings(self) -> list[str]:
        """What is odd about the plugins: whatever is broken does not speak, and rules are never named."""
        return [*self.catalogue.troubles(), *self.catalogue.warnings]

    def resolved(self, *, tiny: bool = False) -> Resolved:
        """Return the spec with defaults, and with every stage's smoke-run options if `tiny`."""
        found = resolved(self.spec, self.source)
        return shrunk(found, self.catalogue, self.base) if tiny else found

    def graph(self, selection: Selection = Selection()) -> Graph:
        """Return the graph of nodes, or the selected part of it."""
        return self._graph(self.resolved(tiny=selection.tiny), selection)

    def _graph(self, spec: Resolved, selection: Selection) -> Graph:
        whole = build_graph(spec, self.catalogue, self.base, self.name)
        return select(whole, only=selection.only, start=selection.start)

    def plan(self, workspace: Path | None = None, selection: Selection = Selection()) -> Plan:
        """Return what a run would do. Starts nothing and imports nothing heavy."""
        launch = (sys.executable, "-m", "posttrain.execution", "request.json")
        store = Store((workspace or Path(WORKSPACE)).absolute())
        spec = self.resolved(tiny=selection.tiny)
        planner = Planner(self._graph(spec, selection), self.catalogue, store, launch)
        return planner.plan(self.name, spec_digest(spec.spec))

    def run(
        self,
        workspace: Path | None = None,
        *,
        runner: str | None = None,
        selection: Selection = Selection(),
        observer: Observer | None = None,
        plan: Plan | None = None,
        track: bool = True,
    ) -> RunReport:
        """Run the pipeline.

        Args:
            workspace: The workspace; `.posttrain` in the working directory by default.
            runner: `prefect`, `sequential`, `process`, `inline` (in this process, for debugging) or a plugin's.
            selection: Which part to run.
            observer: Gets every journal entry and every stage event.
            plan: The plan, when it was made already.
            track: Keep trackers in step with the run.

        Raises:
            SpecError: There is no such runner, `--from` leaves out stages that are not cached, or a stage that is to be
                built asks for more than this machine has.
            HandoffError: The plan found hand-offs that do not fit.
            Exception: With `inline`, whatever a stage raises.
        """
        workspace = (workspace or Path(WORKSPACE)).absolute()
        self.require_runner(runner)
        plan = plan or self.plan(workspace, selection)
        require_allowed(plan)
        require_room(plan)
        chosen = self._runner(runner)
        record = create_run(workspace, self._record(selection, runner, plan), plan.as_dict())
        return self._execute(record, plan, chosen, observer, track, resumed=False)

    @classmethod
    def resume(
        cls,
        workspace: Path,
        run: str | None = None,
        *,
        runner: str | None = None,
        observer: Observer | None = None,
        track: bool = True,
    ) -> RunReport:
        """Go on with a run that was interrupted, killed, or failed: the newest such one, or the one named.

        Raises:
            SpecError: There is no such run, or a stage that is to be built asks for more than this machine has.
            StoreError: It is running or damaged, or there is nothing left to do.
        """
        record = resumable(workspace, run)
        pipeline, selection, recorded = cls.recorded(record)
        chosen = pipeline._runner(runner or recorded)
        plan = pipeline.plan(record.workspace, selection)
        require_room(plan)
        return pipeline._execute(record, plan, chosen, observer, track, resumed=True)

    @classmethod
    def recorded(cls, record: RunRecord) -> tuple[Pipeline, Selection, str | None]:
        """Return the pipeline, the selection and the runner that a run was started with."""
        kept = record.pipeline()
        try:
            source = Source(f"run {record.run}", kept["spec"])
            pipeline = cls._from_source(source, Path(kept["base"]), kept["name"])
            return pipeline, Selection(tuple(kept["only"]), tuple(kept["from"])), kept["runner"]
        except (KeyError, TypeError) as error:
            raise StoreError(
                "this run's record is not one of this version of posttrain",
                where=str(record.directory),
                found=error,
                fix="start another run: what is in the store is reused",
            ) from error

    def _record(self, selection: Selection, runner: str | None, plan: Plan) -> dict[str, Any]:
        return {
            "name": self.name,
            "spec": snapshot(self.resolved(tiny=selection.tiny).spec),
            "spec_digest": plan.spec_digest,
            "base": str(self.base),
            "only": list(selection.only),
            "from": list(selection.start),
            "tiny": selection.tiny,
            "runner": runner,
        }

    def require_runner(self, name: str | None) -> str:
        """Return the runner that is meant, by default the best there is. Imports nothing.

        Raises:
            SpecError: There is no runner of that name.
        """
        registered = self.catalogue.names(Group.RUNNER)
        if name is None:
            found = DEFAULT_RUNNER in registered and self._usable(Group.RUNNER, DEFAULT_RUNNER)
            return DEFAULT_RUNNER if found else "sequential"
        known = list(dict.fromkeys([*_CORE_RUNNERS, *registered]))
        if name not in known:
            expected, fix = f"one of {listed(known)}", did_you_mean(name, known)
            raise SpecError(
                "there is no such runner", where="--runner", found=name, expected=expected, fix=fix
            )
        return name

    def _runner(self, name: str | None) -> tuple[str, Runner, LauncherName]:
        name = self.require_runner(name)
        if name in _CORE_RUNNERS:
            make, launcher = _CORE_RUNNERS[name]
            return name, make(), launcher
        return name, self.catalogue.make(Group.RUNNER, name), "auto"

    def _execute(
        self,
        record: RunRecord,
        plan: Plan,
        chosen: tuple[str, Runner, LauncherName],
        observer: Observer | None,
        track: bool,
        *,
        resumed: bool,
    ) -> RunReport:
        name, runner, launcher = chosen
        run = PipelineRun(
            plan.graph,
            self.catalogue,
            record,
            spec_digest=plan.spec_digest,
            expected=[node.node for node in plan.nodes.values() if node.standing is not Standing.CACHED],
            plugins=self.plugin_files,
            launcher=launcher,
            observer=observer,
            grace=grace_seconds(),
            debug=launcher == "inline",
        )
        trackers = self.trackers() if track else {}
        tracking = Projection(trackers, record.workspace, record.run, run.note) if trackers else nullcontext()
        with tracking:
            return execute(run, runner, pipeline=self.name, runner_name=name, resumed=resumed)

    def trackers(self) -> dict[str, Callable[[], Any]]:
        """Return what makes each registered tracker whose libraries are installed."""
        return {
            name: partial(self.catalogue.make, Group.TRACKER, name)
            for name in self.catalogue.names(Group.TRACKER)
            if self._usable(Group.TRACKER, name)
        }

    def _usable(self, group: Group, name: str) -> bool:
        return self.catalogue.entry(group, name).registration.usable

    def catch_up(self, workspace: Path) -> list[str]:
        """Bring trackers up to date with the newest 20 runs where they lack something; `posttrain sync` does all.

        Returns:
            A note for each run or tracker that failed; it imports nothing heavy while nothing is lacking.
        """
        return catch_up(self.trackers(), workspace)


def _plain(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return stages or defaults as the mappings that a file would hold."""
    return {
        name: part.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if isinstance(part, StageSpec | StageDefaults)
        else part
        for name, part in parts.items()
    }
