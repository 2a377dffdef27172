"""What each rank leaves in a checkpoint: its part of the optimizer's state and its random generators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.contracts.backend import Parallel
from posttrain.errors import StageError
from posttrain_plugins.training.checkpoints import STATE, load_state, save_state
from posttrain_plugins.training.randomness import random_state, restore_random_state

ABOUT = "ranks.json"
RANDOM = "random"


class Shares:
    """The files of the ranks in one checkpoint.

    Args:
        directory: The checkpoint.
        parallel: The ranks that write or read it.
    """

    def __init__(self, directory: Path, parallel: Parallel) -> None:
        self.directory, self.parallel = directory, parallel

    def save(self, optimizer: Any) -> None:
        """Write this rank's files."""
        parallel = self.parallel
        if parallel.rank == 0:
            about = {"layout": parallel.layout, "ranks": parallel.size}
            (self.directory / ABOUT).write_text(json.dumps(about))
        state = parallel.state(optimizer)
        if parallel.rank == 0 or parallel.layout:
            save_state(self.directory, state, self._state)
        save_state(self.directory, random_state(), f"{RANDOM}-{parallel.rank}")

    def load_optimizer(self, optimizer: Any) -> None:
        """Put the optimizer's state back.

        A state that is not split serves any number of ranks; a part serves its own rank alone.

        Raises:
            StageError: It is split in another way than this training needs it.
        """
        about = json.loads((self.directory / ABOUT).read_text())
        parallel = self.parallel
        same = about["layout"] == parallel.layout
        if not same or (parallel.layout and about["ranks"] != parallel.size):
            raise StageError(
                "the checkpoint was written by another backend or for another number of ranks",
                where=str(self.directory),
                found=_described(about["layout"], about["ranks"]),
                expected=_described(parallel.layout, parallel.size),
                fix="go on with the `backend` that it was written with; single and ddp can take each other's "
                f"place, with any number of ranks. Remove {self.directory.parent} to start from the first step",
            )
        parallel.restore(optimizer, load_state(self.directory, self._state))

    def load_random(self) -> None:
        """Put the generators back. A rank that was not there before keeps those that it started with."""
        name = f"{RANDOM}-{self.parallel.rank}"
        if (self.directory / f"{name}.json").is_file():
            restore_random_state(load_state(self.directory, name))

    @property
    def _state(self) -> str:
        return f"{STATE}-{self.parallel.rank}" if self.parallel.layout else STATE


def _described(layout: str, ranks: int) -> str:
    return (
        f"optimizer state split by {layout} over {ranks} ranks" if layout else "optimizer state in one piece"
    )
