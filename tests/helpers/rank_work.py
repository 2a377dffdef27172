"""What tests let ranks do. Importing it computes nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.contexts import FakeContext, catalogue
from helpers.models import tiny_llama
from helpers.stepping import encoder, examples, stepper
from helpers.training import (
    completion_rows,
    context_for,
    dataset_artifact,
    model_artifact,
    preference_rows,
    train,
    weights,
)
from safetensors.torch import load_file

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.backend import Parallel, Place
from posttrain.contracts.callback import Callback
from posttrain.contracts.component import Choice
from posttrain.contracts.registration import Group, load_target
from posttrain.contracts.stage import StageContext
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.backends.single import Single
from posttrain_plugins.launchers import process
from posttrain_plugins.launchers.local import together
from posttrain_plugins.training.step import Stepper

RATE = 0.3
"""Learning rate of the steps that are compared."""


def parallel_of(backend: Mapping[str, Any], place: Place) -> Parallel:
    plugin = catalogue().make(Group.BACKEND, backend["name"])
    options = {key: value for key, value in backend.items() if key != "name"}
    made: Parallel = load_target(plugin.target)(place, plugin.config(**options))
    return made


def on_ranks(directory: Path, ranks: int, work: Callable[[StageContext, Place], Any]) -> Any:
    return together(FakeContext(directory, None, None, {}), ranks, work)


# One step of every kind ------------------------------------------------------------------------------------------


def compare_steps(directory: Path, backend: Mapping[str, Any], cases: Mapping[str, Any]) -> dict[str, Any]:
    """Take one SGD step of each case on two ranks and in one process; return how far they are apart."""
    return on_ranks(directory, 2, partial(_compare, backend, cases))  # type: ignore[no-any-return]


def _compare(
    backend: Mapping[str, Any], cases: Mapping[str, Any], context: StageContext, place: Place
) -> dict[str, Any]:
    parallel = parallel_of(backend, place)
    found = {name: _difference(parallel, **case) for name, case in cases.items()}
    parallel.close()
    return found


def _difference(
    parallel: Parallel,
    loss: str,
    uses: str = "train.sft",
    count: int = 7,
    tokens: int = 60,
    layout: str = "padded",
    **options: Any,
) -> dict[str, Any]:
    alone, expected = _step(Single(), uses, loss, count, 10_000, "padded", options)
    together, found = _step(parallel, uses, loss, count, tokens, layout, options)
    if parallel.rank > 0:
        return {}
    start = tiny_llama(encoder().vocabulary, **options).state_dict()
    update = max(float(np.abs(expected[name] - start[name].numpy()).max()) for name in expected)
    apart = {
        name: (np.abs(expected[name] - found[name]) - np.spacing(np.abs(expected[name]))).max() / update
        for name in expected
    }
    return {
        "names": sorted(found) == sorted(expected),
        "apart": float(np.max(list(apart.values()))),
        "update": update,
        "alone": alone,
        "together": together,
    }


def _step(
    parallel: Parallel,
    uses: str,
    loss: str,
    count: int,
    tokens: int,
    layout: str,
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    model = tiny_llama(encoder().vocabulary, attn_implementation="sdpa", **options).train()
    parallel.prepare(model)
    made = stepper(uses, loss, tokens, layout, model=model)
    made.parallel = parallel
    parallel.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    made.model, optimizer = parallel.wrap(model, optimizer)
    rows = examples(uses, count)
    result = made.backward(rows)
    norm = parallel.clip(made.model, float("inf"))
    optimizer.step()
    own = [len(micro.examples) for micro in made.micro_batches(rows)]
    told = {"loss": result.loss, "metrics": dict(result.metrics), "norm": norm, "rank 0": own}
    return told, {name: tensor.numpy().copy() for name, tensor in parallel.weights(model).items()}


def unused(directory: Path, backend: Mapping[str, Any]) -> float:
    """Take a step of a model with a parameter that nothing depends on; return how far it is from one process's."""
    return on_ranks(directory, 2, partial(_unused, backend))  # type: ignore[no-any-return]


def _unused(backend: Mapping[str, Any], context: StageContext, place: Place) -> float:
    parallel = parallel_of(backend, place)
    found = []
    for each in (Single(), parallel):
        model = tiny_llama(encoder().vocabulary, attn_implementation="sdpa").train()
        model.idle = torch.nn.Linear(3, 3)
        made = stepper("train.sft", "nll", 60, model=model)
        made.parallel = each
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        made.model, optimizer = each.wrap(model, optimizer)
        for _ in range(2):
            made.backward(examples("train.sft"))
            optimizer.step()
            optimizer.zero_grad()
        found.append([tensor.clone() for tensor in model.parameters()])
    parallel.close()
    apart = [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]
    return max(apart[:-2])  # the idle ones are drawn anew


