"""Recognising the format of a dataset from what the columns of all its rows hold."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.contracts.format import Column, Format
from posttrain.errors import DataError
from posttrain_plugins.data.formats.values import listed


def infer(
    formats: Mapping[str, type[Format]], schema: Mapping[str, Column], where: str, told: str | None = None
) -> str:
    """Return the one format that fits.

    A format whose columns are contained in those of another that fits as well (`prompt` in `prompt_completion`)
    gives way to it.

    Args:
        formats: The formats by name.
        schema: What the columns hold over all rows.
        where: The file or dataset, for messages.
        told: Which rows have which columns, in words.

    Raises:
        DataError: No format fits, or several do.
    """
    fitting = {name: set(format.columns) for name, format in formats.items() if format().fits(schema)}
    best = [name for name, own in fitting.items() if not any(own < other for other in fitting.values())]
    if len(best) == 1:
        return best[0]
    found = told or f"columns {listed(sorted(schema))}"
    if best:
        raise DataError(
            f"the columns fit several formats: {listed(best)}",
            where=where,
            found=found,
            fix=f"choose one, for example `format: {best[0]}`; the other columns travel along unused",
        )
    own = [f"{name}: {listed(each.columns)}" for name, each in formats.items() if each.becomes is None]
    others = [name for name, each in formats.items() if each.becomes is not None]
    needs = "; ".join([*own, *([f"or a format of other tools: {listed(others)}"] if others else [])])
    raise DataError(
        "the columns fit no dataset format",
        where=where,
        found=found,
        expected=needs,
        fix="rename columns, for example `columns: {question: prompt, answer: completion}`",
    )
