"""Projections of a live run: trackers are synced in the background and can never fail a stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from posttrain.contracts.tracker import Tracker

_PERIOD = 3.0
"""Seconds between two syncs of a live run."""


class Projection:
    """Syncs trackers with a run while it lives, and once more at its end.

    A tracker that raises is left alone until the end and noted once; `posttrain sync` replays what it missed.

    Args:
        trackers: The trackers by name; a value is called to make one, since that may import its library.
        workspace: The `.posttrain` directory.
        run: The run's id.
        note: Tells the person who watches.
    """

    def __init__(
        self,
        trackers: Mapping[str, Callable[[], Tracker]],
        workspace: Path,
        run: str,
        note: Callable[[str], None],
    ) -> None:
        self._makers = trackers
        self._made: dict[str, Tracker] = {}
        self._out: set[str] = set()
        self._workspace = workspace
        self._run = run
        self._note = note
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="projection", daemon=True)

    def __enter__(self) -> Projection:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._out.clear()
        self._sync(final=True)

    def _follow(self) -> None:
        while not self._ending.wait(_PERIOD):
            self._sync(final=False)

    def _sync(self, *, final: bool) -> None:
        for name, make in self._makers.items():
            if name in self._out:
                continue
            try:
                tracker = self._made.setdefault(name, make()) if name not in self._made else self._made[name]
                tracker.sync(self._workspace, self._run)
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises must not reach a stage
                self._out.add(name)
                if final:
                    self._note(
                        f"{name} does not have this run ({_brief(error)}); `posttrain sync` replays it"
                    )


def _brief(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
