"""Light stages for tests of execution, registered as a local plugin file that workers load too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, ClassVar

import posttrain
from posttrain.artifacts.kinds import DatasetFacts, Kind, ReportFacts
from posttrain.contracts.loss import Family
from posttrain.contracts.registration import Registration
from posttrain.contracts.stage import (
    Certainty,
    Finding,
    Inputs,
    Level,
    Outcome,
    Port,
    Secret,
    Source,
    Stage,
    StageConfig,
    StageContext,
    Verdict,
    VolatileMark,
)
from posttrain.contracts.trainer import Trainer
from posttrain.errors import DataError, Interrupted

POSTTRAIN_API = ">=1,<2"
DATA = frozenset({Kind.DATASET})
ROWS = "rows.jsonl"
PRELOADED = "colorsys"
"""A small module that nothing else imports."""


class TextConfig(StageConfig):
    text: str = "sea"


class Write(Stage):
    """Writes `text`."""

    config = TextConfig
    target = f"{__name__}:write"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", DATA, frozenset({"text"})),)


def write(context: StageContext) -> Outcome:
    save(context, context.config.text)
    context.note(f"threads {os.environ['OMP_NUM_THREADS']}")
    context.note(f"interpreter {sys.executable}")
    return Outcome(figures={"length": len(context.config.text)}, summary="written")


def save(context: StageContext, text: str, port: str = "data") -> None:
    (context.output(port) / ROWS).write_text(text)
    context.describe(port, Kind.DATASET, DatasetFacts(format="text", rows=1))


def text_of(context: StageContext) -> str:
    return "".join(artifact.file(ROWS).read_text() for artifact in context.inputs["data"])


class _Through(Stage):
    inputs = (Port("data", DATA, many=True),)

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("data", DATA),)


class Copy(_Through):
    """Puts out its input with a suffix."""

    config = TextConfig
    target = f"{__name__}:copy"


def copy(context: StageContext) -> Outcome:
    save(context, text_of(context) + context.config.text)
    return Outcome()


class Forked(Copy):
    """Copy, but wants a preloaded interpreter."""

    target = f"{__name__}:forked"
    preload = (PRELOADED,)


def forked(context: StageContext) -> Outcome:
    context.note(f"parent {os.getppid()}")
    context.note(f"preloaded {PRELOADED in sys.modules}")
    print(f"output of {context.node}", flush=True)
    save(context, text_of(context) + context.config.text)
    return Outcome()


class ReadConfig(StageConfig):
    path: Source
    then: Annotated[str | None, VolatileMark()] = None


class Read(Write):
    """Puts out the file `path`; with `then`, somebody else writes that into it just before it is read."""

    config = ReadConfig
    target = f"{__name__}:read"


def read(context: StageContext) -> Outcome:
    path = context.base / context.config.path
    if context.config.then is not None:
        replace(path, context.config.then)
    (context.work / "checkpoint").write_text("of that content")
    save(context, path.read_text())
    return Outcome()


class EnvironConfig(TextConfig):
    token: Secret | None = None


class Environ(Write):
    """Notes which of the variables that `text` lists it finds, and prints what they hold."""

    config = EnvironConfig
    target = f"{__name__}:environ"


class EnvironForked(Environ):
    """The same in a forked worker."""

    preload = (PRELOADED,)


def environ(context: StageContext) -> Outcome:
    names = context.config.text.split()
    context.note(" ".join(name for name in names if name in os.environ) or "none")
    for name in names:
        print(os.environ.get(name, ""), flush=True)
    save(context, context.config.text)
    return Outcome()


class Forever(Write):
    """Runs until somebody raises something in it."""

    target = f"{__name__}:forever"


def forever(context: StageContext) -> Outcome:
    context.output("data")
    os.kill(os.getpid(), signal.SIGINT)
    assert context.stopping
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("a second interrupt was not heard")


class Threads(Write):
    """Notes how many threads the numerical library of this process would use."""

    target = f"{__name__}:threads"


def threads(context: StageContext) -> Outcome:
    context.note(f"uses {sys.modules['torch'].get_num_threads()} threads")
    save(context, context.config.text)
    return Outcome()


class SlowConfig(StageConfig):
    steps: int = 20
    pause: Annotated[float, VolatileMark()] = 0.05
    marker: Annotated[str | None, VolatileMark()] = None
    stubborn: Annotated[bool, VolatileMark()] = False


class Slow(_Through):
    """Counts to `steps` with a checkpoint after each, starts a grandchild, and stops when asked to.

    The file `marker` gets its process id, the grandchild's, and the step it began at.
    """

    config = SlowConfig
    target = f"{__name__}:slow"


class SlowForked(Slow):
    """The same in a forked worker."""

    preload = (PRELOADED,)


def slow(context: StageContext) -> Outcome:
    checkpoint = context.work / "step"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    child = subprocess.Popen(["sleep", "300"])
    if context.config.marker:
        replace(Path(context.config.marker), f"{os.getpid()} {child.pid} {done}")
    for step in range(done, context.config.steps):
        if context.stopping and not context.config.stubborn:
            child.kill()
            child.wait()
            raise Interrupted(f"stopped at step {step}")
        time.sleep(context.config.pause)
        context.metrics(step, {"loss": 1.0 / (step + 1)})
        context.progress(step + 1, context.config.steps, "steps")
        replace(checkpoint, str(step + 1))
    child.kill()
    child.wait()
    save(context, text_of(context) + str(context.config.steps))
    return Outcome(figures={"resumed_from": done})


def replace(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


class FailConfig(StageConfig):
    how: str = "raise"
    token: Secret | None = None


class Fail(_Through):
    """Ends badly in the way that `how` names."""

    config = FailConfig
    target = f"{__name__}:fail"


def fail(context: StageContext) -> Any:
    print(f"about to fail by {context.config.how}", flush=True)
    return HOW[context.config.how](context)


def _raise(context: StageContext) -> None:
    raise KeyError("no such column")


def _refuse(context: StageContext) -> None:
    raise DataError("this row is bad", where="rows.jsonl:3", found="nothing", expected="text", fix="mend it")


def _kill(context: StageContext) -> None:
    child = subprocess.Popen(["sleep", "300"])
    print(f"grandchild {child.pid}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _vanish(context: StageContext) -> None:
    os._exit(0)


def _exit(context: StageContext) -> None:
    sys.exit(7)


def _nothing(context: StageContext) -> Outcome:
    return Outcome()


def _undescribed(context: StageContext) -> Outcome:
    context.output("data")
    return Outcome()


def _wrong_kind(context: StageContext) -> Outcome:
    context.output("data")
    context.describe("data", Kind.REPORT, ReportFacts())
    return Outcome()


def _no_outcome(context: StageContext) -> None:
    save(context, "x")


def _full_disk(context: StageContext) -> None:
    raise OSError(28, "No space left on device", str(context.work / "model.safetensors"))


def _infinite(context: StageContext) -> Outcome:
    context.metrics(0, {"loss": float("nan"), "rate": 0.5})
    context.metrics(1, {"loss": float("nan"), "rate": 0.5})
    save(context, "x")
    return Outcome(figures={"loss": float("inf"), "rate": 0.5})


def _leak(context: StageContext) -> None:
    secret = context.secret(context.config.token)
    print(f"the token is {secret}", flush=True)
    context.note(f"token {secret}")
    raise RuntimeError(f"cannot log in with {secret}")


def _steal(context: StageContext) -> None:
    context.secret("env:POSTTRAIN_OTHER_TOKEN")


def _interrupted(context: StageContext) -> None:
    raise Interrupted("nobody asked for this")


HOW = {
    "raise": _raise,
    "refuse": _refuse,
    "kill": _kill,
    "vanish": _vanish,
    "exit": _exit,
    "nothing": _nothing,
    "undescribed": _undescribed,
    "wrong_kind": _wrong_kind,
    "no_outcome": _no_outcome,
    "full_disk": _full_disk,
    "infinite": _infinite,
    "leak": _leak,
    "steal": _steal,
    "interrupted": _interrupted,
}


class StepsConfig(StageConfig):
    steps: int | None = 0


class Train(_Through, Trainer):
    """A trainer that reports `steps`."""

    config = StepsConfig
    target = f"{__name__}:train"
    family = Family.TOKEN
    formats = frozenset({"text"})

    def batch(self, scored: Any, config: Any) -> Any:
        return None


def train(context: StageContext) -> Outcome:
    save(context, "weights")
    return Outcome(steps=context.config.steps)


class GateConfig(StageConfig):
    verdict: Verdict = Verdict.REJECTED


class Gate(Stage):
    """Ends with `verdict`."""

    config = GateConfig
    inputs = (Port("data", DATA),)
    target = f"{__name__}:gate"

    def outputs(self, config: Any) -> tuple[Port, ...]:
        return (Port("verdict", frozenset({Kind.REPORT})),)


def gate(context: StageContext) -> Outcome:
    (context.output("verdict") / "verdict.txt").write_text(context.config.verdict)
    context.describe("verdict", Kind.REPORT, ReportFacts(report="verdict", verdict=context.config.verdict))
    return Outcome(verdict=context.config.verdict, figures={"margin": 0.25})


class PickyConfig(TextConfig):
    level: str = "error"


class Picky(_Through):
    """Its check finds fault with every input that is really there."""

    config = PickyConfig
    target = f"{__name__}:copy"

    def check(self, config: Any, inputs: Inputs) -> list[Finding]:
        certainty = Certainty.VERIFIED if all(i.verified for i in inputs["data"]) else Certainty.UNKNOWN
        fault = "these rows do not fit"
        return [Finding("picky", Level(config.level), certainty, fault, port="data", fix="take others")]


class Moving(Write):
    """A write whose options do not determine its output."""

    def pinned(self, config: Any) -> str | None:
        return "it follows a moving branch"


class External(Write):
    """A write with an effect outside of the store: the file `effect` in the workspace."""

    target = f"{__name__}:external"
    external: ClassVar[bool] = True

    def holds(self, config: Any, inputs: Inputs, workspace: Path) -> str | None:
        return None if (workspace / "effect").exists() else "its effect is gone"


def external(context: StageContext) -> Outcome:
    (context.workspace / "effect").write_text("done")
    return write(context)


STAGES = {
    "write": Write,
    "copy": Copy,
    "forked": Forked,
    "slow": Slow,
    "slow.forked": SlowForked,
    "fail": Fail,
    "gate": Gate,
    "read": Read,
    "environ": Environ,
    "environ.forked": EnvironForked,
    "forever": Forever,
    "threads": Threads,
    "picky": Picky,
    "moving": Moving,
    "external": External,
}


@posttrain.hookimpl
def posttrain_stages() -> list[Registration]:
    return [
        Registration(f"test/{name}", f"test stage {name}", f"{__name__}:{cls.__name__}")
        for name, cls in STAGES.items()
    ]


@posttrain.hookimpl
def posttrain_trainers() -> list[Registration]:
    return [Registration("test/train", "test trainer", f"{__name__}:Train")]
