"""The model registry in MLflow, reconciled with the workspace's own: versions once each, aliases with care.

Each registered model carries a tag for each alias with the MLflow version that this projection set. An alias
that points elsewhere was moved by somebody else, and is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.artifacts.aliases import Aliases, Version
from posttrain.artifacts.store import Store
from posttrain.errors import StoreError
from posttrain_pipelines.tracking.lineage import DIGEST
from posttrain_pipelines.tracking.runs import NODE, runs_of

if TYPE_CHECKING:
    from mlflow.entities.model_registry import RegisteredModel
    from mlflow.tracking.client import MlflowClient

VERSION = "posttrain.version"
SET_BY_US = "posttrain.alias."
UNSET = "-"
"""Stands for an alias that points nowhere."""


def reconcile(client: MlflowClient, aliases: Aliases, store: Store) -> list[StoreError]:
    """Bring versions and aliases of every registered name into MLflow; return the conflicts found."""
    conflicts: list[StoreError] = []
    for name in aliases.names():
        versions = aliases.versions(name)
        if versions:
            numbers = _versions(client, name, versions, store)
            model = client.get_registered_model(name)
            for alias, version in aliases.aliases(name).items():
                conflicts += _alias(client, model, alias, numbers[version])
    return conflicts


def _versions(client: MlflowClient, name: str, versions: list[Version], store: Store) -> Mapping[int, str]:
    """Return MLflow's version numbers by ours, registering what is missing in our order."""
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    found = client.search_model_versions(f"name = '{name}'")
    numbers = {int(entry.tags[VERSION]): str(entry.version) for entry in found if VERSION in entry.tags}
    for version in versions:
        if version.version not in numbers:
            created = client.create_model_version(
                name,
                source=store.get(version.digest).path.as_uri(),
                run_id=_maker(client, version),
                tags={VERSION: str(version.version), DIGEST: version.digest},
                await_creation_for=0,
            )
            numbers[version.version] = str(created.version)
    return numbers


def _maker(client: MlflowClient, version: Version) -> str | None:
    """Return the MLflow run of the node that made a version, if it was tracked."""
    for row in runs_of(client, version.run).values():
        if row.data.tags.get(NODE) == version.node:
            return str(row.info.run_id)
    return None


def _alias(client: MlflowClient, model: RegisteredModel, alias: str, wanted: str) -> list[StoreError]:
    tag = SET_BY_US + alias
    recorded = model.tags.get(tag, UNSET)
    actual = str(model.aliases.get(alias, UNSET))
    if actual != wanted and actual not in recorded.split(","):
        return [_conflict(model.name, alias, actual, wanted)]
    if actual != wanted:
        # both are ours until the move is done: a crash in between must not look like somebody else's change
        client.set_registered_model_tag(model.name, tag, f"{actual},{wanted}")
        client.set_registered_model_alias(model.name, alias, wanted)
    if recorded != wanted:
        client.set_registered_model_tag(model.name, tag, wanted)
    return []


def _conflict(name: str, alias: str, actual: str, wanted: str) -> StoreError:
    return StoreError(
        f"the alias `{alias}` of `{name}` was changed in MLflow by somebody else; it is left as it is",
        found="no such alias" if actual == UNSET else f"MLflow version {actual}",
        expected=f"MLflow version {wanted}",
        fix=f"set `{alias}` to version {wanted} in MLflow, or promote the model that it points at",
    )
