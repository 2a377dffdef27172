"""No secret reaches a server: everything that leaves the process passes one of these."""

from __future__ import annotations

import os
import re
from pathlib import Path

from posttrain.planning.secrets import Redactor, looks_like_secret

_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")


def redactor_of(run: Path) -> Redactor:
    """Return a redactor that knows the secrets a run refers to, and those that the environment names as such.

    Args:
        run: The run's directory; its snapshot and journal hold references (`env:NAME`), never values.
    """
    records = [run / name for name in ("pipeline.json", "journal.jsonl")]
    text = "".join(record.read_text(errors="replace") for record in records if record.exists())
    declared = set(_REFERENCE.findall(text))
    return Redactor(
        value for name, value in os.environ.items() if name in declared or looks_like_secret(name, value)
    )
