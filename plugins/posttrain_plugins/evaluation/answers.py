"""What models say of the answers to a prompt, in numbers: reward models give rewards, policies log-probs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from posttrain.artifacts.kinds import POLICY, Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Level, StageContext
from posttrain.contracts.trainer import Judge, Supervise, Trainer
from posttrain_plugins.evaluation.likelihood import log_probs
from posttrain_plugins.evaluation.preferences import PreferencesConfig
from posttrain_plugins.evaluation.rewards import values_of
from posttrain_plugins.models.policy import Policy, open_policy, usable_device
from posttrain_plugins.models.valued import open_valued
from posttrain_plugins.preparation.examples import Prepared
from posttrain_plugins.trainers.cpo import Cpo
from posttrain_plugins.trainers.reward import Reward

Progress = Callable[[int, int], None]
Numbers = Mapping[int, tuple[float, float]]
"""What a model gives the chosen and the rejected answer, by row."""


class Reader(ABC):
    """How the answers of pairs get their numbers from one kind of model.

    Class attributes:
        trainer: Reads a row.
        supervise: Which places of an answer are looked at.
    """

    trainer: ClassVar[Trainer]
    supervise: ClassVar[Supervise | Judge]

    @abstractmethod
    def open(self, model: Artifact, context: StageContext) -> Policy:
        """Open a model of the kind."""

    @abstractmethod
    def read(self, policy: Policy, prepared: Prepared, context: StageContext, progress: Progress) -> Numbers:
        """Return the numbers of all pairs."""


class Rewards(Reader):
    """The reward model's number, read at an answer's last token."""

    trainer, supervise = Reward(), Judge.END

    def open(self, model: Artifact, context: StageContext) -> Policy:
        """Open it with its head."""
        return open_valued(model, context, Kind.REWARD_MODEL, device=usable_device())

    def read(self, policy: Policy, prepared: Prepared, context: StageContext, progress: Progress) -> Numbers:
        """Return the rewards."""
        config: PreferencesConfig = context.config
        found = values_of(policy.model, prepared.examples, config.batch_tokens, progress)
        return {row: (chosen, rejected) for row, (chosen, rejected) in found.items()}


class LogProbs(Reader):
    """The log-prob of an answer under the policy, Σ log p(token), or their mean where the options say so."""

    trainer, supervise = Cpo(), Supervise.ANSWERS

    def open(self, model: Artifact, context: StageContext) -> Policy:
        """Open it as it answers."""
        return open_policy(model, context, device=usable_device())

    def read(self, policy: Policy, prepared: Prepared, context: StageContext, progress: Progress) -> Numbers:
        """Return the log-probs."""
        config: PreferencesConfig = context.config

        def warn(text: str) -> None:
            context.note(text, Level.WARNING)

        budget, examples = config.batch_tokens, prepared.examples
        found = log_probs(policy, examples, batch_tokens=budget, progress=progress, warn=warn)
        sizes = {
            example.row: [each.predicted if config.length_normalized else 1 for each in example.sequences]
            for example in examples
        }
        return {
            row: (chosen / sizes[row][0], rejected / sizes[row][1])
            for row, (chosen, rejected) in found.items()
        }


READERS: Mapping[Kind, Reader] = {Kind.REWARD_MODEL: Rewards(), **dict.fromkeys(POLICY, LogProbs())}
"""How each kind of model is asked."""
