"""The images of a dataset: files under `images/`, each once, as the bytes that came in.

Rows name them in the column `images`, by the digest of their content, so that equal images are equal whatever they
were called.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

FOLDER = "images"
SUFFIXES: Mapping[str, str] = {
    "PNG": "png",
    "JPEG": "jpg",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tiff",
}
"""The formats that are read, and how their files end. Of an animation the first picture counts."""

_NAME = re.compile(rf"{FOLDER}/[0-9a-f]{{64}}\.({'|'.join(SUFFIXES.values())})")
_TURNED = 5
"""The first of the EXIF orientations that swap height and width."""


def is_name(value: Any) -> bool:
    """Whether a value is how rows of a dataset name one of its images."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


@dataclass(frozen=True)
class Image:
    """One image file of a dataset.

    Args:
        path: The file.
        name: How rows name it, such as `images/0a….png`.
    """

    path: Path
    name: str

    @classmethod
    def of(cls, name: Any, directory: Path) -> Image:
        """Return the image that a row of the dataset in `directory` names.

        Raises:
            DataError: It is no such name, or there is no such file.
        """
        if not is_name(name):
            raise DataError(
                "`images` names no image of the dataset",
                found=repr(name)[:80],
                expected=f"`{FOLDER}/<sha256>.png` and the like",
                fix="load the rows with `data.load`, which stores their images",
            )
        path = directory / name
        if not path.is_file():
            raise DataError("an image of the dataset is missing", where=str(directory), found=name)
        return cls(path, name)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, as it is to be looked at. Only the head of the file is read."""
        from PIL import ExifTags
        from PIL import Image as pillow

        with pillow.open(self.path, formats=list(SUFFIXES)) as image:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            width, height = image.size
        return (width, height) if orientation >= _TURNED else (height, width)


def copy_images(names: Iterable[str], source: Path, directory: Path) -> None:
    """Bring images that rows name from the directory of one dataset to that of another."""
    for name in sorted(set(names)):
        target = directory / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)


def opened(path: Path) -> Pixels:
    """Return the pixels of an image file, turned as its EXIF orientation says. Modes such as `P` and `RGBA` stay."""
    from PIL import Image as pillow
    from PIL import ImageOps

    with pillow.open(path, formats=list(SUFFIXES)) as image:
        image.load()
        upright: Pixels = ImageOps.exif_transpose(image)
    return upright
