"""What must hold before the first update: of the first step's tokens, and of what the policy says about them.

Every training stage asks this once. Manifests tell what should fit; here is what really reaches the loss. Nothing of it
is computed again after step 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.contracts.trainer import Example, TokenSequence, Trainer
from posttrain.errors import StageError

if TYPE_CHECKING:
    from posttrain_plugins.training.tally import StepResult

UNLIKELY = 20
"""Supervised tokens this many times less likely, in nats, than by guessing mean a wrong tokenizer or model."""
ODD = 2
"""From this many times on it is said."""
_UNKNOWN = 0.1
_MOST = 0.5
_SEVERAL = 4
_KNOW = (
    "`posttrain data inspect DATA --model MODEL --tokens` shows them; start from a model whose tokenizer knows these "
    "characters (`model.init` makes one of the rows at its port `data`), or mend rows read in a wrong encoding"
)
"""What to do about tokens that the tokenizer does not know."""


@dataclass(frozen=True)
class Marks:
    """What ids mean to the policy that is trained.

    Args:
        size: Rows of its embeddings.
        stops: Ids that end an answer.
        bos: The id that begins a text, or None.
        unk: The id of what the tokenizer does not know, or None.
    """

    size: int
    stops: frozenset[int]
    bos: int | None = None
    unk: int | None = None

    @classmethod
    def of(cls, encoder: Any, size: int) -> Marks:
        """Take them from a policy's encoder."""
        return cls(size, frozenset(encoder.stop_ids), encoder.bos_id, encoder.unk_id)


@dataclass(frozen=True)
class StepZero:
    """Checks the first step.

    Args:
        marks: What ids mean.
        warn: Is told what is odd.
        prompts: Whether every sequence begins with a prompt that is not learned.
        judges: Whether the model gives numbers, so that no token is learned.
    """

    marks: Marks
    warn: Callable[[str], None]
    prompts: bool = False
    judges: bool = False

    def check_rows(self, examples: Sequence[Example]) -> None:
        """Look at the tokens of the first step, before any forward pass.

        Raises:
            StageError: The policy would learn something else than is meant, or nothing.
        """
        sequences = [sequence for example in examples for sequence in example.sequences]
        for text in self._oddities(examples, sequences):
            self.warn(f"step 0: {text}")
        _refuse(self._faults(examples, sequences), _KNOW if self._unknown(sequences) > _MOST else None)

    def check_scores(
        self, trainer: Trainer, config: Any, metrics: Mapping[str, float], result: StepResult
    ) -> None:
        """Look at what the first step's forward passes came to, before any update.

        Raises:
            StageError: Training would start from a wrong state.
        """
        problems = [*trainer.invariants(metrics, config)]
        guessing = math.log(self.marks.size)
        cost = (
            f"the supervised tokens cost {result.surprise:.3g} nats each before the first update, and guessing "
            f"costs {guessing:.3g}; a tokenizer that is not the model's, or damaged weights, would do that"
        )
        if result.surprise > UNLIKELY * guessing:
            problems.append(cost)
        elif result.surprise > ODD * guessing:
            self.warn(f"step 0: {cost}")
        _refuse(problems)

    def _faults(self, examples: Sequence[Example], sequences: Sequence[TokenSequence]) -> Iterator[str]:
        outside = {id for each in sequences for id in each.tokens if not 0 <= id < self.marks.size}
        if outside:
            ids = ", ".join(map(str, sorted(outside)[:3]))
            yield f"the rows hold ids such as {ids}, and the model embeds {self.marks.size} tokens"
        doubled = self._share(sequences, self._begins_twice)
        if doubled > _MOST:
            yield f"{doubled:.0%} of the sequences begin with two beginning-of-sequence tokens ({self.marks.bos})"
        masked = self._share(sequences, self._end_is_masked)
        if masked > _MOST and not self.judges:
            yield (
                f"in {masked:.0%} of the sequences the token that ends the answer is not learned, though it is there; "
                "the policy would never stop"
            )
        if not any(example.weight for example in examples):
            yield "every row has the weight 0, so nothing would be learned"
        if (unknown := self._unknown(sequences)) > _MOST:
            yield f"{unknown:.0%} of the {self._looked_at} are unknown to the tokenizer"

    def _oddities(self, examples: Sequence[Example], sequences: Sequence[TokenSequence]) -> Iterator[str]:
        if not self.judges and not any(self._learns_end(sequence) for sequence in sequences):
            yield (
                "no sequence has an end token to learn, so the policy will not learn to stop; rows that are cut off, "
                "or a template without one, would do that"
            )
        if self.prompts and all(sequence.predicted >= len(sequence.tokens) - 1 for sequence in sequences):
            yield "every token of every sequence is learned, prompts too"
        if _UNKNOWN < (unknown := self._unknown(sequences)) <= _MOST:
            yield f"{unknown:.0%} of the {self._looked_at} are unknown to the tokenizer; {_KNOW}"
        if (
            not self.judges
            and unknown <= _UNKNOWN
            and (seen := self._unknown(sequences, prompts=True)) > _UNKNOWN
        ):
            yield f"{seen:.0%} of the tokens, prompts included, are unknown to the tokenizer; {_KNOW}"
        distinct = {
            (tuple(each.tokens), tuple(each.images)) for example in examples for each in example.sequences[:1]
        }
        if len(examples) >= _SEVERAL and len(distinct) == 1:
            yield f"all {len(examples)} rows are the same"

    def _begins_twice(self, sequence: TokenSequence) -> bool:
        return self.marks.bos is not None and list(sequence.tokens[:2]) == [self.marks.bos] * 2

    def _end_is_masked(self, sequence: TokenSequence) -> bool:
        """Whether a learned answer goes on with a stop token that is not learned, and has none that is."""
        tokens, learned, stops = sequence.tokens, sequence.supervised, self.marks.stops
        return any(
            learned[at - 1] and not learned[at] and tokens[at] in stops and tokens[at - 1] not in stops
            for at in range(1, len(tokens))
        )

    def _learns_end(self, sequence: TokenSequence) -> bool:
        pairs = zip(sequence.tokens, sequence.supervised, strict=True)
        return any(counts and id in self.marks.stops for id, counts in pairs)

    @property
    def _looked_at(self) -> str:
        return "tokens" if self.judges else "learned tokens"

    def _unknown(self, sequences: Sequence[TokenSequence], *, prompts: bool = False) -> float:
        """Return the share of learned tokens, or of those that a judge reads, that are the unknown token.

        With `prompts`, of all tokens.
        """
        if self.marks.unk is None:
            return 0.0
        looked_at = [
            id
            for each in sequences
            for id, counts in zip(each.tokens, each.supervised, strict=True)
            if counts or self.judges or prompts
        ]
        return looked_at.count(self.marks.unk) / max(len(looked_at), 1)

    @staticmethod
    def _share(sequences: Sequence[TokenSequence], test: Callable[[TokenSequence], bool]) -> float:
        return sum(map(test, sequences)) / max(len(sequences), 1)


def _refuse(problems: Iterable[str], fix: str | None = None) -> None:
    found = list(problems)
    if found:
        raise StageError(
            "training would start from a wrong state", where="step 0", found="; ".join(found), fix=fix
        )
