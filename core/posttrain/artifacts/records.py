"""Key records: what a key gave, `store/keys/<key>.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.errors import StoreError


class KeyRecord(BaseModel):
    """What a key gave. It counts only as long as its outputs verify.

    Args:
        key: Hash of the ingredients.
        uses: The stage's name.
        node: The node that built it first.
        run: The run that built it.
        ingredients: What the key was computed from.
        outputs: Artifact digests by port.
        status: How the stage came out.
        figures: Key figures, non-finite ones included.
        summary: One line for people.
        seconds: How long the stage took.
        versions: Library versions (drift, not part of the key).
        device: The device it ran on.
        threads: CPU threads it ran with.
        created: When, ISO 8601 in UTC.
        pipeline: The pipeline of that run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    key: str
    uses: str
    node: str
    run: str
    ingredients: dict[str, Any]
    outputs: dict[str, str]
    status: Literal["completed", "rejected", "inconclusive"]
    figures: dict[str, float] = {}
    summary: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = {}
    device: str | None = None
    threads: int | None = None
    created: str
    pipeline: str | None = None


def read_record(path: Path, key: str) -> KeyRecord | None:
    """Read the record of a key, None when there is none.

    Raises:
        StoreError: When it is damaged or another key's.
    """
    fix = "remove this file; the node is then built again"
    try:
        record = KeyRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StoreError("a key record is damaged", where=str(path), found=error, fix=fix) from error
    if record.key != key:
        raise StoreError(
            "a key record is another key's", where=str(path), found=record.key, expected=key, fix=fix
        )
    return record
