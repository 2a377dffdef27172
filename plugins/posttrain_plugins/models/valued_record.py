"""What a model that gives numbers says of some conversations, kept with it: it must say so again where it is opened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.artifacts.kinds import ScoreFacts
from posttrain.errors import DataError
from posttrain_plugins.templates.tokenizer import read_json

VALUES = "values.json"
"""The file beside the weights."""


@dataclass(frozen=True)
class Probe:
    """One token sequence, and the numbers that the model gives at some of its tokens.

    Args:
        tokens: The token ids.
        places: Indices of the tokens that numbers are read at, ascending.
        values: The numbers, computed in float32.
    """

    tokens: tuple[int, ...]
    places: tuple[int, ...]
    values: tuple[float, ...] = ()


def write_record(directory: Path, scores: ScoreFacts | None, probes: Sequence[Probe]) -> None:
    """Write what a model came to beside its weights."""
    record = {
        "scores": None if scores is None else scores.model_dump(mode="json"),
        "probes": [asdict(probe) for probe in probes],
    }
    (directory / VALUES).write_text(json.dumps(record, sort_keys=True) + "\n", encoding="utf-8")


def scores_of(directory: Path) -> ScoreFacts | None:
    """Return the statistics that stand beside a model's weights, or None.

    Raises:
        DataError: The file is malformed.
    """
    found = read_json(directory / VALUES).get("scores")
    try:
        return None if found is None else ScoreFacts.model_validate(found)
    except ValueError as error:
        raise _malformed(directory, error) from error


def probes_of(directory: Path) -> list[Probe]:
    """Return the conversations that a model can be tried on; none where nobody has kept any.

    Raises:
        DataError: The file is malformed.
    """
    found: list[dict[str, Any]] = read_json(directory / VALUES).get("probes", [])
    try:
        return [Probe(*(tuple(each[name]) for name in ("tokens", "places", "values"))) for each in found]
    except (KeyError, TypeError) as error:
        raise _malformed(directory, error) from error


def _malformed(directory: Path, error: Exception) -> DataError:
    return DataError(
        f"`{VALUES}` is not what a reward model keeps there",
        where=str(directory),
        found=repr(error),
        fix="put the file back as it was, or remove it: then nothing tells whether the head is the trained one",
    )
