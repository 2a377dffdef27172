"""Where the images of a row stand in its messages.

Messages of a dataset say where an image stands with a part `{"type": "image"}`; which image it is says the row's
column `images`, in order. Both are written when rows are loaded; a row whose parts and images do not agree is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.data.images.gallery import Gallery

Row = Mapping[str, Any]
Message = Mapping[str, Any]

MARK = "<image>"
"""What stands for an image in the texts of LLaVA's datasets."""
COLUMNS = ("image", "images")
_BEGINNINGS = ("prompt", "messages")
_ANSWERS = ("completion", "chosen", "rejected")
_PAYLOADS = ("image", "image_url", "url", "path", "base64")


def has_images(row: Row) -> bool:
    """Whether a row has a column of images, be it empty, or a message with an image in it."""
    return any(column in row for column in COLUMNS) or any(_parts(row))


def taken(row: Row, gallery: Gallery) -> dict[str, Any]:
    """Return a row whose images are files of the gallery; `image` becomes `images`, a list of one.

    Raises:
        DataError: An image cannot be taken; the message begins with its column.
    """
    result = {name: value for name, value in row.items() if name not in COLUMNS}
    for column in (*_BEGINNINGS, *_ANSWERS):
        if isinstance(row.get(column), list):
            result[column] = [_named(message, column, gallery) for message in row[column]]
    if any(column in row for column in COLUMNS):
        result["images"] = [_take(gallery, value, column) for column, value in _listed(row)]
    return result


def placed(row: Row) -> dict[str, Any]:
    """Return a row whose messages say where its images stand, as parts without content of their own.

    Where no message has a part for an image, `<image>` in their texts stands for one; where there is none of these
    either, the images come first in the first turn of the user. Every content becomes a list of parts. Plain strings
    stay: what stands for an image in them only the model's tokenizer tells.

    Raises:
        DataError: There are more or fewer places than images; the message begins with the column.
    """
    result = dict(row)
    images = list(row.get("images") or ())
    columns = [name for name in (*_BEGINNINGS, *_ANSWERS) if isinstance(row.get(name), list)]
    if not columns:
        return result
    for column in columns:
        result[column] = [_in_parts(message) for message in row[column]]
    if images and not any(_parts(result)):
        _mark(result, columns, len(images))
    begin = [part for column in _BEGINNINGS for part in _of(result, column)]
    ends = [_of(result, column) for column in _ANSWERS if column in columns] or [[]]
    named = [_assigned([*begin, *end], images) for end in ends]
    if any(names != named[0] for names in named):
        raise DataError("`images` are others in one answer than in the other")
    result["images"] = named[0]
    for column in columns:
        result[column] = [_emptied(message) for message in result[column]]
    return result


def _listed(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield the images that the row's own columns hold, with the column of each."""
    one, several = row.get("image"), row.get("images")
    if one is not None and several is not None:
        raise DataError("`image` and `images` are both there", fix="keep one of the two columns")
    if several is not None and not isinstance(several, list | tuple):
        raise DataError("`images` is no list", fix="a column of one image a row is called `image`")
    if one is not None:
        yield "image", one
    for value in several or ():
        yield "images", value


def _take(gallery: Gallery, value: Any, column: str) -> str:
    try:
        return gallery.take(value)
    except DataError as error:
        raise DataError(
            f"`{column}` {error.message}", found=error.found, expected=error.expected, fix=error.fix
        ) from error


def _named(message: Any, column: str, gallery: Gallery) -> Any:
    """Return a message whose image parts name files instead of holding images."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    content = [_named_part(part, column, gallery) for part in message["content"]]
    return {**message, "content": content}


def _named_part(part: Any, column: str, gallery: Gallery) -> Any:
    if not _is_image(part):
        return part
    payload = next((part[key] for key in _PAYLOADS if part.get(key) is not None), None)
    if isinstance(payload, Mapping) and "url" in payload:
        payload = payload["url"]
    return (
        {"type": "image"} if payload is None else {"type": "image", "image": _take(gallery, payload, column)}
    )


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _of(row: Row, column: str) -> list[Mapping[str, Any]]:
    """Return the image parts of a column."""
    messages = row.get(column)
    contents = (
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, Mapping)
    )
    return [part for content in contents if isinstance(content, list) for part in content if _is_image(part)]


def _parts(row: Row) -> Iterator[Mapping[str, Any]]:
    for column in (*_BEGINNINGS, *_ANSWERS):
        yield from _of(row, column)


def _in_parts(message: Message) -> dict[str, Any]:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else dict(message)
    )


def _mark(row: dict[str, Any], columns: Sequence[str], count: int) -> None:
    """Make places for images in messages that have none."""
    texts = [part for column in columns for message in row[column] for part in message.get("content") or ()]
    if any(MARK in str(part.get("text", "")) for part in texts):
        for column in columns:
            row[column] = [{**message, "content": _split(message.get("content"))} for message in row[column]]
        return
    for column in (name for name in _BEGINNINGS if name in columns):
        at = next((index for index, each in enumerate(row[column]) if each.get("role") == "user"), None)
        if at is not None:
            first = row[column][at]
            own = [{"type": "image"} for _ in range(count)]
            row[column][at] = {**first, "content": [*own, *(first.get("content") or ())]}
            return


def _split(content: Any) -> Any:
    """Put a part for an image where the text says so."""
    if not isinstance(content, list):
        return content
    found: list[Any] = []
    for part in content:
        first, *others = str(part.get("text", "")).split(MARK)
        if part.get("type") != "text" or not others:
            found.append(part)
            continue
        found += [{"type": "text", "text": first}] if first else []
        for text in others:
            found += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return found


def _assigned(parts: Sequence[Mapping[str, Any]], images: Sequence[str]) -> list[str]:
    """Return the image of each part: its own, or the next of the row's."""
    waiting = iter(images)
    names = [part.get("image") or next(waiting, None) for part in parts]
    open_parts = sum("image" not in part for part in parts)
    if open_parts != len(images):
        raise DataError(
            "`images` do not agree with the messages",
            found=f"{len(images)} image(s), and {open_parts} part(s) of messages that wait for one",
            fix="give messages one part `{type: image}` for each image, or none at all",
        )
    return [str(name) for name in names]


def _emptied(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}
