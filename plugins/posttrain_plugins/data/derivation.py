"""Datasets that are made of the rows of another one, with what belongs to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import DatasetFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Input
from posttrain_plugins.data.images.image import FOLDER, copy_images
from posttrain_plugins.data.rows import write_rows

Row = Mapping[str, Any]


def write_derived(
    directory: Path, rows: Iterable[Row], source: Artifact, format: str | None = None
) -> DatasetFacts:
    """Write rows of a dataset, and the images that they name, as a dataset of its own.

    Args:
        directory: The output directory.
        rows: The rows.
        source: The dataset.
        format: Their format, where it is another one than that of the dataset.

    Raises:
        DataError: There are no rows.
    """
    images: set[str] = set()
    if (source.path / FOLDER).is_dir():
        rows = _noting(rows, images)
    facts = write_rows(directory, rows, format or str(source.facts.format), source.facts.policy)
    copy_images(images, source.path, directory)
    return facts


def expected(source: Input) -> DatasetFacts:
    """Return what is known of a dataset that will be made of some of the rows of another."""
    facts = source.facts
    plain = False if facts.conversational is False else None
    return DatasetFacts(format=facts.format, policy=facts.policy, conversational=plain)


def _noting(rows: Iterable[Row], images: set[str]) -> Iterable[Row]:
    """Pass rows on and note the image files that they name."""
    for row in rows:
        images.update(row.get("images") or ())
        yield row
