"""The end of a run under trackers that fail, hang or have something to say; no MLflow in here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from posttrain.execution import projection
from posttrain.execution.projection import Projection


class Told:
    """A tracker that does as it is told and counts."""

    def __init__(self, act: Callable[[], Sequence[str] | None]) -> None:
        self.calls = 0
        self._act = act

    def sync(self, workspace: Path, run: str) -> Sequence[str] | None:
        self.calls += 1
        return self._act()

    def behind(self, workspace: Path, run: str) -> bool:
        return False


def outage() -> None:
    raise ConnectionError("gone\nmore")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_PERIOD", 0.01)


def followed(tracker: Told, calls: int, patience: float = 30.0) -> list[str]:
    """Follow a run until the tracker was asked `calls` times, then end it, and return the notes."""
    notes: list[str] = []
    with Projection({"toy": lambda: tracker}, Path("w"), "r", notes.append, patience):
        while tracker.calls < calls:
            time.sleep(0.01)
    return notes


def test_a_tracker_that_just_failed_is_not_asked_again() -> None:
    tracker = Told(outage)
    assert followed(tracker, 1) == ["toy does not have this run (gone); `posttrain sync` replays it"]
    assert tracker.calls == 1


def test_a_tracker_that_failed_long_ago_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_RECENT", 0.0)
    fails = iter([True])
    tracker = Told(lambda: outage() if next(fails, False) else None)
    assert followed(tracker, 1) == []
    assert tracker.calls == 2


def test_a_tracker_that_hangs_holds_up_the_end_for_a_while_only() -> None:
    hang = threading.Event()
    tracker = Told(lambda: hang.wait() and None)
    (note,) = followed(tracker, 1, patience=0.2)
    assert note == "toy does not have this run (it did not answer within 0.2 s); `posttrain sync` replays it"
    hang.set()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT interrupt, though a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_tracker_is_waited_for_becomes_a_note() -> None:
    hang = threading.Event()
    tracker = Told(lambda: hang.wait() and None)
    notes: list[str] = []
    with Projection({"toy": lambda: tracker}, Path("w"), "r", notes.append):
        while not tracker.calls:
            time.sleep(0.01)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    (note,) = notes
    assert "nobody waited for it" in note
    hang.set()


def test_what_a_tracker_has_to_say_is_noted_once() -> None:
    tracker = Told(lambda: ["an alias was moved"])
    assert followed(tracker, 3) == ["toy: an alias was moved"]
