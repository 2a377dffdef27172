"""posttrain's trainers through the stage that a user's pipeline runs, driven step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gates import Gate, memory
from materials import read_rows
from objectives import OBJECTIVES
from scenarios import LORA
from watching import watch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import peft
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact

import posttrain_plugins.training.reference as reference
import posttrain_plugins.training.stage  # noqa: F401 - imported before the memory of the imports is read, too
from posttrain.artifacts.kinds import Kind
from posttrain.contracts.registration import load_target
from posttrain_plugins.data.rows import write_rows
from posttrain_plugins.models.artifact import facts_of

assert peft.__version__, "imported before the memory of the imports is read, as the other side does"


_COMMON = {"shuffle": False, "save_steps": 0}


def context(job: dict[str, Any]) -> FakeContext:
    """Return the context of one training."""
    directory, known = Path(job["directory"]), OBJECTIVES[job["objective"]]
    data = directory / "data"
    data.mkdir(parents=True)
    kind = Kind.REWARD_MODEL if known.judged else Kind.MODEL
    model = as_artifact(Path(job["model"]), facts_of(Path(job["model"])), kind)
    rows = as_artifact(data, write_rows(data, read_rows(job), known.format), Kind.DATASET)
    trainer = catalogue().stage(f"train.{job['objective']}")
    options: dict[str, Any] = {"lora": LORA} if job["lora"] else {}
    if job["epochs"] is not None:
        options["num_train_epochs"] = job["epochs"]
    config = configured(trainer, **_COMMON, batch_size=job["batch"], **job["setting"], **options)
    return FakeContext(directory, trainer, config, {"model": [model], "data": [rows]})


def gate_references(gate: Gate) -> None:
    """Time the pass over the reference as often as the job says, each time from nothing."""
    real = reference.reference_log_probs

    def repeated(stepper: Any, examples: Any, directory: Path, *rest: Any) -> Any:
        def once(number: int) -> Callable[[], Any]:
            return lambda: real(stepper, examples, directory.with_name(f"reference-{number}"), *rest)

        return [gate.timed("reference", once(number)) for number in range(gate.job["references"])][-1]

    for module in list(sys.modules.values()):
        if vars(module).get(real.__name__) is real:
            setattr(module, real.__name__, repeated)


def main() -> None:
    """Run the stage."""
    gate = Gate()
    torch.set_num_threads(gate.job["threads"])
    made = context(gate.job)
    target = load_target(made.stage.target)
    gate_references(gate)
    gate.tell(imported=memory("VmRSS"))
    watch(gate, time.perf_counter())
    target(made)
    gate.tell(notes=made.notes)


if __name__ == "__main__":
    main()
