"""From rows to examples: passages, tokens, truncation, weights, and an account of what became of every row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from posttrain.contracts.format import Format
from posttrain.contracts.loss import Need
from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example, Judge, StepEnds, Supervise, TokenSequence, Trainer
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import answers_nothing
from posttrain_plugins.data.formats.values import weight_problem
from posttrain_plugins.data.images.image import Image
from posttrain_plugins.data.tokens.token_rows import TokenRows
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.preparation.supervision import Supervision, no_answer, supervision
from posttrain_plugins.preparation.truncation import shortened

Row = Mapping[str, Any]
CHUNK = 512
"""Rows that are tokenized at a time."""
NO_WORD = "an answer is empty: the model learns to end at once"


@dataclass(frozen=True)
class Preparation:
    """How rows become examples.

    Args:
        passages: Says what of a row is learned, or why it is dropped.
        encoder: The policy's tokenizer and chat template.
        max_length: Longest sequence in tokens; None for no limit.
        truncation: What becomes of longer ones, a key of `TRUNCATIONS`.
        weight_column: Column with the rows' weights.
        supervise: Which tokens of a passage are learned.
        directory: Where the images of rows are; None refuses rows with images.
        verdicts: Says what a row says of its passages in numbers.
    """

    passages: Callable[[Row], Sequence[Passage] | str]
    encoder: Any
    max_length: int | None = None
    truncation: str = "keep_start"
    weight_column: str | None = None
    supervise: Supervise | Judge | StepEnds = Supervise.ANSWERS
    directory: Path | None = None
    verdicts: Callable[[Row], Sequence[float]] = lambda row: ()

    def examples(self, rows: Iterable[Row], account: Account, first: int = 0) -> Iterator[Example]:
        """Turn rows into examples, a few hundred at a time.

        Args:
            rows: The rows.
            account: Is told what becomes of each. A row that cannot be encoded, has no usable weight, or is too long
                with `error` is among its `refused` ones, for the caller to `check` when all rows were looked at.
            first: The index of the first one in its dataset.
        """
        waiting = iter(rows)
        while chunk := list(islice(waiting, CHUNK)):
            yield from self._chunk(chunk, first, account)
            first += len(chunk)

    def _chunk(self, rows: Sequence[Row], first: int, account: Account) -> Iterator[Example]:
        found = [self._passages(row) for row in rows]
        encoded = iter(self.encoder.encode([each for one in found if isinstance(one, list) for each in one]))
        account.rows += len(rows)
        for index, (row, passages) in enumerate(zip(rows, found, strict=True), first):
            parts = list(islice(encoded, len(passages))) if isinstance(passages, list) else []
            try:
                example = self._example(row, index, passages, parts, account)
            except DataError as error:
                account.refused.add(index, error)
                continue
            if isinstance(example, str):
                account.left_out.add(index, example)
            else:
                yield example

    def _example(
        self,
        row: Row,
        index: int,
        passages: list[Passage] | str | DataError,
        parts: Sequence[Any],
        account: Account,
    ) -> Example | str:
        """Return what a row becomes, or why it is dropped; what is wrong with it is raised."""
        if isinstance(passages, DataError):
            raise passages
        if isinstance(passages, str):
            return passages
        for part in parts:
            if isinstance(part, DataError):
                raise part
        whole = Example(index, tuple(map(self.sequence, passages, parts)))
        example = _fitted(whole, self.max_length, self.truncation, self.encoder.bos_id)
        if isinstance(example, str):
            return example
        verdicts = self._way.verdicts(tuple(self.verdicts(row)), example)
        made = _compact(replace(example, verdicts=verdicts), _weight(row, self.weight_column))
        account.remark(index, list(_notes(passages, parts)))
        if any(answers_nothing(passage.completion) for passage in passages if not passage.measured):
            account.remarks.add(index, NO_WORD)
        account.keep(example, whole)
        return made

    def _passages(self, row: Row) -> list[Passage] | str | DataError:
        try:
            passages = self.passages(row)
            if isinstance(passages, str):
                return passages
            if any(no_answer(passage.completion) for passage in passages):
                return "no assistant turn"
            return [self._way.passage(self._opened(passage)) for passage in passages]
        except DataError as error:
            return error

    def _opened(self, passage: Passage) -> Passage:
        if not passage.images:
            return passage
        if self.directory is None:
            raise DataError("a row with images is tokenized while training alone, as it is more than tokens")
        return replace(passage, images=[Image.of(name, self.directory) for name in passage.images])

    def sequence(self, passage: Passage, encoded: Any) -> TokenSequence:
        """Return what the encoder made of a passage as a sequence, whole."""
        return TokenSequence(
            encoded.tokens,
            self._way.mask(encoded),
            passage.role,
            encoded.straddling,
            encoded.images,
            self._way.own,
            _before(encoded) if self._way.own else None,
            passage.measured,
        )

    @cached_property
    def _way(self) -> Supervision:
        return supervision(self.supervise)


@dataclass
class Prepared(Account):
    """What training gets to see of a dataset.

    Args:
        examples: The usable rows, in the dataset's order.
        packs: The positions in `examples` of what each packed row holds; None where a row is an example.
    """

    examples: list[Example] = field(default_factory=list)
    packs: list[range] | None = None

    @property
    def extent(self) -> str:
        """How much there is, in words."""
        if self.packs is None:
            return f"{len(self.examples)} rows"
        return f"{len(self.examples)} examples in {len(self.packs)} rows"

    @property
    def figures(self) -> dict[str, float]:
        """The counts as key figures; where rows are packed, what they hold is counted beside them."""
        if self.packs is None:
            return super().figures
        return {**super().figures, "rows": float(len(self.packs)), "examples": float(len(self.examples))}


def prepare(
    trainer: Trainer,
    rows: Iterable[Row],
    encoder: Any,
    format: Format,
    *,
    max_length: int | None,
    truncation: str,
    weight_column: str | None,
    supervise: Supervise | Judge | StepEnds = Supervise.ANSWERS,
    directory: Path | None = None,
    needs: frozenset[Need] = frozenset(),
) -> Prepared:
    """Turn the rows of a dataset into examples. See `Preparation`; `needs` are told to the trainer.

    Raises:
        DataError: A row cannot be encoded, has no usable weight, is too long with `error`, or no row is left.
    """
    prepared = Prepared()
    preparation = Preparation(
        lambda row: trainer.passages(row, format, needs),
        encoder,
        max_length,
        truncation,
        weight_column,
        supervise,
        directory,
        lambda row: trainer.verdicts(row, format, needs),
    )
    prepared.examples.extend(preparation.examples(rows, prepared))
    require_rows(prepared, max_length)
    return prepared


def prepare_tokens(
    source: TokenRows, *, max_length: int | None, truncation: str, bos: int | None
) -> Prepared:
    """Turn the rows of a tokenized dataset into examples.

    Args:
        source: The rows.
        max_length: Longest sequence in tokens; None for no limit.
        truncation: What becomes of longer ones, a key of `TRUNCATIONS`.
        bos: The beginning-of-sequence token.

    Raises:
        DataError: A row is too long with `error`, or no row is left.
    """
    prepared, packs = Prepared(), []
    for held in source.examples():
        first = len(prepared.examples)
        for whole in held:
            prepared.rows += 1
            try:
                example = _fitted(whole, max_length, truncation, bos)
            except DataError as error:
                prepared.refused.add(whole.row, error)
                continue
            if isinstance(example, str):
                prepared.left_out.add(whole.row, example)
                continue
            prepared.keep(example, whole)
            prepared.examples.append(example if example is whole else _compact(example, 1.0))
        if len(prepared.examples) > first:
            packs.append(range(first, len(prepared.examples)))
    require_rows(prepared, max_length)
    prepared.packs = packs if len(packs) < len(prepared.examples) else None
    return prepared


def require_rows(account: Account, max_length: int | None) -> None:
    """Refuse a dataset of which rows cannot be used, or none can be trained on.

    Raises:
        DataError: It is one; the message counts the reasons.
    """
    account.refused.check(account.rows)
    if account.kept:
        return
    reasons = "; ".join(account.reasons)
    raise DataError(
        "no row of the dataset can be trained on",
        found=f"{account.rows} rows, all dropped ({reasons})" if account.rows else "an empty dataset",
        fix=f"raise max_length (now {max_length}) or look at the data",
    )


def _notes(passages: Sequence[Passage], parts: Sequence[Any]) -> Iterator[Any]:
    """Yield what is said of a row's own passages, and not of answers of other rows."""
    for passage, part in zip(passages, parts, strict=True):
        yield from () if passage.measured else part.notes


