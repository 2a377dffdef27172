"""The trainer contract: which rows, which sequences, which forwards, which losses.

The training loop does the rest. torch and transformers appear in annotations only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.contracts.format import Format, Row
from posttrain.contracts.loss import Family, Need
from posttrain.contracts.passage import Passage
from posttrain.contracts.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """One token sequence with the positions that are supervised.

    Args:
        tokens: Token ids, length T.
        supervised: T truth values; position t counts when token t is to be predicted. Position 0 never is.
        role: What the sequence is to its example: `completion`, `chosen`, `rejected`.
        straddling: Tokens that begin before an answer and end inside it, and so are not supervised.
        images: The images in it; the tokens of each are those from its `start` up to its `end`.
        own: What is supervised is not the prediction of a token, but what the model says at the token itself.
        prompt: How many tokens stand before the answer, where `supervised` does not tell it.
        measured: Nothing of it is learned; see `Passage`. It may have nothing to predict.
    """

    tokens: Sequence[int]
    supervised: Sequence[bool] | Sequence[int]
    role: str
    straddling: int = 0
    images: tuple[Any, ...] = ()
    own: bool = False
    prompt: int | None = None
    measured: bool = False

    @cached_property
    def predicted(self) -> int:
        """How many tokens are to be predicted."""
        if isinstance(self.supervised, bytes):
            return len(self.supervised[1:]) - self.supervised.count(0, 1)
        return sum(map(bool, self.supervised[1:]))


@dataclass(frozen=True)
class Example:
    """What one row of a dataset says, as sequences; `row` is its number, `weight` multiplies its values.

    A packed row of a tokenized dataset says several things: each is an example of its own. Every example of a
    trainer of a policy has the same number of sequences in the same order of roles. They are never
    separated: a micro-batch holds all of an example or none of it. `verdicts` are what the row says of its
    sequences in numbers, as its trainer reads them: labels, scores, a margin.
    """

    row: int
    sequences: tuple[TokenSequence, ...]
    weight: float = 1.0
    verdicts: tuple[float, ...] = ()

    @cached_property
    def learned(self) -> Example:
        """The example without the sequences that are only measured."""
        kept = tuple(sequence for sequence in self.sequences if not sequence.measured)
        return self if len(kept) == len(self.sequences) else replace(self, sequences=kept)

    @cached_property
    def measured(self) -> Example | None:
        """The example with the sequences alone that are only measured; None where these predict nothing."""
        kept = tuple(sequence for sequence in self.sequences if sequence.measured)
        return replace(self, sequences=kept) if any(each.predicted for each in kept) else None

    @cached_property
    def longest(self) -> int:
        """The length of its longest sequence, in tokens."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    @cached_property
    def size(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @cached_property
    def predicted(self) -> int:
        """Supervised tokens of all its sequences."""
        return sum(sequence.predicted for sequence in self.sequences)

    @cached_property
    def prefix(self) -> int:
        """How many first tokens its sequences share, at least one of each sequence left out; 0 for a single one."""
        if len(self.sequences) == 1:
            return 0
        first, *others = (sequence.tokens for sequence in self.sequences)
        shared = min(len(tokens) for tokens in (first, *others)) - 1
        for tokens in others:
            pairs = enumerate(zip(first[:shared], tokens[:shared], strict=True))
            shared = next((at for at, (one, other) in pairs if one != other), shared)
        return max(shared, 0)


@dataclass(frozen=True)
class Scores:
    """What the policy says about the N supervised tokens of the S sequences of E examples.

    Args:
        examples: The E examples; their sequences follow each other in this order.
        logp: log π(token | prefix), shape [N], nats, with gradient.
        entropy: Entropy of the policy at each token, shape [N], nats; with gradient where the loss declares
            `Need.ENTROPY`.
        top1: Whether the token is the policy's most likely one, shape [N], bool.
        sequence: Index of the sequence each token belongs to, shape [N], ascending.
        lengths: Supervised tokens of each sequence, shape [S].
        weight: Each example's weight, shape [E].
        reference: Σ log π_ref over each sequence's supervised tokens, shape [S], where the loss needs it.
        squares: Σ_v π(v)² at each token, shape [N], with gradient, where the loss declares `Need.SQUARES`.
        reference_logp: log π_ref of each token, shape [N], where `Need.REFERENCE_TOKENS` is declared.
        value: What a model with a head for numbers says at each of the N places, shape [N], with gradient; None of
            policies. Log-probs are zeros then.
        mean_logp: The mean of log π(v) over the vocabulary at each token, shape [N], with gradient, where the loss
            declares `Need.MEAN_LOGP`.
        needs: What the batch has to hold beside log-probs, as the loss and the trainer's options declare.
    """

    examples: Sequence[Example]
    logp: Tensor
    entropy: Tensor
    top1: Tensor
    sequence: Tensor
    lengths: Tensor
    weight: Tensor
    reference: Tensor | None = None
    squares: Tensor | None = None
    reference_logp: Tensor | None = None
    value: Tensor | None = None
    mean_logp: Tensor | None = None
    needs: frozenset[Need] = frozenset()

    @property
    def width(self) -> int:
        """Sequences of each example."""
        return len(self.examples[0].sequences)

    @property
    def verdicts(self) -> Tensor:
        """What the rows say in numbers, example by example, shape [any]."""
        said = [verdict for example in self.examples for verdict in example.verdicts]
        return (self.logp if self.value is None else self.value).new_tensor(said)

    def totals(self, values: Tensor) -> Tensor:
        """Sum token values over each sequence: shape [N] to [E, sequences of an example]."""
        return self.sums(values).view(len(self.examples), self.width)

    def sums(self, values: Tensor) -> Tensor:
        """Sum token values over each sequence: shape [N] to [S]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.sequence, values)


class Supervise(StrEnum):
    """Which tokens of a passage are learned.

    ANSWERS: the completion of a pair, every assistant turn of a conversation, all of a text. LAST_ANSWER: of a
    conversation only the last assistant turn. EVERYTHING: prompts too.
    """

    ANSWERS = "answers"
    LAST_ANSWER = "last_answer"
    EVERYTHING = "everything"


class Judge(StrEnum):
    """At which token of a passage a model that gives numbers is asked for one.

    END: the last one.
    """

    END = "end"


@dataclass(frozen=True)
class StepEnds:
    """A model that gives numbers is asked for one at the last token of each step of the answer.

    Args:
        separator: What ends every step that is a string; it is added to those that do not end with it.
        last: Whether the last step alone is asked about.
    """

    separator: str = "\n"
    last: bool = False


class Trainer(Stage):
    """A stage that optimizes a policy. Registered under `Group.TRAINER` as `train.…`, its stage name.

    Class attributes:
        family: The family of losses it drives.
        formats: The dataset formats it takes; `tokens` and `token_pairs` are tokenized already.
        dropout: Whether the model's dropout stays active while it trains.
        valued: Whether it trains a model that gives numbers, such as a reward model, and not a policy.
        diagnostics: Whether `entropy` and `top1` are computed for metrics; `entropy` also is where the loss needs
            it. Where they are not, they are zeros.
    """

    family: ClassVar[Family]
    formats: ClassVar[frozenset[str]]
    dropout: ClassVar[bool] = True
    diagnostics: ClassVar[bool] = False
    valued: ClassVar[bool] = False

    def rows(self, rows: Iterable[Row], format: Format, needs: frozenset[Need], seed: int) -> Iterable[Row]:
        """Return the rows as `passages` gets to see them: the rows themselves, unless one must know of others."""
        return rows

    def passages(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[Passage] | str:
        """Return what of a row is learned, or why the row is dropped.

        Each passage becomes a sequence, in this order; all rows of a trainer give as many passages. The trainer
        never tokenizes. `needs` is what the loss and the trainer's options need, as `verdicts` is told.
        """
        return format.passages(row)

    def supervise(self, config: Any) -> Supervise | Judge | StepEnds:
        """Return which tokens of the passages are learned, or where numbers are asked for."""
        return Supervise.ANSWERS

    def supervise_held_out(self, config: Any) -> Supervise | Judge | StepEnds:
        """Return the same for rows that are evaluated on; as `supervise` by default."""
        return self.supervise(config)

    def verdicts(self, row: Row, format: Format, needs: frozenset[Need]) -> Sequence[float]:
        """Return what a row says of its sequences in numbers, as `batch` wants them; nothing by default.

        Args:
            row: The row.
            format: Its format.
            needs: What the loss and the trainer's options need, as `Scores.needs` tells `batch`.

        Raises:
            DataError: It says something else than numbers.
        """
        return ()

    def remarks(self, examples: Sequence[Example]) -> Sequence[str]:
        """Return what is odd about all examples of a dataset together, such as labels that are all the same."""
        return ()

    def needs(self, config: Any) -> frozenset[Need]:
        """Return what the trainer's own options need of each batch, beside what its loss needs."""
        return frozenset()

    @abstractmethod
    def batch(self, scores: Scores, config: Any) -> Any:
        """Assemble the loss family's batch from the scores of a part of the step, or of all of it."""

    def invariants(self, metrics: Mapping[str, float], config: Any) -> Sequence[str]:
        """Return what is wrong with the metrics of the very first step's forwards, before any update.

        Where the loss needs a reference, `reference/gap` is the largest |log π − log π_ref| of a sequence, in
        nats a token.
        """
        return ()
