"""Scoring answers step by step with a process reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.trainer import Example, StepEnds
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import Turns, as_messages
from posttrain_plugins.data.formats.stepwise import in_steps
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.preparation.examples import Preparation
from posttrain_plugins.rewards.aggregation import Aggregation, aggregate, probability
from posttrain_plugins.rewards.steps import Style, steps_of

if TYPE_CHECKING:
    from posttrain_plugins.models.policy import Policy

Row = Mapping[str, Any]
"""`prompt` and `completions`, as rows of the format `stepwise` have them, and what stands beside them there."""
Pause = Callable[[int], None]


@dataclass(frozen=True)
class StepScores:
    """What a process reward model says of one answer.

    Args:
        log_odds: That the answer is right up to the end of each step.
    """

    log_odds: tuple[float, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """How likely it is right up to there."""
        return tuple(map(probability, self.log_odds))

    def reward(self, aggregation: Aggregation) -> float:
        """Return one number for the answer."""
        return aggregate(self.log_odds, aggregation)


def require_encodable(account: Account) -> None:
    """Refuse answers that cannot be encoded.

    Raises:
        DataError: There are some.
    """
    account.refused.check(account.rows)


@dataclass(frozen=True)
class ProcessScorer:
    """A process reward model, ready to score.

    Args:
        policy: The model and its encoder.
        separator: What ends every step that is a string, as in its training.
        max_length: Longest prompt with its answer, in tokens; longer ones are not scored.
        batch_tokens: Tokens of a batch, padding included.
        account: What became of the rows.
    """

    policy: Policy
    separator: str
    max_length: int | None = None
    batch_tokens: int = 16384
    account: Account = field(default_factory=Account)

    @classmethod
    def open(
        cls,
        artifact: Artifact,
        context: Any,
        *,
        separator: str | None = None,
        batch_tokens: int = 16384,
        device: str = "cpu",
    ) -> Self:
        """Open a process reward model.

        Args:
            artifact: The model, as weights or as an adapter.
            context: Looks up the base of an adapter.
            separator: What ends every step that is a string; None for what the model was trained with.
            batch_tokens: Tokens of a batch, padding included.
            device: Where to compute.

        Raises:
            DataError: Nothing tells what the model was trained with.
            StageError: It no longer gives the numbers it was saved with.
        """
        from posttrain_plugins.models.valued import open_valued

        known = separator if separator is not None else separator_of(artifact)
        if known is None:
            raise DataError(
                "the model does not say what ended the steps that it was trained on",
                where=artifact.ref,
                fix="name the separator",
            )
        policy = open_valued(artifact, context, Kind.PROCESS_REWARD_MODEL, device=device)
        return cls(policy, known, artifact.facts.context, batch_tokens)

    def score(
        self,
        rows: Sequence[Row],
        pause: Pause = lambda done: None,
        judge: Callable[[Account], None] = require_encodable,
    ) -> list[StepScores | None]:
        """Return what the model says of each answer; None for one that is longer than the model can take.

        Args:
            rows: Prompts with answers in steps.
            pause: Called with the number of answers done; may raise to stop.
            judge: Called with what became of the rows before the model is; may raise. Answers that cannot be encoded
                are not scored where it lets them pass.

        Raises:
            DataError: An answer cannot be encoded, such as a conversation without a chat template.
        """
        ready = Preparation(
            lambda row: (in_steps(row),),
            self.policy.encoder,
            self.max_length,
            "drop",
            supervise=StepEnds(self.separator),
        )
        found: list[StepScores | None] = [None] * len(rows)
        done, account = 0, Account()
        examples = list(ready.examples(rows, account))
        self.account.take(account)
        judge(account)
        for part in self._parts(examples):
            for example, scores in zip(part, self._values(part), strict=True):
                found[example.row] = scores
            done += len(part)
            pause(done)
        return found

    def _parts(self, examples: Iterable[Example]) -> list[list[Example]]:
        from posttrain_plugins.training.batches import Budget, cut
        from posttrain_plugins.training.layouts import LAYOUTS

        return cut(list(examples), LAYOUTS["padded"], Budget(self.batch_tokens))

    def _values(self, part: Sequence[Example]) -> Iterable[StepScores]:
        """Run the model over some answers at once."""
        from posttrain_plugins.models.mode import evaluating
        from posttrain_plugins.training.head import Wanted
        from posttrain_plugins.training.head.value import ValueHead
        from posttrain_plugins.training.layouts import LAYOUTS

        model = self.policy.model
        device = next(model.parameters()).device
        micro = LAYOUTS["padded"].arrange(part, self.policy.encoder.pad_id, device)
        with evaluating(model):
            value = ValueHead()(model, micro, Wanted()).value
        assert value is not None, "such a head gives numbers"
        values = iter(value.tolist())
        return [StepScores(tuple(islice(values, count))) for count in micro.lengths.tolist()]


def separator_of(artifact: Artifact) -> str | None:
    """Return what ended the steps that a process reward model was trained on, or None where that is not known."""
    scores = artifact.facts.scores
    return None if scores is None else scores.separator


def answered(prompt: Turns, completion: Turns, style: Style | None = None) -> Row:
    """Return a prompt with an answer in steps, as `ProcessScorer.score` takes it.

    A text, or the one message of an answer that holds nothing else, is cut where it is written in steps. Of several
    messages each assistant turn begins a step. There is no step where there is nothing to see.

    Args:
        prompt: A string or messages.
        completion: A string or messages.
        style: How the steps of a text are told; see `steps_of`.
    """
    if isinstance(completion, str):
        return {"prompt": prompt, "completions": steps_of(completion, style)}
    first, *others = completion
    if not others and set(first) <= {"role", "content"} and isinstance(first["content"], str):
        return {"prompt": as_messages(prompt), "completions": steps_of(first["content"], style)}
    steps: list[list[Mapping[str, Any]]] = []
    for message in completion:
        if message["role"] == "assistant" or not steps:
            steps.append([])
        steps[-1].append(message)
    return {"prompt": prompt, "completions": steps}
