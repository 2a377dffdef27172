"""The target of every offline trainer: rows and a policy in, a trained policy out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from posttrain.artifacts.kinds import Kind
from posttrain.contracts.component import Component
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Level, Outcome, StageContext
from posttrain.contracts.trainer import Example, Trainer
from posttrain.errors import Interrupted
from posttrain_plugins.data.rows import read_rows
from posttrain_plugins.models.policy import Policy, open_policy, save_policy, usable_device
from posttrain_plugins.training.batches import DataOrder, probe
from posttrain_plugins.training.checkpoints import (
    PROGRESS,
    WEIGHTS,
    Checkpoint,
    Checkpoints,
    load_state,
    load_weights,
)
from posttrain_plugins.training.examples import Prepared, prepare
from posttrain_plugins.training.head import TOLERANCE
from posttrain_plugins.training.loop import Loop, require_finite, step_means
from posttrain_plugins.training.options import TrainingOptions
from posttrain_plugins.training.reference import reference_identity, reference_log_probs
from posttrain_plugins.training.setting import (
    arguments,
    deterministic,
    drops,
    same_config,
    with_adapter,
    without_dropout,
)
from posttrain_plugins.training.step import Stepper
from posttrain_plugins.training.watch import Watch


def run(context: StageContext) -> Outcome:
    """Train the policy of port `model` on the dataset of port `data` and put the result out as `model`.

    Raises:
        DataError: No row can be trained on.
        TrainingDiverged: A loss, gradient or weight stopped being finite.
        Interrupted: The stage was asked to stop; a checkpoint has been written.
    """
    config: TrainingOptions = context.config
    trainer = _trainer(context)
    loss = context.component(context.config.loss, Group.LOSS)
    with deterministic(config.seed), ExitStack() as stack:
        policy = open_policy(context.input("model"), context, trainable=True, device=usable_device())
        prepared = _prepare(context, policy)
        model = policy.model if config.lora is None else with_adapter(policy.model, config.lora)
        stack.enter_context(same_config(model))
        if not trainer.dropout:
            stack.enter_context(without_dropout(model))
        session = _session(context, policy, model, prepared, loss)
        figures = session.train()
    require_finite(model, "after the last step", session.loop.checkpoints)
    _save(context, policy, model)
    summary = f"{session.steps} steps over {len(prepared.examples)} rows, loss {figures['loss']:.4f}"
    return Outcome(figures={**figures, **prepared.figures}, steps=session.steps, summary=summary)


@dataclass(frozen=True)
class Session:
    """A loop ready to go, and how many steps it is to take."""

    context: StageContext
    loop: Loop
    steps: int

    def train(self) -> dict[str, float]:
        """Train from the newest checkpoint, if there is one, to the last step; return the final figures."""
        checkpoint = self.loop.checkpoints.newest()
        if checkpoint is not None:
            self.context.note(f"going on from step {checkpoint.step} of {self.steps}")
        if checkpoint is not None and checkpoint.step >= self.steps:
            self._restore(checkpoint)
        else:
            self.loop.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path))
            if self.loop.state.global_step < self.steps:
                raise Interrupted(
                    "training was asked to stop",
                    where=f"step {self.loop.state.global_step} of {self.steps}",
                    fix="`posttrain resume` goes on from the checkpoint just written",
                )
        return step_means(self.loop.meter.recent)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Take over the end of a training that was cut off before its result was saved."""
        load_weights(checkpoint.path / WEIGHTS, self.loop.stepper.model)
        self.loop.meter.restore(load_state(checkpoint.path, PROGRESS)["meter"])


def _trainer(context: StageContext) -> Trainer:
    assert isinstance(context.stage, Trainer), "only trainers have this target"
    return context.stage


def _prepare(context: StageContext, policy: Policy) -> Prepared:
    config, data = context.config, context.input("data")
    prepared = prepare(
        _trainer(context),
        read_rows(data),
        policy.encoder,
        data.facts.format,
        max_length=config.max_length or policy.artifact.facts.context,
        truncation=config.truncation,
        weight_column=config.weight_column,
    )
    for text in prepared.notes:
        _warn(context, text)
    return prepared


def _session(
    context: StageContext, policy: Policy, model: Any, prepared: Prepared, loss: Component
) -> Session:
    config: TrainingOptions = context.config
    order = DataOrder(len(prepared.examples), config.batch_size, config.seed, config.shuffle)
    steps = _steps(config, order.steps_per_epoch)
    pad = policy.encoder.pad_id or 0
    stepper = Stepper(model, _trainer(context), loss, pad, config.micro_batch_tokens, config.bf16)
    loop = Loop(
        arguments(config, steps, context.work / "transformers"),
        stepper,
        prepared.examples,
        order,
        Checkpoints(context.work / "checkpoints", config.save_total_limit, partial(_warn, context)),
        config,
    )
    loop.add_callback(Watch(context, loop, steps))
    told = stepper.choose_head(probe(prepared.examples), TOLERANCE[config.bf16])
    if told is not None:
        _warn(context, told)
    if drops(model):
        context.note(
            "dropout is active, and its masks depend on micro_batch_tokens: another cut, other numbers"
        )
    if loss.plugin.needs_reference:
        visited = [prepared.examples[position] for position in order.visited(steps)]
        stepper.reference = _reference(context, policy, stepper, visited)
    return Session(context, loop, steps)


def _steps(config: TrainingOptions, steps_per_epoch: int) -> int:
    """Return how many steps to take; a product such as 0.07 · 100 must not round up to one more."""
    if config.max_steps > 0:
        return config.max_steps
    return max(1, math.ceil(round(config.num_train_epochs * steps_per_epoch, 6)))


def _reference(
    context: StageContext, policy: Policy, stepper: Stepper, examples: Sequence[Example]
) -> dict[int, Tensor]:
    config = context.config
    options = {
        "bf16": config.bf16,
        "seed": config.seed,
        "lora": config.lora and config.lora.model_dump(mode="json"),
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
    return reference_log_probs(stepper, examples, context.work / "reference", identity, pause)


def _save(context: StageContext, policy: Policy, model: Any) -> None:
    directory = context.output("model")
    if not hasattr(model, "peft_config"):
        context.describe("model", Kind.MODEL, save_policy(directory, model, policy.artifact.path))
        return
    base = policy.artifact if policy.base is None else policy.base
    facts = save_policy(directory, model, policy.artifact.path, base=base.digest)
    context.describe("model", Kind.ADAPTER, facts)


def _warn(context: StageContext, text: str) -> None:
    context.note(text, Level.WARNING)
