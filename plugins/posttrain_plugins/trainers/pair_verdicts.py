"""What rows of pairs say of their answers beside which is better: who wrote them, and how sure the preference is.

It is read where a loss declares that it needs it, and columns of these names mean nothing to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.contracts.loss import Need
from posttrain.contracts.stage import Finding, Input, Level
from posttrain.errors import DataError
from posttrain_plugins.data.formats.values import probability
from posttrain_plugins.data.tokens.token_rows import FORMATS as TOKENIZED
from posttrain_plugins.handoffs.lineage import certainty

if TYPE_CHECKING:
    from torch import Tensor

Row = Mapping[str, Any]
WRITERS: Mapping[str, float] = {"policy": 1.0, "reference": 0.0}
"""Who may have written the chosen answer; the rejected one is by the other."""


@dataclass(frozen=True)
class _Column:
    """A column, what is wrong with a value of it, and the value as a number."""

    name: str
    expected: str
    problem: Callable[[Any], str | None]
    number: Callable[[Any], float]


def _writer(value: Any) -> str | None:
    return None if value in tuple(WRITERS) else "is neither `policy` nor `reference`"


COLUMNS: Mapping[Need, _Column] = {
    Need.AUTHORS: _Column(
        "chosen_by",
        "`policy` where the policy wrote the chosen answer, `reference` where it wrote the rejected one",
        _writer,
        WRITERS.__getitem__,
    ),
    Need.PREFERENCE: _Column(
        "preference", "how likely the chosen answer is preferred, from 0 to 1", probability, float
    ),
}
"""What a loss may need of a pair, in the order of the numbers of a row."""


class _Asked(dict[str, Any]):
    """A row of which something of `COLUMNS` is needed."""

    needs: frozenset[Need] = frozenset()


def asked(rows: Iterable[Row], needs: frozenset[Need]) -> Iterator[Row]:
    """Mark the rows of which a loss needs something."""
    for row in rows:
        marked = _Asked(row)
        marked.needs = needs & COLUMNS.keys()
        yield marked if marked.needs else row


def numbers_of(row: Row) -> Sequence[float]:
    """Return what a marked row says, NaN for what is not needed; nothing of other rows.

    Raises:
        DataError: It does not say it.
    """
    if not isinstance(row, _Asked):
        return ()
    return [_number(row, column) if need in row.needs else float("nan") for need, column in COLUMNS.items()]


def fields_of(verdicts: Tensor) -> dict[str, Tensor | None]:
    """Return the fields `own` and `preference` of the batch of some rows, given the numbers of all of them."""
    if not len(verdicts):
        return {"own": None, "preference": None}
    own, preference = verdicts.view(-1, len(COLUMNS)).unbind(1)
    return {
        "own": None if own.isnan().any() else own > 0.5,
        "preference": None if preference.isnan().any() else preference,
    }


def missing_columns(needs: frozenset[Need], port: str, data: Input) -> Iterable[Finding]:
    """Report columns that a loss needs and a dataset is known not to have."""
    columns = data.facts.columns
    for need, column in COLUMNS.items():
        bare = data.facts.format in TOKENIZED
        if need not in needs or not (bare or (columns is not None and column.name not in columns)):
            continue
        message = f"the loss needs the column `{column.name}`, which {data.origin} has not"
        fix = (
            f"add it: {column.expected}"
            if not bare
            else "connect the rows themselves: tokenized ones have none"
        )
        yield Finding("trainer", Level.ERROR, certainty(data), message, port=port, fix=fix)


def _number(row: Row, column: _Column) -> float:
    found = "is missing" if column.name not in row else column.problem(row[column.name])
    if found is not None:
        raise DataError(f"the column `{column.name}` {found}", expected=column.expected)
    return column.number(row[column.name])
