"""Runs in MLflow: found by their tags, created once, completed and never rewritten."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.contracts.runner import NodeStatus
from posttrain.errors import StoreError
from posttrain_pipelines.tracking.measures import Measures, Point
from posttrain_pipelines.tracking.tables import SHOWN, TAG, Rows, table_path, table_tags, table_text

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking.client import MlflowClient

RUN, NODE, PARENT = "posttrain.run", "posttrain.node", "mlflow.parentRunId"
LONGEST_PARAM, LONGEST_TAG = 6000, 8000
PARAMS_PER_BATCH, METRICS_PER_BATCH = 100, 1000

NODE_STATUS: Mapping[NodeStatus, str] = {
    NodeStatus.RUNNING: "RUNNING",
    NodeStatus.COMPLETED: "FINISHED",
    NodeStatus.CACHED: "FINISHED",
    NodeStatus.REJECTED: "FINISHED",
    NodeStatus.INCONCLUSIVE: "FINISHED",
    NodeStatus.FAILED: "FAILED",
    NodeStatus.INTERRUPTED: "KILLED",
}
"""MLflow's status of a node; a skipped or pending one has no MLflow run."""

RUN_STATUS: Mapping[str, str] = {
    "running": "RUNNING",
    "completed": "FINISHED",
    "rejected": "FINISHED",
    "inconclusive": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}
"""MLflow's status of the parent run."""

_OTHER = re.compile(r"[^\w\-. :/]", re.ASCII)


def experiment_of(client: MlflowClient, pipeline: str, artifacts: Path | None) -> str:
    """Return the id of a pipeline's experiment, created if need be.

    Args:
        client: The client.
        pipeline: The pipeline's name is the experiment's.
        artifacts: Where a local experiment would keep artifacts; a server decides by itself.
    """
    found = client.get_experiment_by_name(pipeline)
    if found is None:
        location = (artifacts / _OTHER.sub("_", pipeline).replace("/", "_")).as_uri() if artifacts else None
        return client.create_experiment(pipeline, artifact_location=location)
    if found.lifecycle_stage != "active":
        raise StoreError(
            f"the MLflow experiment {pipeline!r} was deleted",
            fix="restore it in MLflow (`mlflow experiments restore`), or delete it for good (`mlflow gc`)",
        )
    return str(found.experiment_id)


def runs_of(client: MlflowClient, run: str) -> dict[str, Run]:
    """Return the MLflow runs of `run` by node; the parent stands under the empty name."""
    experiments = [found.experiment_id for found in _pages(client.search_experiments)]
    rows = _pages(client.search_runs, experiment_ids=experiments, filter_string=f"tags.`{RUN}` = '{run}'")
    return {row.data.tags.get(NODE, ""): row for row in rows}


