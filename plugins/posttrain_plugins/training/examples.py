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

Cut = Callable[[Example, int, int | None], Example | str]
"""(example, longest length, beginning-of-sequence token) → the shortened example, or why its row is dropped."""

_NAMED = 5
"""How many of the rows dropped for one reason are named."""


@dataclass
class Prepared:
    """What training gets to see of a dataset.

    Args:
        examples: The usable rows, in the dataset's order.
        dropped: Rows left out, by reason.
        truncated: Rows that were shortened.
        lost: Tokens that truncation took from the rows that stayed.
        straddling: Rows that stayed in which a token reaches from the prompt into the answer.
        named: The numbers of the first rows left out, from 1, by reason.
    """

    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    lost: int = 0
    straddling: int = 0
    named: dict[str, list[int]] = field(default_factory=dict)

    def drop(self, index: int, reason: str) -> None:
        """Count a row that is left out, and keep its number if it is among the first."""
        self.dropped[reason] += 1
        named = self.named.setdefault(reason, [])
        if len(named) < _NAMED:
            named.append(index + 1)

    @property
    def reasons(self) -> list[str]:
        """How many rows were left out, for which reason and which came first, by frequency."""
        return [
            f"{count} row(s) dropped: {reason} ({self._rows(reason)})"
            for reason, count in self.dropped.most_common()
        ]

    def _rows(self, reason: str) -> str:
        named = self.named[reason]
        more = ", …" if self.dropped[reason] > len(named) else ""
        return f"row{'s' if self.dropped[reason] > 1 else ''} {', '.join(map(str, named))}{more}"

    @property
    def notes(self) -> list[str]:
        """What there is to tell about the rows."""
        notes = self.reasons
        if self.truncated:
            notes.append(f"{self.truncated} row(s) shortened to the longest length, {self.lost} tokens lost")
        if self.straddling:
            notes.append(
                f"{self.straddling} row(s) have a token that begins in the prompt and ends in the answer; "
                "such tokens are not learned"
            )
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
        whole = example = _encoded(trainer, row, index, encoder, format)
        if isinstance(example, Example) and max_length is not None and example.longest > max_length:
            example = shorten(example, max_length, encoder.bos_id)
        if isinstance(example, Example):
            example = _unusable(example, cut=example is not whole) or example
        if isinstance(example, str):
            prepared.drop(index, example)
            continue
        if isinstance(whole, Example) and example is not whole:
            prepared.truncated += 1
            prepared.lost += _size(whole) - _size(example)
        prepared.straddling += any(sequence.straddling for sequence in example.sequences)
        prepared.examples.append(_compact(example, _weight(row, index, weight_column)))
    if not prepared.examples:
        raise _nothing(prepared, len(rows), max_length)
    return prepared


def _encoded(
    trainer: Trainer, row: Mapping[str, Any], index: int, encoder: Any, format: str
) -> Example | str:
    if format == "messages" and all(message["role"] != "assistant" for message in row["messages"]):
        return "no assistant turn"
    try:
        return trainer.example(row, index, encoder, format)
    except DataError as error:
        place = f"row {index + 1}" if error.where is None else f"row {index + 1}, {error.where}"
        raise DataError(
            error.message, where=place, found=error.found, expected=error.expected, fix=error.fix
        ) from error


def _unusable(example: Example, cut: bool) -> str | None:
    """Say why there is nothing to learn from an example, or return None."""
    if any(not sequence.predicted for sequence in example.sequences):
        return "no supervised token"
    first, *others = example.sequences
    if others and all(list(other.tokens) == list(first.tokens) for other in others):
        sides = " and ".join(sequence.role for sequence in example.sequences)
        return f"{sides} have the same tokens" + (" once they are shortened" if cut else "")
    return None


def _nothing(prepared: Prepared, rows: int, max_length: int | None) -> DataError:
    return DataError(
        "no row of the dataset can be trained on",
        found=f"{rows} rows, all dropped ({'; '.join(prepared.reasons)})" if rows else "an empty dataset",
        fix=f"raise max_length (now {max_length}) or look at the data",
    )


def _keep_start(example: Example, limit: int, bos: int | None) -> Example | str:
    sequences = tuple(_without(sequence, limit, None) for sequence in example.sequences)
    if any(not sequence.predicted for sequence in sequences):
        return f"truncation to {limit} tokens removes every supervised token"
    return replace(example, sequences=sequences)


def _keep_end(example: Example, limit: int, bos: int | None) -> Example | str:
    """Cut the same number of tokens from the left of every sequence, so that a pair keeps one prompt.

    What the model expects first, its beginning-of-sequence token, stays.
    """
    first = int(all(sequence.tokens[0] == bos for sequence in example.sequences))
    excess = example.longest - limit
    if excess >= min(_prompt(sequence) for sequence in example.sequences):
        return f"the prompt cannot be cut far enough to fit {limit} tokens"
    sequences = tuple(_without(sequence, first, first + excess) for sequence in example.sequences)
    return replace(example, sequences=sequences)


def _without(sequence: TokenSequence, start: int, end: int | None) -> TokenSequence:
    """Take the tokens from `start` up to `end` out of a sequence; None is its end."""
    tokens, supervised = list(sequence.tokens), list(sequence.supervised)
    del tokens[start:end], supervised[start:end]
    return replace(sequence, tokens=tokens, supervised=supervised)


def _drop(example: Example, limit: int, bos: int | None) -> str:
    return f"longer than {limit} tokens"


def _refuse(example: Example, limit: int, bos: int | None) -> Example | str:
    raise DataError(
        "the row is too long",
        where=f"row {example.row + 1}",
        found=f"{example.longest} tokens",
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
            fix="CSV files hold text only; use JSONL for numbers" if isinstance(value, str) else None,
        )
    return float(value)


def _prompt(sequence: TokenSequence) -> int:
    """Return how many tokens stand before the first supervised one."""
    return next(position for position, counts in enumerate(sequence.supervised) if counts and position)


def _size(example: Example) -> int:
    return sum(len(sequence.tokens) for sequence in example.sequences)


def _compact(example: Example, weight: float) -> Example:
    """Hold tokens in arrays: a list of integers takes several times the memory."""
    sequences = tuple(
        replace(
            sequence, tokens=array("i", sequence.tokens), supervised=bytes(map(bool, sequence.supervised))
        )
        for sequence in example.sequences
    )
    return replace(example, sequences=sequences, weight=weight * example.weight)
