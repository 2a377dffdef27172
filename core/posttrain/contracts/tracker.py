"""The tracker contract: an idempotent projection of a run's record into another system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Registered under `Group.TRACKER` as a class.

    `sync` may be called any number of times while the run lives and afterwards, from a thread of the parent; it adds
    what is missing and changes nothing that is there. What it raises becomes a note on the run.
    """

    def sync(self, workspace: Path, run: str) -> Sequence[str] | None:
        """Project the journal and the events of `run`.

        Returns:
            What a person should know although everything is there, such as a change that somebody else made.
        """

    def behind(self, workspace: Path, run: str) -> bool:
        """Whether the projection lacks something; cheap, imports nothing heavy."""
