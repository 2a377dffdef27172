"""SIGKILL at a random moment of a real run, then `posttrain resume` until it is done, and what must be true then."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helpers.products import NODES, Product, Tracked, processes_in, workers_of

from posttrain.artifacts.sealing import read_manifest
from posttrain.errors import StoreError

MOST_RESUMES = 3
_PATIENCE = 120.0
_RUN = ("run", "tiny.yaml", "--runner", "sequential", "--quiet")


@dataclass(frozen=True)
class Reference:
    """What a run gives that nothing happens to, and how long each stage and each worker takes."""

    outputs: Mapping[str, Mapping[str, str]]
    seconds: Mapping[str, float]
    lives: Mapping[str, float]

    @classmethod
    def of(cls, product: Product) -> Reference:
        """Run the pipeline undisturbed."""
        process = product.start(*_RUN)
        seen: dict[str, list[float]] = {}
        while process.poll() is None:
            if workers_of(process.pid):
                seen.setdefault(product.started()[-1].node, []).append(time.monotonic())
            time.sleep(0.01)
        out, err = process.communicate()
        assert process.returncode == 0, out + err
        seconds = {name: node["end"]["seconds"] for name, node in product.nodes().items()}
        return cls(product.digests(), seconds, {name: times[-1] - times[0] for name, times in seen.items()})

    def delay(self, moment: Moment) -> float:
        """Seconds between the start of the victim (a stage's worker, or the stage for the parent) and its death."""
        return moment.share * {"worker": self.lives, "parent": self.seconds}[moment.victim][moment.stage]


@dataclass(frozen=True)
class Moment:
    """When to kill, and whom: drawn from a seed."""

    seed: int
    stage: str
    share: float
    """Of the usual time of the victim, the stage's worker or the stage; a little above 1 lies between two stages."""
    victim: str

    @classmethod
    def drawn(cls, seed: int, stages: tuple[str, ...] = NODES) -> Moment:
        """Draw a moment."""
        dice = random.Random(seed)
        return cls(seed, dice.choice(stages), dice.uniform(0.0, 1.1), dice.choice(("worker", "parent")))


@dataclass
class Story:
    """What one kill did and what became of the run."""

    moment: Moment
    stage: str = ""
    """Which stage ran when somebody died: the moment's, unless that had ended already."""
    codes: list[int] = field(default_factory=list)
    equal: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def resumes(self) -> int:
        """How often the run had to be resumed."""
        return len(self.codes) - 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {**asdict(self), "resumes": self.resumes}


class ObjectWatcher:
    """Looks at the store all the time: what is visible there must be complete from the first moment."""

    def __init__(self, objects: Path) -> None:
        self._objects = objects
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: set[str] = set()
        self.broken: list[str] = []

    def __enter__(self) -> ObjectWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self._look()

    def _look(self) -> None:
        if not self._objects.is_dir():
            return
        for path in self._objects.iterdir():
            if path.name in self.seen:
                continue
            self.seen.add(path.name)
            try:
                manifest = read_manifest(path, path.name)
                sizes = {entry.path: (path / entry.path).stat().st_size for entry in manifest.files}
                if sizes != {entry.path: entry.size for entry in manifest.files}:
                    self.broken.append(f"{path.name}: files are shorter than the manifest says")
            except (StoreError, OSError) as error:
                self.broken.append(f"{path.name}: {error}")


def disturbed(product: Product, moment: Moment, reference: Reference) -> Story:
    """Run the pipeline, kill at the moment, resume until it is done, and look at everything."""
    story = Story(moment)
    with ObjectWatcher(product.objects) as watcher:
        process = product.start(*_RUN)
        _wait(process, lambda: moment.stage in {entry.node for entry in product.started()})
        if moment.victim == "worker":
            _wait(process, lambda: workers_of(process.pid))
        time.sleep(reference.delay(moment))
        if moment.victim == "worker":
            _wait(process, lambda: any([_dies(pid) for pid in workers_of(process.pid)]))
        else:
            process.kill()
        story.stage = product.started()[-1].node
        process.communicate(timeout=_PATIENCE)
        story.codes.append(process.returncode)
        while (state := product.status()["status"]) != "completed" and story.resumes < MOST_RESUMES:
            story.codes.append(product("resume", "--quiet").code)
        if story.resumes == 0:  # the last stage had ended already, but MLflow may not know
            product("sync")
    story.equal = state == "completed" and product.digests() == reference.outputs
    story.problems = [*watcher.broken, *_problems(product)]
    return story


def _wait(process: subprocess.Popen[str], condition: Callable[[], Any]) -> None:
    """Wait until the condition is true or the run is over."""
    deadline = time.monotonic() + _PATIENCE
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "this did not come true"
        time.sleep(0.005)


def _dies(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _problems(product: Product) -> list[str]:
    """Say what is not as it has to be after a run that was killed and resumed."""
    found = [f"left running: {process.cmdline()}" for process in processes_in(product.base)]
    verified = product("store", "verify", "--full")
    if verified.code != 0:
        found.append(verified.text)
    product("store", "gc", "--delete")
    for place in ("store/tmp", "work"):
        found += [f"left behind: {path}" for path in (product.workspace / place).glob("*")]
    tracked = Tracked(product.workspace)
    found += [f"in MLflow more than once: {row}" for row in tracked.repeated()]
    runs = tracked.runs(product.runs[-1].run)
    if set(runs) != {"", *NODES}:
        found.append(f"in MLflow are {sorted(runs)}")
    found += [
        f"in MLflow {node or 'the run'} is {status}"
        for node, entries in runs.items()
        for _, status in entries
        if status != "FINISHED"
    ]
    return found
