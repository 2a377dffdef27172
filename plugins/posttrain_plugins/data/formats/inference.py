"""Recognising the format of a dataset from what the columns of all its rows hold."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping

from posttrain.contracts.format import Column, Format, Row
from posttrain.errors import DataError
from posttrain_plugins.data.formats.schema import schema_of
from posttrain_plugins.data.formats.values import listed

_ALIKE = 0.75
"""How alike a column is to the one that it is a misspelling of."""
_LEARNED: Mapping[str, str] = {
    "text": "all of the text",
    "messages": "every answer of the conversation",
    "prompt": "nothing, it only asks",
    "prompt_completion": "the answer to the prompt",
    "preference": "which of two answers is better",
    "unpaired_preference": "whether an answer is good",
    "three_way": "which of two answers is better, and a third one",
    "scored": "how good an answer is",
    "ranked": "which of several answers are better",
    "stepwise": "which steps are right",
}
"""What a trainer learns of the canonical formats."""


_ELSEWHERE: Mapping[str, str] = {
    "text": "content",
    "messages": "conversation",
    "prompt": "question",
    "completion": "answer",
    "completions": "answers",
    "chosen": "better",
    "rejected": "worse",
    "gold": "best",
    "label": "good",
    "labels": "right",
    "score": "points",
    "scores": "points",
}
"""What columns of the canonical formats may be called elsewhere, for an example."""


class SeveralFormats(DataError):
    """The columns fit several formats."""


class NoFormat(DataError):
    """The columns fit no format. `columns` are those that the rows have; empty where that is not known any more."""

    columns: tuple[str, ...] = ()


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
        SeveralFormats: Several formats fit; the one that says most of the columns is proposed first.
        NoFormat: No format fits.
    """
    fitting = {name: set(format.columns) for name, format in formats.items() if format().fits(schema)}
    best = [name for name, own in fitting.items() if not any(own < other for other in fitting.values())]
    if len(best) == 1:
        return best[0]
    found = told or f"columns {listed(sorted(schema))}"
    if best:
        best.sort(key=lambda name: (-len(fitting[name]), formats[name].becomes is None))
        choices = "; ".join(f"`{name}` learns {_learned(name, formats[name])}" for name in best)
        raise SeveralFormats(
            f"the columns fit several formats: {listed(best)}",
            where=where,
            found=found,
            fix=f"choose one, for example `format: {best[0]}`: {choices}; other columns travel along unused",
        )
    raise unfit(formats, tuple(schema), where, found)


def unfit(
    formats: Mapping[str, type[Format]], columns: tuple[str, ...], where: str | None, found: str | None
) -> NoFormat:
    """Return the error that columns fit no format, with what would make them fit.

    Args:
        formats: The formats that would do.
        columns: The columns that the rows have.
        where: The file or dataset.
        found: Which rows have which columns, in words.
    """
    lacking = [f"`{name}` lacks `{column}`" for name, column in _nearly(formats, columns)]
    own = [f"{name}: {listed(each.columns)}" for name, each in formats.items() if each.becomes is None]
    others = [name for name, each in formats.items() if each.becomes is not None]
    needs = "; ".join([*own, *([f"or a format of other tools: {listed(others)}"] if others else [])])
    renamed = _misspelt(formats, columns)
    error = NoFormat(
        "; ".join(["the columns fit no dataset format", *lacking]),
        where=where,
        found=found,
        expected=needs,
        fix=f"rename what is misspelt: {_renaming(renamed)}"
        if renamed
        else f"add what is missing, or rename columns, for example {_renaming(_example(formats, columns))}",
    )
    error.columns = columns
    return error


def misleading(formats: Mapping[str, type[Format]], row: Row, name: str) -> set[str]:
    """Return columns of a row that travel along and by which it would be taken for a row of another format too.

    Args:
        formats: The formats by name.
        row: A row of the format `name`.
        name: The format that the row is to be recognised as.
    """
    own = set(formats[name].columns)
    others = [
        each for each in formats.values() if row.keys() >= set(each.columns) and set(each.columns) - own
    ]
    schema = schema_of([row]).columns if others else {}
    return {column for each in others if each().fits(schema) for column in set(each.columns) - own}


def _renaming(names: Mapping[str, str]) -> str:
    return f"`columns: {{{', '.join(f'{old}: {new}' for old, new in names.items())}}}`"


def _example(formats: Mapping[str, type[Format]], columns: Collection[str]) -> dict[str, str]:
    """Return new names by which rows of somebody would be those of the first format of two columns or more."""
    format = min(formats.values(), key=lambda each: (each.becomes is not None, len(each.columns) < 2))
    missing = [column for column in format.columns if column not in columns]
    return {_ELSEWHERE.get(column, f"my_{column}"): column for column in missing}


def _misspelt(formats: Mapping[str, type[Format]], columns: Collection[str]) -> dict[str, str]:
    """Return the fewest new names by which the columns would be those of a canonical format of two or more."""
    found: list[tuple[int, int, dict[str, str]]] = []
    for format in formats.values():
        missing = [column for column in format.columns if column not in columns]
        spare = [column for column in columns if column not in format.columns]
        renamed: dict[str, str] = {}
        for column in missing:
            alike = difflib.get_close_matches(
                column, [each for each in spare if each not in renamed], 1, _ALIKE
            )
            renamed |= dict.fromkeys(alike, column)
        if format.becomes is None and len(format.columns) > 1 and len(renamed) == len(missing):
            found.append((len(missing), -len(format.columns), renamed))
    return min(found, key=lambda each: each[:2])[2] if found else {}


def _nearly(formats: Mapping[str, type[Format]], columns: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the canonical formats of which one column of three or more is missing."""
    for name, format in formats.items():
        missing = [column for column in format.columns if column not in columns]
        if len(missing) == 1 and len(format.columns) > 2 and format.becomes is None:
            yield name, missing[0]


def _learned(name: str, format: type[Format]) -> str:
    return _LEARNED.get(format.becomes or name, "what its trainer says")
