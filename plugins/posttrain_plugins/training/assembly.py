"""From options to a stepper: head, layout and budget are chosen, tried and kept for every resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Component
from posttrain.contracts.stage import Level, StageContext
from posttrain.contracts.trainer import Example, Trainer
from posttrain.errors import StageError
from posttrain_plugins.training.arrangement import Arrangement, described, earlier, threads
from posttrain_plugins.training.batches import Budget, DataOrder, probe
from posttrain_plugins.training.head import budget_of, unwrapped, vocabulary_of
from posttrain_plugins.training.head.fused import MEMORY
from posttrain_plugins.training.memory import bytes_per_token, measured_tokens, recomputing
from posttrain_plugins.training.options import TrainingOptions, held_positions
from posttrain_plugins.training.positions import reach, require_reach
from posttrain_plugins.training.step import Stepper
from posttrain_plugins.training.tally import gather
from posttrain_plugins.training.way import PRECISIONS, STEPS, Trial, Way

Steps = list[list[Example]]


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
    trial = Trial(tried, laid_out, pad, parallel.device, config.precision)
    layout, kept = (config.layout, MEMORY) if before is None else (before.layout, before.kept)
    way = trial.way(model, layout, kept, context.stage.valued)
    _require_same(parallel, type(way.head).__name__, way.layout.name)
    _tell(context, model, way)
    stepper = Stepper(
        model=model,
        trainer=context.stage,
        loss=loss,
        pad=pad,
        budget=Budget(1),
        head=way.head,
        layout=way.layout,
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
        kept=MEMORY,
        threads=threads(parallel.device),
        asked=asked,
    )


def bounded(stepper: Stepper, tokens: int) -> Budget:
    """Return a budget of so many tokens whose logits take no more memory than a device should hold of them."""
    budget = budget_of(stepper.model, stepper.head, tokens)
    held = held_positions(stepper.device.type, vocabulary_of(stepper.model))
    return Budget(budget.tokens, min(held, budget.supervised or held))


def _tell(context: StageContext, model: Any, way: Way) -> None:
    """Warn of what is slower than it could be, and of what is left out."""
    router = "the model's config asks for a loss of its router, which is not added to this training's"
    routed = getattr(unwrapped(model).config, "output_router_logits", False)
    for text in (*way.told, *([router] if routed else [])):
        context.note(text, Level.WARNING)


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
    return measured_tokens(stepper, taken, reserved=4 * 3 * trainable + MEMORY, largest=largest)


def _shrinking(context: StageContext, made: Arrangement, parallel: Parallel) -> Callable[[Budget], None]:
    def shrink(budget: Budget) -> None:
        made.within(budget).write(context.work)
        if parallel.repeatable:
            context.note(
                f"memory ran out; the step is done again with micro-batches of at most {budget.tokens} tokens",
                Level.WARNING,
            )

    return shrink