class TrackedRun:
    """One MLflow run and what is known to be in it, so that only what is missing is sent."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client = client
        self.id: str = run.info.run_id
        self.status: str = run.info.status
        self.tags: dict[str, str] = dict(run.data.tags)
        self.params: set[str] = set(run.data.params)
        self.points: set[Point] | None = None if run.data.metrics else set()
        self.datasets = (
            {_dataset_identity(entry) for entry in run.inputs.dataset_inputs} if run.inputs else set()
        )
        self.models_in = {entry.model_id for entry in run.inputs.model_inputs} if run.inputs else set()
        self.models_out = {entry.model_id for entry in run.outputs.model_outputs} if run.outputs else set()

    @classmethod
    def find_or_create(
        cls,
        client: MlflowClient,
        known: Run | None,
        experiment: str,
        name: str,
        started: float,
        tags: dict[str, str],
    ) -> TrackedRun:
        """Take up `known`, or create a run together with its tags: a crash leaves no nameless run."""
        if known is None:
            created = client.create_run(experiment, start_time=int(started * 1000), tags=tags, run_name=name)
            return cls(client, created)
        return cls(client, client.get_run(known.info.run_id))  # a search leaves out model inputs and outputs

    def reopen(self) -> None:
        """Make an ended run a running one again: a resume goes on in the same run."""
        if self.status != "RUNNING":
            self.client.update_run(self.id, status="RUNNING")
            self.status = "RUNNING"

    def end(self, status: str, ended: float) -> None:
        """Give the run its final status. Written last: a run that has one is complete."""
        if self.status != status:
            self.client.set_terminated(self.id, status=status, end_time=int(ended * 1000))
            self.status = status

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set the tags that differ."""
        from mlflow.entities import RunTag

        changed = {
            key: value[:LONGEST_TAG]
            for key, value in tags.items()
            if self.tags.get(key) != value[:LONGEST_TAG]
        }
        for batch in _batches(list(changed.items()), PARAMS_PER_BATCH):
            self.client.log_batch(
                self.id, tags=[RunTag(key, value) for key, value in batch], synchronous=True
            )
        self.tags |= changed

    def param(self, config: Mapping[str, Any]) -> None:
        """Log the options that are not there yet; MLflow's params cannot be changed."""
        from mlflow.entities import Param

        missing = {key: value for key, value in flatten(config).items() if key not in self.params}
        for batch in _batches(list(missing.items()), PARAMS_PER_BATCH):
            self.client.log_batch(
                self.id, params=[Param(key, value) for key, value in batch], synchronous=True
            )
            self.params |= {key for key, _ in batch}

    def measure(self, measures: Measures) -> None:
        """Log the points that are not there yet, each metric and step once, in order of steps."""
        from mlflow.entities import Metric

        if self.points is None:
            self.points = self._logged({name for name, _ in measures.values})
        missing = sorted(measures.values.keys() - self.points, key=lambda point: (point[1], point[0]))
        for batch in _batches(missing, METRICS_PER_BATCH):
            metrics = []
            for name, step in batch:
                value, moment = measures.values[name, step]
                metrics.append(Metric(name, value, int(moment * 1000), step))
            self.client.log_batch(self.id, metrics=metrics, synchronous=True)
            self.points |= set(batch)

    def _logged(self, names: set[str]) -> set[Point]:
        return {
            (name, entry.step) for name in names for entry in self.client.get_metric_history(self.id, name)
        }

    def show(self, tables: Mapping[str, Rows]) -> None:
        """Write the tables that are not there in this state yet; the tags that say so come last."""
        wanted = table_tags(tables)
        changed = [name for name in tables if self.tags.get(f"{TAG}{name}") != wanted[f"{TAG}{name}"]]
        for name in changed:
            self.client.log_text(self.id, table_text(tables[name]), table_path(name))
        if changed:
            shown = json.dumps([{"path": table_path(name), "type": "table"} for name in sorted(tables)])
            self.tag({SHOWN: shown, **wanted})

    def link(self, datasets: Sequence[Any], models_in: Sequence[str], models_out: Sequence[str]) -> None:
        """Add the inputs and outputs that are not there yet.

        Args:
            datasets: `mlflow.entities.DatasetInput`s.
            models_in: Ids of logged models.
            models_out: Ids of logged models.
        """
        from mlflow.entities import LoggedModelInput, LoggedModelOutput

        fresh = [entry for entry in datasets if _dataset_identity(entry) not in self.datasets]
        taken = [model for model in dict.fromkeys(models_in) if model not in self.models_in]
        made = [model for model in dict.fromkeys(models_out) if model not in self.models_out]
        if fresh or taken:
            self.client.log_inputs(
                self.id, datasets=fresh, models=[LoggedModelInput(model) for model in taken]
            )
            self.datasets |= {_dataset_identity(entry) for entry in fresh}
            self.models_in |= set(taken)
        if made:
            self.client.log_outputs(self.id, [LoggedModelOutput(model, step=0) for model in made])
            self.models_out |= set(made)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted keys and short texts: `{"loss": {"beta": 0.1}}` becomes `{"loss.beta": "0.1"}`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = _OTHER.sub("_", f"{prefix}{key}")[:250]
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            flat[name] = text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - 1] + "…"
    return flat


def _dataset_identity(entry: Any) -> tuple[str, str]:
    return entry.dataset.name, entry.dataset.digest


def _pages(search: Any, **arguments: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(**arguments, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
