"""Where the log-probs that a training's losses compare with come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from posttrain.contracts.loss import REFERENCES, Need
from posttrain.contracts.stage import Level, StageContext
from posttrain.contracts.trainer import Example
from posttrain.errors import Interrupted, StageError
from posttrain_plugins.models.policy import Policy
from posttrain_plugins.stopping import pauses
from posttrain_plugins.trainers.referenced import ReferencedOptions, ReferenceSync
from posttrain_plugins.training.loop import Loop
from posttrain_plugins.training.moving import MovingReference
from posttrain_plugins.training.options import LOG_PROBS
from posttrain_plugins.training.reference import (
    given_log_probs,
    log_probs_identity,
    reference_identity,
    reference_log_probs,
)


@dataclass(frozen=True)
class ReferenceSource:
    """Gives a loop its reference: one that follows the policy, log-probs scored before, or the starting policy.

    Args:
        context: The stage's.
        policy: The starting policy.
        loop: The training, before its first update.
        steps: How many steps it takes.
    """

    context: StageContext
    policy: Policy
    loop: Loop
    steps: int

    def connect(self) -> None:
        """Score what the losses compare with, if one does.

        Raises:
            StageError: A reference was given or asked for that no loss compares with, or it is that of something else.
            Interrupted: The stage was asked to stop.
        """
        config, stepper, evaluation = self.context.config, self.loop.stepper, self.loop.evaluation
        if isinstance(config, ReferencedOptions) and config.reference_sync is not None:
            self._follow(config.reference_sync)
        elif stepper.needs & REFERENCES:
            if evaluation is not None:
                evaluation.reference = self._scored(evaluation.examples, "evaluation-reference")
            visited = [self.loop.examples[position] for position in self.loop.order.visited(self.steps)]
            stepper.reference = self._given() or self._scored(visited, "reference")
        elif self.context.inputs.get(LOG_PROBS):
            raise StageError(
                "the log-probs would be ignored: no loss compares with a reference", where=LOG_PROBS
            )

    @property
    def _tokens(self) -> bool:
        """Whether the log-prob of each token is needed."""
        return Need.REFERENCE_TOKENS in self.loop.stepper.needs

    def _follow(self, sync: ReferenceSync) -> None:
        """Let the reference follow the policy."""
        context, loop = self.context, self.loop
        if not loop.stepper.needs & REFERENCES:
            raise StageError(
                "reference_sync would be ignored: no loss compares with a reference", fix="leave it out"
            )
        if self.steps <= sync.steps:
            text = f"there are {self.steps} steps, and it would after {sync.steps}"
            context.note(f"the reference never moves: {text}", Level.WARNING)

        def pause(done: int, total: int) -> None:
            context.progress(done, total, "reference rows")
            if loop.parallel.agree(context.stopping):
                raise Interrupted(
                    "training was asked to stop",
                    where=f"row {done} of {total} that the reference scores, after step {loop.state.global_step}",
                    fix="`posttrain resume` scores them again",
                )

        loop.moving = MovingReference(loop, sync, self.steps, pause)
        loop.add_callback(loop.moving)

    def _given(self) -> dict[int, Tensor] | None:
        """Return the log-probs at port `log_probs`, if something is connected to it."""
        if not self.context.inputs.get(LOG_PROBS):
            return None
        examples = self.loop.examples
        identity = log_probs_identity(self.context.config, self.policy.artifact.digest, examples)
        return given_log_probs(self.context.input(LOG_PROBS), examples, identity, self._tokens)

    def _scored(self, examples: Sequence[Example], name: str) -> dict[int, Tensor]:
        """Return the starting policy's log-probs, kept under a name for a resume."""
        config, pause = self.context.config, pauses(self.context, "reference rows", "training")
        options = {
            "precision": config.precision,
            "seed": config.seed,
            "tokens": self._tokens,
            "adapter": config.adapter and config.adapter.model_dump(mode="json"),
            "quantization": config.quantization and config.quantization.model_dump(mode="json"),
        }
        identity = reference_identity(self.policy.artifact.digest, examples, options)
        return reference_log_probs(
            self.loop.stepper,
            examples,
            self.context.work / name,
            identity,
            lambda done: pause(done, len(examples)),
        )
