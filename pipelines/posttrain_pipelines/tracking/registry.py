"""The model registry in MLflow, reconciled with the workspace's own: versions once each, aliases with care.

Each registered model carries a tag for each alias with the MLflow version that this projection set. An alias
that points elsewhere was moved by somebody else, and is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.artifacts.aliases import Aliases, Version
from posttrain.artifacts.store import Store
from posttrain_pipelines.tracking.lineage import DIGEST
from posttrain_pipelines.tracking.runs import NODE, runs_of

if TYPE_CHECKING:
    from mlflow.entities.model_registry import RegisteredModel
    from mlflow.tracking.client import MlflowClient

VERSION = "posttrain.version"
SET_BY_US = "posttrain.alias."
UNSET = "-"
"""Stands for an alias that points nowhere."""


@dataclass(frozen=True)
class Conflict:
    """An alias that somebody moved in MLflow.

    Args:
        name: The registered name.
        alias: The alias.
        version: Our version that the alias should point at.
        wanted: The same version by MLflow's number.
        actual: MLflow's number of the version it points at.
    """

    name: str
    alias: str
    version: int
    wanted: str
    actual: str

    @property
    def identity(self) -> tuple[str, str, str]:
        """What a later look compares."""
        return self.name, self.alias, str(self.version)

    @property
    def text(self) -> str:
        """What holds the alias, and what to do."""
        holder = "points nowhere" if self.actual == UNSET else f"points at MLflow version {self.actual}"
        return (
            f"in MLflow somebody else changed the alias `{self.alias}` of `{self.name}`: it {holder}, not at"
            f" version {self.wanted}, and is left as it is. Set it to version {self.wanted} in MLflow, or"
            " promote the model that it points at"
        )


def reconcile(client: MlflowClient, aliases: Aliases, store: Store) -> list[Conflict]:
    """Bring versions and aliases of every registered name into MLflow; return the conflicts found."""
    conflicts: list[Conflict] = []
    for name in aliases.names():
        versions = aliases.versions(name)
        if versions:
            numbers = _versions(client, name, versions, store)
            model = client.get_registered_model(name)
            for alias, version in aliases.aliases(name).items():
                actual = _alias(client, model, alias, numbers[version])
                if actual is not None:
                    conflicts.append(Conflict(name, alias, version, numbers[version], actual))
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


def _alias(client: MlflowClient, model: RegisteredModel, alias: str, wanted: str) -> str | None:
    """Move an alias if it is ours to move; else return the version that it points at."""
    tag = SET_BY_US + alias
    recorded = model.tags.get(tag, UNSET)
    actual = str(model.aliases.get(alias, UNSET))
    if actual != wanted and actual not in recorded.split(","):
        return actual
    if actual != wanted:
        # both are ours until the move is done: a crash in between must not look like somebody else's change
        client.set_registered_model_tag(model.name, tag, f"{actual},{wanted}")
        client.set_registered_model_alias(model.name, alias, wanted)
    if recorded != wanted:
        client.set_registered_model_tag(model.name, tag, wanted)
    return None
