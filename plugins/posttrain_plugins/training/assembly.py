"""From options to a stepper: head, layout and budget are chosen, tried and kept for every resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Component
from posttrain.contracts.stage import Level, StageContext
from posttrain.contracts.trainer import Example, Trainer
from posttrain.errors import StageError
from posttrain_plugins.training.arrangement import Arrangement, described, earlier, threads
from posttrain_plugins.training.batches import Budget, DataOrder, probe
from posttrain_plugins.training.head import (
    TOLERANCE,
    Head,
    Wanted,
    budget_of,
    choose_head,
    choose_value_head,
    unwrapped,
    vocabulary_of,
)
from posttrain_plugins.training.layouts import LAYOUTS, Layout, choose_layout
from posttrain_plugins.training.layouts.choice import Read
from posttrain_plugins.training.memory import bytes_per_token, measured_tokens, recomputing
from posttrain_plugins.training.microbatch import MicroBatch
from posttrain_plugins.training.options import Precision, TrainingOptions, held_positions
from posttrain_plugins.training.positions import reach, require_reach
from posttrain_plugins.training.step import Stepper
from posttrain_plugins.training.tally import gather

Steps = list[list[Example]]
STEPS = 8
"""Steps whose lengths the choice of a layout rests on."""
KEPT = 1 << 30
"""Bytes of logits that are kept for the backward pass; more, of one long example, are computed again, a part at a
time."""
PRECISIONS: Mapping[Precision, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What autocast computes in."""


def assemble(
    context: StageContext,
    model: Any,
    loss: Component,
    pad: int,
    examples: Sequence[Example],
    order: DataOrder,
    parallel: Parallel,
) -> Stepper:
    """Return a stepper that is ready for step 1, and tell how it is arranged.

    Args:
        context: The stage's; its options say what is asked for.
        model: The policy, prepared for its ranks but not wrapped.
        loss: The loss and its options.
        pad: A token id to pad with.
        examples: Those of the training.
        order: The steps they make up.
        parallel: The ranks.
    """
    config: TrainingOptions = context.config
    assert isinstance(context.stage, Trainer), "only trainers are assembled"
    require_reach(reach(model), examples)
    steps, laid_out = _first(examples, order)
    asked = _asked(config, parallel)
    before = earlier(context.work, asked, parallel)
    if before is not None and before.threads is not None:
        torch.set_num_threads(before.threads)
    tried = probe(examples)
    _require_whole(parallel, tried)
    head, layout = _chosen(context, model, parallel, laid_out, tried, pad, before)
    stepper = Stepper(
        model=model,
        trainer=context.stage,
        loss=loss,
        pad=pad,
        budget=Budget(1),
        head=head,
        layout=layout,
        parallel=parallel,
        precision=PRECISIONS[config.precision],
        config=config,
    )
    made = before or _arranged(config, stepper, steps, asked)
    if parallel.rank == 0:
        made.write(context.work)
    stepper.budget = made.budget
    stepper.smaller = _shrinking(context, made, parallel)
    context.note(described(made, config.backend.name, before is not None))
    return stepper


def _first(examples: Sequence[Example], order: DataOrder) -> tuple[Steps, Steps]:
    """Return what the first steps learn, and that with all else that is laid out."""
    whole = [[examples[position] for position in step] for step in order.epoch(0)[:STEPS]]
    steps = [[example.learned for example in step] for step in whole]
    # A pass over the reference lays out what is only measured together with what is learned.
    together = whole if any(example.measured for step in whole for example in step) else []
    return steps, [*steps, *together]


def _arranged(
    config: TrainingOptions, stepper: Stepper, steps: Sequence[Sequence[Example]], asked: dict[str, Any]
) -> Arrangement:
    parallel = stepper.parallel
    tokens = min(gather(parallel, _tokens(config, stepper, steps)))
    budget = bounded(stepper, tokens)
    return Arrangement(
        tokens=budget.tokens,
        supervised=budget.supervised or 1,
        layout=stepper.layout.name,
        kept=KEPT,
        threads=threads(parallel.device),
        asked=asked,
    )


def bounded(stepper: Stepper, tokens: int) -> Budget:
    """Return a budget of so many tokens whose logits take no more memory than a device should hold of them."""
    budget = budget_of(stepper.model, stepper.head, tokens)
    held = held_positions(stepper.device.type, vocabulary_of(stepper.model))
    return Budget(budget.tokens, min(held, budget.supervised or held))


