"""Processes that take turns: each does one step, then the next one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.execution.environment import worker_environment

HERE = Path(__file__).parent
OURS = ("posttrain_side.py", "profile_side.py")
"""Run in the environment that a stage's process gets."""
THREADS = 2
ROUNDS = ("reference", "step")
"""Nobody takes a step before everybody is done with the reference."""
MACHINE, PRODUCTS = "machine", ("product", "quick product")


@dataclass
class Measured:
    """What one process told.

    Args:
        seconds: Of each piece of work, by kind.
        processor: Seconds of processor time of each, over all threads.
        facts: Everything else.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"seconds": self.seconds, "processor": self.processor, **self.facts}


class Side:
    """One process that works when it is told to.

    Args:
        script: The side, a file of this directory.
        job: What it is told first.
        log: Where its output goes.
    """

    def __init__(self, script: str, job: Mapping[str, Any], log: Path) -> None:
        self.log, self.measured, self.at = log, Measured(), ""
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        environment = {**os.environ, **_environment(job)}
        if script in OURS:
            environment = worker_environment(environment, threads=job["threads"])
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script), str(commands), str(events)],
                pass_fds=(commands, events),
                stdout=output,
                stderr=output,
                cwd=job["directory"],
                env=environment,
            )
        os.close(commands)
        os.close(events)
        self._out, self._in = os.fdopen(self._commands, "w"), os.fdopen(self._events)
        self._say(json.dumps(job))

    def reach(self) -> str:
        """Read events up to the next piece of work; return its kind, or nothing at the end."""
        for line in self._in:
            event = json.loads(line)
            if "at" in event:
                self.at = event["at"]
                return self.at
            if "seconds" in event:
                self.measured.seconds.setdefault(self.at, []).append(event.pop("seconds"))
                self.measured.processor.setdefault(self.at, []).append(event.pop("processor"))
            self.measured.facts |= event
        self.at = ""
        if self._process.wait():
            raise SystemExit(f"{self.log.stem} failed:\n{self.log.read_text()[-3000:]}")
        return ""

    def go(self) -> None:
        """Let it do one piece of work, and wait for that."""
        self._say("go")
        self.reach()

    def stop(self) -> None:
        """End it, wherever it is."""
        self._out.close()
        self._process.terminate()
        self._process.wait()
        self._in.close()

    def _say(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()


def _environment(job: Mapping[str, Any]) -> dict[str, str]:
    threads = str(job["threads"])
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Threads that spin for long multiply all times when anything else wants a core.
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }


def together(jobs: Mapping[str, tuple[str, Mapping[str, Any]]], machine: bool = True) -> dict[str, Any]:
    """Run sides in turns, each after the other, until all are done.

    Args:
        jobs: Script and job of each side, by name.
        machine: Measure the machine's matrix products between the turns.
    """
    directory = Path(next(iter(jobs.values()))[1]["directory"]).parent
    directory.mkdir(parents=True, exist_ok=True)
    chosen = dict(jobs)
    if machine:
        chosen[MACHINE] = ("machine_side.py", {"threads": THREADS, "directory": str(directory)})
    sides: dict[str, Side] = {}
    try:
        for name, (script, job) in chosen.items():
            Path(job["directory"]).mkdir(parents=True, exist_ok=True)
            sides[name] = Side(script, job, directory / f"{name.replace(' ', '-')}.log")
        for side in sides.values():
            side.reach()
        _take_turns([sides[name] for name in jobs], sides.get(MACHINE))
    finally:
        for side in sides.values():
            side.stop()
    return {name: side.measured.described() for name, side in sides.items()}


def _take_turns(sides: Sequence[Side], machine: Side | None) -> None:
    for kind in ROUNDS:
        while working := [side for side in sides if side.at == kind]:
            for side in working:
                side.go()
            if machine is not None:
                for _ in PRODUCTS:
                    machine.go()
