"""What is known before any row is read of the column that holds the rows' weights."""

from __future__ import annotations

from posttrain.contracts.stage import Input
from posttrain_plugins.data.formats.values import WEIGHT
from posttrain_plugins.data.judging.flaws import UNWEIGHABLE


def column_problem(data: Input, column: str | None) -> tuple[str, str] | None:
    """Say what is wrong with a column of weights and what to do about it; None where nothing is, or is known.

    Args:
        data: A dataset of rows.
        column: What its stage calls the column of weights, or None.
    """
    columns = data.facts.columns
    if column is None or columns is None:
        return None
    if column not in columns:
        message = f"not every row has the weight column `{column}`"
        return message, f"name one of {', '.join(columns)}, or leave weight_column out"
    count = (data.facts.flaws or {}).get(UNWEIGHABLE, 0)
    if column != WEIGHT or not count:
        return None
    message = f"{count} rows of {data.origin} have a `{column}` that is no finite number of at least 0"
    return (
        message,
        "`posttrain data validate` names them; of text in CSV files, name the column in `json_columns`",
    )
