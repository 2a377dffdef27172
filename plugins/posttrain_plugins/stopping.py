"""What long work in a stage calls between its parts: it tells how far it is, and ends where a stop was asked for."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.contracts.stage import StageContext
from posttrain.errors import Interrupted

Pause = Callable[[int, int | None], None]
"""Called with how much is done, and of how much; may raise to stop."""


def pauses(context: StageContext, unit: str, work: str) -> Pause:
    """Return what a stage calls between parts of work that nothing keeps when it is broken off.

    Args:
        context: The stage's.
        unit: What is counted, such as `rows`.
        work: What was asked to stop, for the message.

    Raises:
        Interrupted: Where it is called after the stage was asked to stop.
    """

    def pause(done: int, total: int | None) -> None:
        context.progress(done, total, unit)
        if context.stopping:
            of = "" if total is None else f" of {total}"
            raise Interrupted(
                f"{work} was asked to stop",
                where=f"{done}{of} {unit}",
                fix="`posttrain resume` starts it again",
            )

    return pause
