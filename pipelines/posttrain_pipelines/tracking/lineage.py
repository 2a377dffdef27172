"""Artifacts in MLflow: datasets as inputs, models by reference. No weight is copied."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.artifacts.store import Store

if TYPE_CHECKING:
    from mlflow.tracking.client import MlflowClient

DIGEST = "posttrain.digest"
LONGEST_DATASET_DIGEST = 36
MODELS = frozenset({Kind.MODEL, Kind.ADAPTER, Kind.REWARD_MODEL, Kind.PROCESS_REWARD_MODEL})
DATASETS = frozenset({Kind.DATASET, Kind.ROLLOUTS, Kind.LOG_PROBS})

_NOT_IN_MODEL_NAMES = re.compile(r"[/:.%\"']")


class Lineage:
    """Finds or creates the MLflow entities that stand for artifacts."""

    def __init__(self, client: MlflowClient, store: Store, experiment: str) -> None:
        self._client = client
        self._store = store
        self._experiment = experiment
        self._models: dict[str, str] = {}

    def datasets(self, inputs: Mapping[str, list[str]]) -> list[Any]:
        """Return `DatasetInput`s for the datasets among a node's inputs, by port."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        return [
            DatasetInput(
                Dataset(
                    name=self._name(artifact),
                    digest=artifact.digest[:LONGEST_DATASET_DIGEST],
                    source_type="posttrain",
                    source=json.dumps({"digest": artifact.digest, "path": str(artifact.path)}),
                ),
                [InputTag("mlflow.data.context", port)],
            )
            for port, digests in inputs.items()
            for artifact in self._present(digests, DATASETS)
        ]

    def models(self, digests: Iterable[str], maker: str | None = None) -> list[str]:
        """Return the ids of the logged models of those digests that are models.

        Args:
            digests: Artifacts of any kind.
            maker: The MLflow run that makes them; None when they are inputs.
        """
        return [self._model(artifact, maker) for artifact in self._present(digests, MODELS)]

    def _present(self, digests: Iterable[str], kinds: frozenset[Kind]) -> list[Artifact]:
        """Return the artifacts of these kinds. One that was collected since is left to its tag."""
        found = [self._store.get(digest) for digest in digests if self._store.has(digest)]
        return [artifact for artifact in found if artifact.kind in kinds]

    def _model(self, artifact: Artifact, maker: str | None) -> str:
        if artifact.digest not in self._models:
            self._models[artifact.digest] = self._find_model(artifact.digest) or self._create_model(
                artifact, maker
            )
        return self._models[artifact.digest]

    def _find_model(self, digest: str) -> str | None:
        experiments = [found.experiment_id for found in self._client.search_experiments()]
        found = self._client.search_logged_models(experiments, filter_string=f"tags.`{DIGEST}` = '{digest}'")
        if not found:
            return None
        if str(found[0].status) != "READY":
            self._client.finalize_logged_model(found[0].model_id, "READY")
        return str(found[0].model_id)

    def _create_model(self, artifact: Artifact, maker: str | None) -> str:
        created = self._client.create_logged_model(
            self._experiment,
            name=_NOT_IN_MODEL_NAMES.sub("-", self._name(artifact)),
            source_run_id=maker,
            model_type=artifact.kind.value,
            tags={
                DIGEST: artifact.digest,
                "posttrain.ref": artifact.ref,
                "posttrain.path": str(artifact.path),
                "mlflow.model.isExternal": "true",
            },
        )
        self._client.finalize_logged_model(created.model_id, "READY")
        return str(created.model_id)

    def _name(self, artifact: Artifact) -> str:
        origin = self._store.provenance(artifact.digest)
        return f"{origin.node}.{origin.port}" if origin else artifact.ref