def _chosen(
    context: StageContext,
    model: Any,
    parallel: Parallel,
    steps: Sequence[Sequence[Example]],
    tried: Sequence[Example],
    pad: int,
    before: Arrangement | None,
) -> tuple[Head, Layout]:
    """Choose head and layout, the same on every rank, and tell where these are not the fastest."""
    config: TrainingOptions = context.config
    tolerance = TOLERANCE[config.precision != "float32"]
    kept = KEPT if before is None else before.kept
    wanted = config.layout if before is None else before.layout
    padded = LAYOUTS["padded"].arrange(tried, pad, parallel.device)
    with computing(parallel.device, PRECISIONS[config.precision]):
        head, told, read = _head(context, model, padded, tolerance, kept)
        named = None if wanted == "auto" else wanted
        layout, why = choose_layout(model, steps, tried, tolerance, named, read)
    _require_same(parallel, type(head).__name__, layout.name)
    router = "the model's config asks for a loss of its router, which is not added to this training's"
    routed = getattr(unwrapped(model).config, "output_router_logits", False)
    for text in filter(None, (told, why, router if routed else None)):
        context.note(text, Level.WARNING)
    return head, layout


def _head(
    context: StageContext, model: Any, padded: MicroBatch, tolerance: float, kept: int
) -> tuple[Head, str | None, Read | None]:
    """Choose the head, and say how a layout is to be compared with each sequence alone."""
    assert isinstance(context.stage, Trainer), "only trainers are assembled"
    if not context.stage.valued:
        return *choose_head(model, padded, tolerance, kept), None
    head = choose_value_head(model, padded)

    def read(model: Any, micro: MicroBatch) -> Tensor:
        value = head(model, micro, Wanted()).value
        assert value is not None, "such a head gives numbers"
        return value

    return head, None, read


def _require_whole(parallel: Parallel, tried: Sequence[Example]) -> None:
    """Refuse images where ranks hold parts of the model.

    Raises:
        StageError: They do; a rank whose rows have no image would not take part in gathering the vision tower.
    """
    if not parallel.layout or not any(sequence.images for each in tried for sequence in each.sequences):
        return
    raise StageError(
        "rows with images need the whole model on every rank",
        where="backend",
        found=parallel.layout,
        expected="`single`, or `ddp` with `find_unused_parameters: true`",
    )


def _require_same(parallel: Parallel, *chosen: str) -> None:
    """Refuse to go on where a rank chose otherwise than rank 0.

    Raises:
        StageError: It did; its forward passes would not meet those of the others.
    """
    first = parallel.agree(list(chosen))
    if first != list(chosen):
        raise StageError(
            "ranks do not agree on how to compute",
            where=f"rank {parallel.rank}",
            found=", ".join(chosen),
            expected=", ".join(first),
            fix="name a `layout`, and use machines and GPUs of the same kind",
        )


def _asked(config: TrainingOptions, parallel: Parallel) -> dict[str, Any]:
    return {
        "micro_batch_tokens": config.micro_batch_tokens,
        "layout": config.layout,
        "gradient_checkpointing": config.gradient_checkpointing,
        "ranks": parallel.size,
        "device": parallel.device.type,
    }


def _tokens(config: TrainingOptions, stepper: Stepper, steps: Sequence[Sequence[Example]]) -> int:
    given = config.budget(stepper.device.type)
    if given is not None:
        return given
    trainable = sum(tensor.numel() for tensor in stepper.model.parameters() if tensor.requires_grad)
    longest = sorted((each for step in steps for each in step), key=lambda each: each.longest, reverse=True)
    largest = max(stepper.layout.size(step) for step in steps)
    taken = bytes_per_token(stepper, longest)
    if config.gradient_checkpointing:
        taken = recomputing(stepper, longest, taken)
    return measured_tokens(stepper, taken, reserved=4 * 3 * trainable + KEPT, largest=largest)


def _shrinking(context: StageContext, made: Arrangement, parallel: Parallel) -> Callable[[Budget], None]:
    def shrink(budget: Budget) -> None:
        made.within(budget).write(context.work)
        if parallel.repeatable:
            context.note(
                f"memory ran out; the step is done again with micro-batches of at most {budget.tokens} tokens",
                Level.WARNING,
            )

    return shrink


def computing(device: torch.device, precision: torch.dtype | None) -> torch.autocast:
    """Return a context that computes in a precision; None: as the weights are."""
    return torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None)
