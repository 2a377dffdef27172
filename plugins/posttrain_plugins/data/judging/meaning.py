"""Rows as they were meant, whatever their kind of file did to them."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.contracts.format import Format
from posttrain_plugins.data.formats import format_of
from posttrain_plugins.data.formats.scalars import read_scalars
from posttrain_plugins.data.reading.columnar import unmerged
from posttrain_plugins.data.reading.files import Entry, Readable, Row

_BESIDES = ("tools", "chat_template_kwargs")


def as_meant(rows: Readable, format: Format) -> Iterator[Entry]:
    """Begin to read rows without what their kind of file does to them: null keys of Arrow, numbers as text of CSV."""
    entries = rows.entries()
    if rows.merged:
        entries = ((place, _without_null_keys(row, format)) for place, row in entries)
    scalars = {**(format_of(format.becomes).scalars if format.becomes else {}), **format.scalars}
    if rows.textual and scalars:
        entries = ((place, read_scalars(row, scalars)) for place, row in entries)
    return entries


def _without_null_keys(row: Row, format: Format) -> Row:
    """Return a row that Arrow held without the null keys that it gave turns and tools."""
    columns = {*format.columns, *format.optional, *_BESIDES}
    return {name: unmerged(value) if name in columns else value for name, value in row.items()}
