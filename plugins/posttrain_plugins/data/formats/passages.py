"""Making passages: what stands beside the texts of a row is the same in every format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.contracts.passage import Passage, Turns
from posttrain.errors import DataError
from posttrain_plugins.data.conversation import as_messages, completion_messages, json_of, tools_of

OPTIONAL = ("tools", "chat_template_kwargs", "image", "images")
"""Columns that every format with a conversation understands."""

_PLAIN: Mapping[str, Any] = {}


def passage_of(row: Mapping[str, Any], role: str, prompt: Turns | None, completion: Turns | None) -> Passage:
    """Return a passage with the row's tools, template arguments and images.

    Args:
        row: The row; `tools` and `chat_template_kwargs` may be JSON text.
        role: What the passage is to its row: `completion`, `chosen`, `rejected`.
        prompt: A string or messages, or None.
        completion: A string or messages, or None. Where one of the two is a string and the other is not, both
            become messages.

    Raises:
        DataError: One of those columns is malformed.
    """
    if (
        prompt is not None
        and completion is not None
        and isinstance(prompt, str) != isinstance(completion, str)
    ):
        prompt, completion = as_messages(prompt), completion_messages(completion)
    return Passage(role, prompt, completion, tools_of(row), arguments_of(row), images_of(row))


def arguments_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the row gives its chat template besides: `chat_template_kwargs`, an object or its JSON text.

    Raises:
        DataError: The column holds something else.
    """
    value = json_of(row, "chat_template_kwargs")
    if value is None:
        return _PLAIN
    if not isinstance(value, dict):
        raise DataError("the column `chat_template_kwargs` must be an object", found=repr(value)[:80])
    return value


def images_of(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the images of a row: the list `images`, or the one `image`.

    Raises:
        DataError: It has both columns, or `images` is no list.
    """
    one, several = row.get("image"), row.get("images")
    if one is not None and several is not None:
        raise DataError("the row has both `image` and `images`", fix="keep one of the two columns")
    if several is None:
        return () if one is None else (one,)
    if not isinstance(several, list):
        raise DataError("the column `images` must be a list", found=repr(several)[:80])
    return tuple(several)


def extras_problem(row: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the columns beside the texts, or return None."""
    for read in (tools_of, arguments_of, images_of):
        try:
            read(row)
        except DataError as error:
            return error.message if error.found is None else f"{error.message}, but it is {error.found}"
    return None


def others(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    """Return the columns of a row that travel along when the others become something else."""
    return {name: value for name, value in row.items() if name not in used}
