"""Outputs that are about to be committed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from helpers.stores import ROWS, write

from posttrain.artifacts.kinds import DatasetFacts
from posttrain.artifacts.store import Store

FACTS = DatasetFacts(format="text", rows=1)


def scratch(store: Store, payload: dict[str, bytes] = ROWS) -> Path:
    return write(store.scratch("load.data"), payload)


def damage(path: Path, data: bytes | None) -> None:
    """Change or remove a committed file behind the store's back."""
    path.parent.chmod(0o755)
    path.unlink()
    if data is not None:
        path.write_bytes(data)


def fail_with(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail
