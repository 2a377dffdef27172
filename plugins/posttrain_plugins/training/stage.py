"""What every rank of an offline trainer does: rows and a policy in, a trained policy out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Component
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.contracts.trainer import Supervise, Trainer
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.models.policy import Policy, open_policy, save_policy, usable_device
from posttrain_plugins.models.quantized import is_quantized
from posttrain_plugins.preparation.dataset import prepared_data
from posttrain_plugins.preparation.examples import Prepared
from posttrain_plugins.training.adapters import POLICY_TASK, Adapted, with_adapter
from posttrain_plugins.training.assembly import assemble
from posttrain_plugins.training.batches import DataOrder, fullness
from posttrain_plugins.training.checkpoints import Checkpoints
from posttrain_plugins.training.companions import Companions
from posttrain_plugins.training.evaluation import Best, Evaluation
from posttrain_plugins.training.head import vocabulary_of
from posttrain_plugins.training.invariants import Marks, StepZero
from posttrain_plugins.training.loop import Loop
from posttrain_plugins.training.objective import objective
from posttrain_plugins.training.options import EVALUATION, TrainingOptions
from posttrain_plugins.training.owed import settled
from posttrain_plugins.training.reference_source import ReferenceSource
from posttrain_plugins.training.setting import (
    arguments,
    deterministic,
    drops,
    same_config,
    without_dropout,
)
from posttrain_plugins.training.step import Stepper
from posttrain_plugins.training.valued import Keeping, open_trained, task_of
from posttrain_plugins.training.vision import Vision
from posttrain_plugins.training.watch import Watch
from posttrain_plugins.training.way import STEPS

_PROMPTED = frozenset({"messages", "prompt_completion", "preference", "three_way", "unpaired_preference"})
"""Formats whose rows begin with something that is not learned."""


def train(context: StageContext, parallel: Parallel) -> Outcome:
    """Train as one of the ranks; rank 0 puts the policy out.

    Raises:
        DataError: No row can be trained on.
        TrainingDiverged: A loss, gradient or weight stopped being finite.
        Interrupted: The stage was asked to stop; a checkpoint has been written.
    """
    config: TrainingOptions = context.config
    trainer = _trainer(context)
    loss = objective(context)
    with deterministic(config.seed), ExitStack() as stack:
        with parallel.loading() as device:
            policy = (open_trained if trainer.valued else _open)(context, device or usable_device())
            adapted = _adapted(context, policy, task_of(context) if trainer.valued else POLICY_TASK)
            model = adapted.model
            stack.enter_context(same_config(model))
            if not trainer.dropout:
                stack.enter_context(without_dropout(model))
            parallel.prepare(model)
        needs = loss.plugin.needs_of(loss.config) | trainer.needs(config)
        prepared = prepared_data(context, trainer, policy, "data", needs)
        session = _session(context, policy, model, prepared, loss, parallel)
        figures, said = session.train()
        if said != f"{session.steps} steps":
            context.note(said.rstrip(","))
        put_out, judged = session.conclude()
    if parallel.rank == 0:
        save: Callable[[str, Mapping[str, Tensor]], Path] = partial(_save, context, policy, adapted)
        if trainer.valued:
            save = Keeping(context, policy, adapted, session.loop, {**figures, **judged}).save
        made = {port: save(port, weights) for port, weights in put_out.items()}
        session.companions.deliver(made)
    summary = f"{said} over {prepared.extent}, loss {figures['loss']:.4f}"
    figures |= {**judged, **prepared.figures, "efficiency": session.fullness}
    return Outcome(figures=figures, steps=session.loop.learned, summary=summary)


@dataclass(frozen=True)
class Session:
    """A loop ready to go, how many steps it is to take, and the callbacks that take part."""

    context: StageContext
    loop: Loop
    steps: int
    companions: Companions

    @property
    def fullness(self) -> float:
        """The share of the places in the micro-batches of the first steps that hold a token."""
        examples, stepper = self.loop.examples, self.loop.stepper
        steps = [
            [examples[position].learned for position in step] for step in self.loop.order.epoch(0)[:STEPS]
        ]
        return fullness(steps, stepper.layout, stepper.budget)

    def train(self) -> tuple[dict[str, float], str]:
        """Train from the newest checkpoint, if there is one, to the end; return final figures and a summary."""
        checkpoint = self.loop.checkpoints.newest()
        if checkpoint is not None:
            self.context.note(f"going on from step {checkpoint.step} of {self.steps}")
            checkpoint = settled(self.loop, checkpoint)
        if checkpoint is not None and checkpoint.finished:
            self.loop.take_over(checkpoint)
        elif self.loop.evaluation is None or not self.loop.evaluation.owed:
            self.loop.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path))
        if not self.loop.ended:
            raise Interrupted(
                "training was asked to stop",
                where=f"step {self.loop.state.global_step} of {self.steps}",
                fix="`posttrain resume` goes on from the checkpoint just written",
            )
        self.loop.settle()
        return self.loop.conclude()

    def conclude(self) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, float]]:
        """Return what each output port is to hold, on rank 0, and the figures that callbacks changed by that."""
        loop = self.loop
        weights = loop.weights("after the last step", trainable=hasattr(loop.model, "peft_config"))
        put_out = self.companions.conclude(weights) if loop.parallel.rank == 0 else {}
        return put_out, self.companions.judged(put_out, weights, self.context.work / "concluded.safetensors")


def _trainer(context: StageContext) -> Trainer:
    assert isinstance(context.stage, Trainer), "only trainers have this target"
    return context.stage


def _session(
    context: StageContext,
    policy: Policy,
    model: Any,
    prepared: Prepared,
    loss: Component,
    parallel: Parallel,
) -> Session:
    config: TrainingOptions = context.config
    order = DataOrder(len(prepared.examples), config.batch_size, config.seed, config.shuffle, prepared.packs)
    steps = _steps(config, order.steps_per_epoch)
    pad = policy.encoder.pad_id or 0
    zero = _step_zero(context, policy, model)
    zero.check_rows([prepared.examples[position] for position in order.visited(1)])
    stepper = assemble(context, model, loss, pad, prepared.examples, order, parallel)
    evaluation = _evaluation(context, policy, stepper)
    loop = Loop(
        arguments(config, steps, context.work / "transformers"),
        stepper,
        prepared.examples,
        order,
        Checkpoints(context.work / "checkpoints", config.save_total_limit, partial(_warn, context)),
        config,
        zero,
        evaluation=evaluation,
    )
    companions = Companions.join(context, loop, replace(policy, model=model), steps)
    if drops(model):
        context.note(
            "dropout is active, and its masks depend on micro_batch_tokens: another cut, other numbers"
        )
    # A reference that moves stands first: an evaluation before the first step needs it.
    ReferenceSource(context, policy, loop, steps).connect()
    loop.add_callback(Watch(context, loop, steps))
    loop.add_callback(companions)
    return Session(context, loop, steps, companions)


def _step_zero(context: StageContext, policy: Policy, model: Any) -> StepZero:
    trainer, format = _trainer(context), context.input("data").facts.format
    prompts = format in _PROMPTED and trainer.supervise(context.config) is not Supervise.EVERYTHING
    marks = Marks.of(policy.encoder, vocabulary_of(model))
    return StepZero(marks, partial(_warn, context), prompts, judges=trainer.valued)


def _evaluation(context: StageContext, policy: Policy, stepper: Stepper) -> Evaluation | None:
    """Prepare what is connected to the port `eval`, if something is."""
    if not context.inputs.get(EVALUATION):
        return None
    prepared = prepared_data(context, _trainer(context), policy, EVALUATION, stepper.needs)
    config = context.config
    return Evaluation(stepper, prepared.examples, config.eval_steps, Best.of(config), prepared.figures)


def _steps(config: TrainingOptions, steps_per_epoch: int) -> int:
    """Return how many steps to take; a product such as 0.07 · 100 must not round up to one more."""
    if config.max_steps > 0:
        return config.max_steps
    return max(1, math.ceil(round(config.num_train_epochs * steps_per_epoch, 6)))


def _open(context: StageContext, device: str) -> Policy:
    return open_policy(
        context.input("model"),
        context,
        trainable=True,
        device=device,
        quantization=context.config.quantization,
    )


def _adapted(context: StageContext, policy: Policy, task: str) -> Adapted:
    """Put an adapter on the policy, if one is asked for, and freeze what sees and is not to be trained."""
    config, fresh = context.config, policy.base is None
    if config.unfreeze and not fresh:
        raise StageError("`unfreeze` would be ignored: an adapter is trained where it already is")
    plain = policy.model if fresh else policy.model.get_base_model()
    vision = Vision.of(plain, config.unfreeze)
    if config.adapter is not None:
        token_id = policy.encoder.files.plain.token_to_id
        adapted = with_adapter(policy.model, config.adapter, token_id, task, vision)
    elif fresh and is_quantized(policy.model):
        raise StageError(
            "weights in 4 or 8 bits cannot be trained", fix="add `lora`, or leave `quantization` out"
        )
    else:
        adapted = Adapted(policy.model)
        if fresh:
            vision.freeze(policy.model)
    if (told := vision.told(adapted.model, hint=fresh)) is not None:
        context.note(told)
    return adapted


def _save(
    context: StageContext, policy: Policy, adapted: Adapted, port: str, weights: Mapping[str, Tensor]
) -> Path:
    """Write a policy to its output port and return where it lies."""
    directory, model, source = context.output(port), adapted.model, policy.artifact.path
    if not hasattr(model, "peft_config"):
        context.describe(port, Kind.MODEL, save_policy(directory, model, source, weights=weights))
        return directory
    base = policy.artifact if policy.base is None else policy.base
    facts = save_policy(
        directory,
        model,
        source,
        base=base.digest,
        initial=adapted.initial,
        weights=weights,
        quantization=context.config.quantization,
    )
    context.describe(port, Kind.ADAPTER, facts)
    return directory


def _warn(context: StageContext, text: str) -> None:
    context.note(text, Level.WARNING)
