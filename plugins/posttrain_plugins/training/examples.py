"""From rows to examples: tokenization, truncation, and an account of every row that is left out."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.contracts.trainer import Example, TokenSequence, Trainer
from posttrain.errors import DataError

Cut = Callable[[Example, int], Example | str]
"""(example, longest length) → the shortened example, or why its row is dropped."""


@dataclass
class Prepared:
    """What training gets to see of a dataset.

    Args:
        examples: The usable rows, in the dataset's order.
        dropped: Rows left out, by reason.
        truncated: Rows that were shortened.
        lost: Tokens that truncation took from the rows that stayed.
    """

    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    lost: int = 0

    @property
    def notes(self) -> list[str]:
        """What there is to tell about the rows."""
        notes = [f"{count} row(s) dropped: {reason}" for reason, count in self.dropped.most_common()]
        if self.truncated:
            notes.append(f"{self.truncated} row(s) shortened to the longest length, {self.lost} tokens lost")
        return notes

    @property
    def figures(self) -> dict[str, float]:
        """The counts as key figures."""
        return {
            "rows": float(len(self.examples)),
            "rows_dropped": float(self.dropped.total()),
            "rows_truncated": float(self.truncated),
        }


def prepare(
    trainer: Trainer,
    rows: Sequence[Mapping[str, Any]],
    encoder: Any,
    format: str,
    *,
    max_length: int | None,
    truncation: str,
    weight_column: str | None,
) -> Prepared:
    """Turn rows into examples.

    Args:
        trainer: Says which sequences a row has.
        rows: The dataset.
        encoder: The policy's tokenizer and chat template.
        format: The dataset's format.
        max_length: Longest sequence in tokens; None for no limit.
        truncation: What becomes of longer ones, a key of `TRUNCATIONS`.
        weight_column: Column with the rows' weights.

    Raises:
        DataError: A row cannot be encoded, has no usable weight, is too long with `error`, or no row is left.
    """
    prepared = Prepared()
    shorten = TRUNCATIONS[truncation]
    for index, row in enumerate(rows):
        example = _encoded(trainer, row, index, encoder, format)
        if isinstance(example, Example) and max_length is not None and _longest(example) > max_length:
            before = _size(example)
            example = shorten(example, max_length)
            if isinstance(example, Example):
                prepared.truncated += 1
                prepared.lost += before - _size(example)
        if isinstance(example, Example) and any(not sequence.predicted for sequence in example.sequences):
            example = "no supervised token"
        if isinstance(example, str):
            prepared.dropped[example] += 1
            continue
        prepared.examples.append(_compact(example, _weight(row, index, weight_column)))
    if not prepared.examples:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in prepared.dropped.most_common())
        raise DataError(
            "no row of the dataset can be trained on",
            found=f"{len(rows)} rows, all dropped ({reasons})" if rows else "an empty dataset",
            fix=f"raise max_length (now {max_length}) or look at the data",
        )
    return prepared


def _encoded(
    trainer: Trainer, row: Mapping[str, Any], index: int, encoder: Any, format: str
) -> Example | str:
    try:
        return trainer.example(row, index, encoder, format)
    except DataError as error:
        place = f"row {index + 1}" if error.where is None else f"row {index + 1}, {error.where}"
        raise DataError(
            error.message, where=place, found=error.found, expected=error.expected, fix=error.fix
        ) from error


def _keep_start(example: Example, limit: int) -> Example | str:
    sequences = tuple(
        TokenSequence(sequence.tokens[:limit], sequence.supervised[:limit], sequence.role)
        for sequence in example.sequences
    )
    if any(not sequence.predicted for sequence in sequences):
        return f"truncation to {limit} tokens removes every supervised token"
    return replace(example, sequences=sequences)


def _keep_end(example: Example, limit: int) -> Example | str:
    """Cut the same number of tokens from the left of every sequence, so that a pair keeps one prompt."""
    excess = _longest(example) - limit
    if excess >= min(_prompt(sequence) for sequence in example.sequences):
        return f"the prompt cannot be cut far enough to fit {limit} tokens"
    return replace(
        example,
        sequences=tuple(
            TokenSequence(sequence.tokens[excess:], sequence.supervised[excess:], sequence.role)
            for sequence in example.sequences
        ),
    )


def _drop(example: Example, limit: int) -> str:
    return f"longer than {limit} tokens"


def _refuse(example: Example, limit: int) -> Example | str:
    raise DataError(
        "the row is too long",
        where=f"row {example.row + 1}",
        found=f"{_longest(example)} tokens",
        expected=f"at most {limit}",
        fix="raise max_length or choose another truncation",
    )


TRUNCATIONS: Mapping[str, Cut] = {
    "keep_start": _keep_start,
    "keep_end": _keep_end,
    "drop": _drop,
    "error": _refuse,
}


def _weight(row: Mapping[str, Any], index: int, column: str | None) -> float:
    if column is None:
        return 1.0
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise DataError(
            f"the weight column `{column}` needs a finite number of at least 0",
            where=f"row {index + 1}",
            found="no such column" if column not in row else repr(value),
        )
    return float(value)


def _prompt(sequence: TokenSequence) -> int:
    """Return how many tokens stand before the first supervised one."""
    return next(position for position, counts in enumerate(sequence.supervised) if counts and position)


def _longest(example: Example) -> int:
    return max(len(sequence.tokens) for sequence in example.sequences)


def _size(example: Example) -> int:
    return sum(len(sequence.tokens) for sequence in example.sequences)


def _compact(example: Example, weight: float) -> Example:
    """Hold tokens in arrays: a list of integers takes several times the memory."""
    sequences = tuple(
        TokenSequence(array("i", sequence.tokens), bytes(map(bool, sequence.supervised)), sequence.role)
        for sequence in example.sequences
    )
    return replace(example, sequences=sequences, weight=weight * example.weight)
