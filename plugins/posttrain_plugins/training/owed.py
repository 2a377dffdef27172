"""An evaluation that a request to stop has broken off: a resume makes up for it before it trains on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from posttrain_plugins.training.checkpoints import MANIFEST, PROGRESS, Checkpoint, load_state
from posttrain_plugins.training.loop import Loop


def settled(loop: Loop, checkpoint: Checkpoint) -> Checkpoint:
    """Evaluate the weights of a checkpoint, if that is owed, and return it with what the evaluation came to.

    Where it is broken off again, the checkpoint stays as it is and the evaluation owed.
    """
    progress = load_state(checkpoint.path, PROGRESS)
    if loop.evaluation is None or not progress["evaluation"].get("owed"):
        return checkpoint
    loop.take_over(checkpoint)
    loop.evaluate()
    if loop.evaluation.owed:
        return checkpoint
    if loop.ended:
        loop.companions.last_step(checkpoint.step)
    fill = partial(_fill, loop, checkpoint.path, progress["scheduler"])
    return loop.checkpoints.write(checkpoint.step, fill, loop.needed, loop.parallel)


def _fill(loop: Loop, source: Path, scheduler: Mapping[str, Any], directory: Path) -> None:
    """Copy a checkpoint and write anew what the evaluation has changed; rank 0 does it for all."""
    if loop.parallel.rank > 0:
        return
    for path in source.iterdir():
        if path.name != MANIFEST:
            shutil.copyfile(path, directory / path.name)
    loop.write_progress(directory, scheduler)