def _before(encoded: Any) -> int:
    """Return how many tokens stand before the first one of an answer."""
    return next((place for place, counts in enumerate(encoded.supervised) if counts), len(encoded.tokens))


def _fitted(example: Example, limit: int | None, truncation: str, bos: int | None) -> Example | str:
    """Shorten an example where it is too long; say why where nothing of it can be learned."""
    fitted: Example | str = example
    if limit is not None and example.longest > limit:
        fitted = shortened(example, limit, truncation, bos)
    if isinstance(fitted, str):
        return fitted
    return _unusable(fitted.learned, cut=fitted is not example) or fitted


def _unusable(example: Example, cut: bool) -> str | None:
    """Say why there is nothing to learn from an example, or return None."""
    if any(not sequence.predicted for sequence in example.sequences):
        return "no supervised token"
    first, *others = example.sequences
    if others and all(list(other.tokens) == list(first.tokens) for other in others):
        sides = " and ".join(sequence.role for sequence in example.sequences)
        return f"{sides} have the same tokens" + (" once they are shortened" if cut else "")
    return None


def _weight(row: Row, column: str | None) -> float:
    if column is None:
        return 1.0
    problem = weight_problem(row, column)
    if problem:
        text = isinstance(row.get(column), str)
        raise DataError(
            f"the weight column {problem}" if column in row else f"the row has no weight: {problem}",
            expected="a finite number of at least 0",
            fix=f"CSV files hold text: load it with `json_columns: [{column}]`" if text else None,
        )
    return float(row[column])


def _compact(example: Example, weight: float) -> Example:
    """Hold tokens in arrays: a list of integers takes several times the memory."""
    sequences = tuple(
        replace(
            sequence, tokens=array("i", sequence.tokens), supervised=bytes(map(bool, sequence.supervised))
        )
        for sequence in example.sequences
    )
    return replace(example, sequences=sequences, weight=weight * example.weight)
