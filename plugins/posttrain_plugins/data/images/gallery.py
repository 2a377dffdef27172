"""Taking the images of rows into files, whatever the rows hold: paths, bytes, base64, pictures.

Nothing is fetched, everything is decoded once, and no file outside of the named folder is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from posttrain.errors import DataError
from posttrain_plugins.data.images.image import FOLDER, SUFFIXES

_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_LONGEST_PATH = 4096
_SHOWN = 60


class Gallery:
    """The images that were taken so far.

    Args:
        directory: Where the files go, under `images/`.
        base: The folder that paths in rows are relative to; None where rows come from no file.
        folder: The folder that these files have to be in; None allows no paths.
    """

    def __init__(self, directory: Path, base: Path | None = None, folder: Path | None = None) -> None:
        self.directory, self.base, self.folder = directory, base, folder
        self._names: dict[str, str] = {}

    def take(self, value: Any) -> str:
        """Store an image and return its name.

        Args:
            value: A path, a `data:` address, base64 text, bytes, `{"bytes": …, "path": …}`, or a picture of PIL.

        Raises:
            DataError: It cannot be read or decoded, or is too large. The message is to be read after a column's name.
        """
        content = self._content(value)
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._names:
            name = f"{FOLDER}/{digest}.{_suffix(content, value)}"
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._names[digest] = name
        return self._names[digest]

    def _content(self, value: Any) -> bytes:
        if isinstance(value, Mapping):
            return self._described(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, str):
            return self._text(value)
        if hasattr(value, "save") and hasattr(value, "getexif"):
            return _written(value)
        raise DataError("is no image", found=_shown(value), expected="a path, bytes, or a `data:` address")

    def _described(self, value: Mapping[str, Any]) -> bytes:
        """Read what the `datasets` library keeps of an image."""
        content, path = value.get("bytes"), value.get("path")
        if isinstance(content, bytes | bytearray | memoryview):
            return bytes(content)
        if isinstance(content, str):
            return _base64(content, content)
        if isinstance(path, str):
            return self._text(path)
        raise DataError("is no image", found=_shown(dict(value)), expected="an object with `bytes` or `path`")

    def _text(self, value: str) -> bytes:
        if value.startswith("data:"):
            return _data_address(value)
        if _ADDRESS.match(value):
            raise DataError(
                "is an address, and nothing is downloaded",
                found=_shown(value),
                fix="download the images first and name the files",
            )
        path = None if self.base is None or len(value) > _LONGEST_PATH else self.base / value
        if path is None or not _is_file(path):
            return _base64(value, value)
        if self.folder is None or not path.resolve().is_relative_to(self.folder.resolve()):
            raise DataError(
                "names a file outside of the folder of images, whose content is part of the stage's key",
                found=_shown(value),
                expected="a file in the folder that the option `images` names",
                fix="set `images` of `data.load` to the folder that holds them",
            )
        return path.read_bytes()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have: too long, or with a NUL in it
        return False


def _data_address(value: str) -> bytes:
    head, comma, body = value.partition(",")
    if not comma:
        raise DataError("is a `data:` address without data", found=_shown(value))
    return _base64(body, value) if head.endswith(";base64") else unquote_to_bytes(body)


def _base64(text: str, whole: str) -> bytes:
    problem = DataError(
        "is neither a file that is there nor base64",
        found=_shown(whole),
        expected="a path relative to the data file, a `data:` address or base64",
    )
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise problem from error
    if not content:
        raise problem
    return content


def _suffix(content: bytes, value: Any) -> str:
    """Decode an image whole and return how its file is to end."""
    from PIL import Image as pillow

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(io.BytesIO(content), formats=list(SUFFIXES)) as image:
                image.load()
                return SUFFIXES[str(image.format)]
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise DataError(
            "has more pixels than is safe to decode",
            found=str(error).split(",")[0],
            expected=f"at most {pillow.MAX_IMAGE_PIXELS} pixels",
            fix="scale it down",
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError) as error:
        raise DataError(
            "cannot be decoded", found=f"{_shown(value)}: {error}", expected=", ".join(SUFFIXES)
        ) from error


def _written(image: Any) -> bytes:
    """Write a picture of PIL as PNG, which loses nothing; its orientation is applied, as PNG need not keep it."""
    from PIL import ImageOps

    buffer = io.BytesIO()
    try:
        ImageOps.exif_transpose(image).save(buffer, "PNG")
    except OSError as error:
        raise DataError(f"cannot be stored: {error}", found=_shown(image)) from error
    return buffer.getvalue()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
