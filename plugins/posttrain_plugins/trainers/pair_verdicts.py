"""What rows of pairs say of their answers beside which is better: who wrote them, and how sure the preference is.

It is read where a loss declares that it needs it, and columns of these names mean nothing to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.contracts.loss import Need
from posttrain.contracts.stage import Finding, Input, Level
from posttrain.contracts.trainer import Scores
from posttrain.errors import DataError, PluginError
from posttrain.wording import listed
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
    """A column.

    Args:
        name: How it is called.
        field: The batch's field with what it says.
        expected: What it may hold.
        problem: Says what is wrong with a value of it.
        number: Returns a value as a number.
        read: Returns the field, given the numbers of all rows.
    """

    name: str
    field: str
    expected: str
    problem: Callable[[Any], str | None]
    number: Callable[[Any], float]
    read: Callable[[Tensor], Tensor]


def _writer(value: Any) -> str | None:
    return None if value in tuple(WRITERS) else "is neither `policy` nor `reference`"


COLUMNS: Mapping[Need, _Column] = {
    Need.AUTHORS: _Column(
        "chosen_by",
        "own",
        "`policy` where the policy wrote the chosen answer, `reference` where it wrote the rejected one",
        _writer,
        WRITERS.__getitem__,
        lambda numbers: numbers > 0.5,
    ),
    Need.PREFERENCE: _Column(
        "preference",
        "preference",
        "how likely the chosen answer is preferred, from 0 to 1",
        probability,
        float,
        lambda numbers: numbers,
    ),
}
"""What a loss may need of a pair, in the order of the numbers of a row."""


def numbers_of(row: Row, needs: frozenset[Need]) -> Sequence[float]:
    """Return what a row says, NaN for what is not needed; nothing where nothing is.

    Raises:
        DataError: It does not say it.
    """
    if not needs & COLUMNS.keys():
        return ()
    return [_number(row, column) if need in needs else float("nan") for need, column in COLUMNS.items()]


def fields_of(scores: Scores) -> dict[str, Tensor]:
    """Return the fields `own` and `preference` of a batch, as far as they are needed.

    Where neither is, a trainer's rows may say other things in numbers.

    Raises:
        PluginError: Rows do not say it.
    """
    if not scores.needs & COLUMNS.keys():
        return {}
    odd = next((each for each in scores.examples if len(each.verdicts) != len(COLUMNS)), None)
    if odd is not None:
        raise PluginError(
            "the rows do not say what the loss needs of pairs",
            where=f"`verdicts` of the trainer, row {odd.row + 1}",
            found=f"{len(odd.verdicts)} numbers",
            expected=f"{len(COLUMNS)}: {listed([column.name for column in COLUMNS.values()])}",
            fix="return what `PairTrainer.verdicts` returns, or make the batch in a `batch` of the trainer's own",
        )
    said = scores.verdicts.view(len(scores.examples), len(COLUMNS)).unbind(1)
    pairs = zip(COLUMNS.items(), said, strict=True)
    return {column.field: column.read(numbers) for (need, column), numbers in pairs if need in scores.needs}


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