class _Sometimes(torch.nn.Module):
    """Uses its second layer in some forward passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        found: torch.Tensor = self.always(inputs) + (self.seldom(inputs) if both else 0)
        return found


def sometimes(directory: Path, backend: Mapping[str, Any]) -> list[float]:
    """Return the gradients after two micro-batches on each rank, of which the last leaves out a parameter on one."""
    return on_ranks(directory, 2, partial(_sometimes, backend))  # type: ignore[no-any-return]


def _sometimes(backend: Mapping[str, Any], context: StageContext, place: Place) -> list[float]:
    parallel = parallel_of(backend, place)
    model = _Sometimes()
    wrapped, _ = parallel.wrap(model, None)
    for last in (False, True):
        inputs = torch.full((1, 2), 1.0 + place.rank)
        parallel.backward(wrapped(inputs, not last or place.rank == 1).sum(), last)
    found = [float(each.grad[0, 0]) for each in (model.always.weight, model.seldom.weight)]  # type: ignore[index]
    parallel.close()
    return found


# What is split ---------------------------------------------------------------------------------------------------


def held(directory: Path, backend: Mapping[str, Any]) -> dict[str, int]:
    """Return how many numbers rank 0 holds after a step of AdamW: of weights and of the optimizer's moments."""
    return on_ranks(directory, 2, partial(_held, backend))  # type: ignore[no-any-return]


def _held(backend: Mapping[str, Any], context: StageContext, place: Place) -> dict[str, Any]:
    parallel = parallel_of(backend, place)
    model = tiny_llama(encoder().vocabulary)
    total = sum(parameter.numel() for parameter in model.parameters())
    parallel.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = stepper("train.sft", "nll", 60, model=model)
    made.parallel = parallel
    made.model, optimizer = parallel.wrap(model, optimizer)
    made.backward(examples("train.sft"))
    parallel.clip(made.model, 1.0)
    optimizer.step()
    state = parallel.state(optimizer)["state"].values()
    found = {
        "total": total,
        "weights": sum(_local(parameter).numel() for parameter in model.parameters()),
        "moments": sum(kept["exp_avg"].numel() for kept in state),
        "kinds": sorted({type(parameter.data).__name__ for parameter in model.parameters()}),
    }
    parallel.close()
    return found


def _local(parameter: Any) -> Any:
    if hasattr(parameter, "ds_tensor"):
        assert parameter.numel() == 0, "gathered"
        return parameter.ds_tensor
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


# Whole trainings -------------------------------------------------------------------------------------------------

TRAINING = {
    "batch_size": 4,
    "max_steps": 7,
    "save_steps": 3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
}
"""Ten rows in steps of four: the third step of an epoch is ragged."""


