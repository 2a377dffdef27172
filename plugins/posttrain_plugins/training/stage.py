"""What every rank of an offline trainer does: rows and a policy in, a trained policy out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Component
from posttrain.contracts.loss import REFERENCES, Need
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.contracts.trainer import Example, Supervise, Trainer
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.models.policy import Policy, open_policy, save_policy, usable_device
from posttrain_plugins.models.quantized import is_quantized
from posttrain_plugins.preparation.dataset import prepared_data
from posttrain_plugins.preparation.examples import Prepared
from posttrain_plugins.trainers.referenced import ReferencedOptions, ReferenceSync
from posttrain_plugins.training.adapters import POLICY_TASK, Adapted, with_adapter
from posttrain_plugins.training.assembly import STEPS, assemble
from posttrain_plugins.training.batches import DataOrder, fullness
from posttrain_plugins.training.checkpoints import Checkpoints
from posttrain_plugins.training.companions import Companions
from posttrain_plugins.training.evaluation import Best, Evaluation
from posttrain_plugins.training.head import vocabulary_of
from posttrain_plugins.training.invariants import Marks, StepZero
from posttrain_plugins.training.loop import Loop
from posttrain_plugins.training.moving import MovingReference
from posttrain_plugins.training.objective import objective
from posttrain_plugins.training.options import EVALUATION, LOG_PROBS, TrainingOptions
from posttrain_plugins.training.reference import (
    given_log_probs,
    log_probs_identity,
    reference_identity,
    reference_log_probs,
)
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
        policy = open_trained(context) if trainer.valued else _open(context)
        needs = loss.plugin.needs_of(loss.config) | trainer.needs(config)
        prepared = prepared_data(context, trainer, policy, "data", needs)
        adapted = _adapted(context, policy, task_of(context) if trainer.valued else POLICY_TASK)
        model = adapted.model
        stack.enter_context(same_config(model))
        if not trainer.dropout:
            stack.enter_context(without_dropout(model))
        parallel.prepare(model)
        session = _session(context, policy, model, prepared, loss, parallel)
        figures, said = session.train()
        if said != f"{session.steps} steps":
            context.note(said)
        put_out, judged = session.conclude()
    if parallel.rank == 0:
        save = partial(_save, context, policy, adapted)
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
        if checkpoint is not None and checkpoint.finished:
            self.loop.take_over(checkpoint)
        else:
            self.loop.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path))
        if not self.loop.ended:
            raise Interrupted(
                "training was asked to stop",
                where=f"step {self.loop.state.global_step} of {self.steps}",
                fix="`posttrain resume` goes on from the checkpoint just written",
            )
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
    loop.add_callback(Watch(context, loop, steps))
    companions = Companions.join(context, loop, replace(policy, model=model), steps)
    if drops(model):
        context.note(
            "dropout is active, and its masks depend on micro_batch_tokens: another cut, other numbers"
        )
    if isinstance(config, ReferencedOptions) and config.reference_sync is not None:
        loop.moving = _moving(context, loop, config.reference_sync, steps)
    elif stepper.needs & REFERENCES:
        visited = [prepared.examples[position] for position in order.visited(steps)]
        if evaluation is not None:
            held_out = evaluation.examples
            evaluation.reference = _reference(context, policy, stepper, held_out, "evaluation-reference")
        given = _given(context, policy, stepper, prepared.examples)
        stepper.reference = given or _reference(context, policy, stepper, visited, "reference")
    elif context.inputs.get(LOG_PROBS):
        raise StageError("the log-probs would be ignored: no loss compares with a reference", where=LOG_PROBS)
    return Session(context, loop, steps, companions)


def _moving(context: StageContext, loop: Loop, sync: ReferenceSync, steps: int) -> MovingReference:
    """Let the reference follow the policy."""
    if not loop.stepper.needs & REFERENCES:
        raise StageError(
            "reference_sync would be ignored: no loss compares with a reference", fix="leave it out"
        )
    if steps <= sync.steps:
        _warn(context, f"the reference never moves: there are {steps} steps, and it would after {sync.steps}")

    def pause(done: int, total: int) -> None:
        context.progress(done, total, "reference rows")

    moving = MovingReference(loop, sync, steps, pause)
    loop.add_callback(moving)
    return moving


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


def _given(
    context: StageContext, policy: Policy, stepper: Stepper, examples: Sequence[Example]
) -> dict[int, Tensor] | None:
    """Return the log-probs at port `log_probs`, if something is connected to it."""
    if not context.inputs.get(LOG_PROBS):
        return None
    identity = log_probs_identity(context.config, policy.artifact.digest, examples)
    tokens = Need.REFERENCE_TOKENS in stepper.needs
    return given_log_probs(context.input(LOG_PROBS), examples, identity, tokens)


def _reference(
    context: StageContext, policy: Policy, stepper: Stepper, examples: Sequence[Example], name: str
) -> dict[int, Tensor]:
    config = context.config
    options = {
        "precision": config.precision,
        "seed": config.seed,
        "tokens": Need.REFERENCE_TOKENS in stepper.needs,
        "adapter": config.adapter and config.adapter.model_dump(mode="json"),
        "quantization": config.quantization and config.quantization.model_dump(mode="json"),
    }

    def pause(done: int) -> None:
        context.progress(done, len(examples), "reference rows")
        if context.stopping:
            raise Interrupted(
                "training was asked to stop",
                where=f"row {done} of the reference",
                fix="`posttrain resume` starts it again",
            )

    identity = reference_identity(policy.artifact.digest, examples, options)
    return reference_log_probs(stepper, examples, context.work / name, identity, pause)


def _open(context: StageContext) -> Policy:
    return open_policy(
        context.input("model"),
        context,
        trainable=True,
        device=usable_device(),
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
