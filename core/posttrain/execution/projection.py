"""Projections of a live run: trackers are synced in the background and can never fail a stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from posttrain.contracts.tracker import Tracker

_PERIOD = 3.0
"""Seconds between two syncs of a live run."""
_RECENT = 15.0
"""A tracker that failed so many seconds before the end is not asked again: its server is still gone."""
_PATIENCE = 30.0
"""Seconds that the end of a run may be held up."""


class Projection:
    """Syncs trackers with a run while it lives, and once more at its end.

    A tracker that raises is left alone until the end and noted once; `posttrain sync` replays what it missed.
    All syncs happen in one thread of their own, so that one that hangs, or Ctrl-C, cannot change how a run ends.

    Args:
        trackers: The trackers by name; a value is called to make one, since that may import its library.
        workspace: The `.posttrain` directory.
        run: The run's id.
        note: Tells the person who watches.
        patience: Seconds to wait for the last sync.
    """

    def __init__(
        self,
        trackers: Mapping[str, Callable[[], Tracker]],
        workspace: Path,
        run: str,
        note: Callable[[str], None],
        patience: float = _PATIENCE,
    ) -> None:
        self._makers = trackers
        self._made: dict[str, Tracker] = {}
        self._failed: dict[str, tuple[float, Exception]] = {}
        self._remarks: dict[str, None] = {}
        self._complete: set[str] = set()
        self._workspace = workspace
        self._run = run
        self._note = note
        self._patience = patience
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="projection", daemon=True)

    def __enter__(self) -> Projection:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        reason = f"it did not answer within {self._patience:g} s"
        try:
            self._thread.join(self._patience)
        except KeyboardInterrupt:
            reason = "nobody waited for it"
        for remark in list(self._remarks):
            self._note(remark)
        for name in [name for name in self._makers if name not in self._complete]:
            failure = self._failed.get(name)
            why = reason if failure is None else _brief(failure[1])
            self._note(f"{name} does not have this run ({why}); `posttrain sync` replays it")

    def _follow(self) -> None:
        while not self._ending.wait(_PERIOD):
            for name in [name for name in self._makers if name not in self._failed]:
                self._sync(name)
        for name in self._makers:
            if not self._failed_recently(name):
                self._failed.pop(name, None)
                if self._sync(name):
                    self._complete.add(name)

    def _failed_recently(self, name: str) -> bool:
        failure = self._failed.get(name)
        return failure is not None and time.monotonic() - failure[0] < _RECENT

    def _sync(self, name: str) -> bool:
        """Sync one tracker and say whether it took everything."""
        try:
            if name not in self._made:
                self._made[name] = self._makers[name]()
            for remark in self._made[name].sync(self._workspace, self._run) or ():
                self._remarks[f"{name}: {remark}"] = None
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises must not reach a stage
            self._failed[name] = time.monotonic(), error
            return False
        return True


def _brief(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