def training(directory: Path, backend: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train, or go on with a training of the same directory; return what came of it."""
    options = dict(options)
    uses, stop_at = options.pop("uses", "train.sft"), options.pop("stop_at", None)
    dropout, foreign = options.pop("dropout", 0.0), options.pop("foreign", None)
    format = "preference" if uses in ("train.dpo", "train.reward") else "prompt_completion"
    rows = preference_rows(10) if format == "preference" else completion_rows(10)
    model = _model(directory / "model", dropout)
    context = context_for(directory, uses, model, rows, format, **{**TRAINING, "backend": backend, **options})
    if options.get("eval_steps"):
        context.inputs = {**context.inputs, "eval": [dataset_artifact(directory / "eval", rows[:5], format)]}
    if foreign is not None:
        context.components["acme/mine"] = foreign
        context.config = context.config.model_copy(update={"callbacks": (Choice(name="acme/mine"),)})
    context.stop_at = stop_at
    interrupted, figures = False, {}
    try:
        figures = dict(train(context).figures)
    except Interrupted:
        interrupted = True
    steps = [done for done, _, unit in context.seen_progress if unit == "steps"]
    logged = {step: dict(values) for step, values in context.seen_metrics.items()}
    found = {
        "interrupted": interrupted,
        "figures": figures,
        "steps": steps,
        "metrics": logged,
        "notes": context.notes,
    }
    if not interrupted:
        output = context.output("model")
        tensors = {name: tensor.numpy() for name, tensor in weights(output).items()}
        found |= {"weights": tensors, "files": sorted(path.name for path in output.iterdir())}
        found["config"] = (output / "config.json").read_text()
        if "best_step" in figures:
            checkpoint = context.work / "checkpoints" / f"step-{int(figures['best_step']):08d}"
            best = load_file(checkpoint / "weights.safetensors")
            found["best"] = {name: tensor.numpy() for name, tensor in best.items()}
    return found


class _LastRankAsks:
    """Asks for the end after step 3, on one rank alone."""

    def __init__(self, training: Any, config: Any) -> None:
        self.parallel = training.parallel

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        last = self.parallel.rank == self.parallel.size - 1
        control.should_training_stop = last and state.global_step == 3


class LastRankAsks(Callback):
    """A callback whose wish depends on the rank, as one by the clock would."""

    target = f"{__name__}:_LastRankAsks"


def short_of_memory(directory: Path, backend: Any, step: int, options: Mapping[str, Any]) -> None:
    """Train; in some step memory runs out on rank 1 alone."""
    plain, begun = Stepper._scored, [0]

    def scored(self: Stepper, part: Any) -> Any:
        begun[0] += not any(parameter.grad is not None for parameter in self.model.parameters())
        if self.parallel.rank == 1 and begun[0] == step:
            raise torch.OutOfMemoryError("a rank lacks memory")
        return plain(self, part)

    Stepper._scored = scored  # type: ignore[method-assign]
    training(directory, backend, options)


def _model(directory: Path, dropout: float) -> Artifact:
    # Written again by a resume: the same bytes.
    return model_artifact(directory, attention_dropout=dropout, num_hidden_layers=1)


# Failures --------------------------------------------------------------------------------------------------------


def failing(directory: Path, how: str) -> None:
    """Let rank 1 fail in the middle of the work."""
    on_ranks(directory, 2, partial(_FAILURES[how], {"name": "ddp"}))


def _raise(backend: Mapping[str, Any], context: StageContext, place: Place) -> None:
    parallel = parallel_of(backend, place)
    for step in range(100):
        parallel.sum(torch.ones(1))
        if step == 3 and place.rank == 1:
            raise ZeroDivisionError("what went wrong")


def _refuse(backend: Mapping[str, Any], context: StageContext, place: Place) -> None:
    parallel = parallel_of(backend, place)
    parallel.barrier()
    if place.rank == 1:
        raise StageError("memory ran out", where="step 4", fix="take less")
    parallel.barrier()


def _be_killed(backend: Mapping[str, Any], context: StageContext, place: Place) -> None:
    parallel = parallel_of(backend, place)
    for step in range(1000):
        parallel.sum(torch.ones(1))
        if step == 3 and place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _leave_alone(backend: Mapping[str, Any], context: StageContext, place: Place) -> None:
    """Rank 0 raises what is its own: nobody else failed."""
    parallel = parallel_of(backend, place)
    parallel.barrier()
    if place.rank == 0:
        raise StageError("rank 0 knows why")
    parallel.barrier()


_FAILURES: Mapping[str, Callable[..., None]] = {
    "raise": _raise,
    "refuse": _refuse,
    "killed": _be_killed,
    "leader": _leave_alone,
}


def hanging(directory: Path) -> None:
    """Let rank 1 fail while rank 0 is held up by something that does not notice; never returns."""
    process.STUCK = 0.5
    sys.stderr = (directory / "told").open("w", buffering=1)
    on_ranks(directory, 2, _hang)


def _hang(context: StageContext, place: Place) -> None:
    if place.rank == 1:
        raise ZeroDivisionError("what went wrong")
    time.sleep(600)


def orphaned(directory: Path) -> None:
    """Start ranks of which each notes its process id; never returns."""
    on_ranks(directory, 2, _note_and_wait)


def _note_and_wait(context: StageContext, place: Place) -> None:
    (context.work / f"pid-{place.rank}.tmp").write_text(str(os.getpid()))
    (context.work / f"pid-{place.rank}.tmp").rename(context.work / f"pid-{place.rank}")
    time.sleep(600)


def computed_already(directory: Path) -> None:
    """Compute with several threads, then try to start ranks."""
    torch.set_num_threads(4)
    torch.randn(400, 400) @ torch.randn(400, 400)
    on_ranks(directory, 2, _note_and_wait)


def shares(directory: Path) -> list[list[Any]]:
    """Return what every rank may use and draws, and what rank 0 tells the others."""
    return on_ranks(directory, 2, _share)  # type: ignore[no-any-return]


def _share(context: StageContext, place: Place) -> list[Any]:
    from posttrain_plugins.training.randomness import diverge
    from posttrain_plugins.training.tally import gather

    parallel = parallel_of({"name": "ddp"}, place)
    torch.manual_seed(5)
    diverge(5, place.rank)
    drawn = float(torch.rand(()))
    variables = sorted({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys())
    told = parallel.agree({"from": place.rank, "text": "ß", "none": None})
    context.note(f"rank {place.rank}")
    print(f"this is rank {place.rank}", flush=True)
    context.output("model").joinpath("mine").write_text("x")
    found = gather(parallel, [place.rank, torch.get_num_threads(), drawn, variables, told, context.stopping])
    parallel.close()
    return found


def turns(directory: Path, backend: str) -> list[str]:
    """Return who began to open a model, and who had it prepared, in the order in which that happened."""
    return on_ranks(directory, 3, partial(_turn, backend))  # type: ignore[no-any-return]


def _turn(backend: str, context: StageContext, place: Place) -> list[str]:
    told = context.work.parent / "turns"
    parallel = parallel_of({"name": backend, "ranks": 3}, place)

    def tell(what: str) -> None:
        descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{place.rank} {what}\n".encode())
        os.close(descriptor)

    with parallel.loading() as device:
        tell(f"opens on {device}")
        time.sleep(0.05)
        tell("has prepared")
    parallel.barrier()
    parallel.close()
    return told.read_text().splitlines()
