"""The target of every offline trainer: starts the ranks; the rest is what each of them does.

Light but for torch, and it has to be. Ranks are forked, and a process in which a library has looked for GPUs, as some
do when they are imported, has children that cannot use any.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from posttrain.contracts.component import Component
from posttrain.contracts.registration import Group, load_target
from posttrain.contracts.stage import Outcome, StageContext
from posttrain.execution.machine import uncollected
from posttrain_plugins.launchers.local import together

if TYPE_CHECKING:
    from posttrain.contracts.backend import Parallel, Place


def run(context: StageContext) -> Outcome:
    """Train the policy of port `model` on the dataset of port `data` and put the result out as `model`.

    Raises:
        DataError: No row can be trained on.
        TrainingDiverged: A loss, gradient or weight stopped being finite.
        Interrupted: The stage was asked to stop; a checkpoint has been written.
    """
    backend = context.component(context.config.backend, Group.BACKEND)
    return together(context, backend.plugin.ranks(backend.config), partial(_on_rank, backend))


def _on_rank(backend: Component, context: StageContext, place: Place) -> Outcome:
    """Train as one of the ranks; what rank 0 returns counts."""
    with uncollected():
        from posttrain_plugins.training.stage import train

    parallel: Parallel = load_target(backend.plugin.target)(place, backend.config)
    try:
        return train(context, parallel)
    finally:
        parallel.close()
