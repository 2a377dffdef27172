"""Images of rows become files of the dataset, and messages say where they stand."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from helpers.image_rows import PNG, TEXT, encoded
from helpers.vision import picture
from PIL import Image as pillow

from posttrain.errors import DataError
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.data.images.image import Image, opened


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    folder = tmp_path / "source" / "pictures"
    folder.mkdir(parents=True)
    (folder / "one.png").write_bytes(PNG)
    return Gallery(tmp_path / "store", tmp_path / "source", folder)


@pytest.mark.parametrize(
    "value",
    [
        "pictures/one.png",
        "pictures/../pictures/one.png",
        PNG,
        bytearray(PNG),
        TEXT,
        f"data:image/png;base64,{TEXT}",
        {"bytes": PNG, "path": None},
        {"bytes": TEXT, "path": "anything.png"},
        {"bytes": None, "path": "pictures/one.png"},
    ],
    ids=lambda value: str(value)[:24],
)
def test_one_image_is_one_file_whatever_it_came_as(gallery: Gallery, value: Any) -> None:
    name = gallery.take(value)
    assert name == gallery.take(PNG)
    assert (gallery.directory / name).read_bytes() == PNG
    assert len(list((gallery.directory / "images").iterdir())) == 1


def test_a_picture_of_pil_is_kept_without_loss(gallery: Gallery) -> None:
    shown = picture(9, 5, 3)
    stored = Image.of(gallery.take(shown), gallery.directory)
    assert opened(stored.path).tobytes() == shown.tobytes() and stored.size == (5, 9)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(gallery: Gallery, kind: str) -> None:
    stored = Image.of(gallery.take(encoded(kind)), gallery.directory)
    assert stored.size == (6, 8) and opened(stored.path).size == (8, 6)


@pytest.mark.parametrize("orientation, size", [(1, (6, 8)), (3, (6, 8)), (6, (8, 6)), (8, (8, 6))])
def test_orientation_is_how_it_is_looked_at(
    gallery: Gallery, orientation: int, size: tuple[int, int]
) -> None:
    exif = pillow.Exif()
    exif[0x0112] = orientation
    content = encoded("JPEG", exif=exif)
    stored = Image.of(gallery.take(content), gallery.directory)
    assert stored.path.read_bytes() == content, "the bytes stay as they came"
    assert stored.size == size
    width, height = opened(stored.path).size
    assert (height, width) == size


@pytest.mark.parametrize(
    "value, told",
    [
        ("pictures/two.png", "neither a file that is there nor base64"),
        ("https://example.org/one.png", "nothing is downloaded"),
        ("file:///etc/passwd", "nothing is downloaded"),
        ("", "neither a file"),
        ("\0", "neither a file"),
        ("a" * 10_000 + "!", "neither a file"),
        (base64.b64encode(b"no image at all").decode(), "cannot be decoded"),
        (b"", "cannot be decoded"),
        (PNG[:60], "cannot be decoded"),
        (encoded("JPEG", 64, 64)[:-200], "cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
        ({"path": None, "bytes": None}, "is no image"),
        (7, "is no image"),
        ([TEXT], "is no image"),
        ("data:image/png;base64", "without data"),
        ("data:image/png,", "cannot be decoded"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_image(gallery: Gallery, value: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        gallery.take(value)


def test_no_file_outside_of_the_folder(gallery: Gallery, tmp_path: Path) -> None:
    """A dataset from anywhere must not reach files that its key does not cover."""
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "source" / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    for value in ("../secret.png", str(tmp_path / "secret.png"), "pictures/link.png"):
        with pytest.raises(DataError, match="outside of the folder"):
            gallery.take(value)
    with pytest.raises(DataError, match="outside of the folder"):
        Gallery(tmp_path / "other", tmp_path / "source").take("pictures/one.png")


def test_decompression_bombs(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit PIL only warns, above twice of it it refuses; here both refuse."""
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 8 * 6)
    gallery.take(PNG)
    for size in ((9, 6), (20, 20)):
        with pytest.raises(DataError, match="more pixels than is safe"):
            gallery.take(encoded("PNG", *size))


def test_names_are_checked(tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "images/one.png", None, "images/" + "0" * 64 + ".exe"):
        with pytest.raises(DataError, match="names no image of the dataset"):
            Image.of(name, tmp_path)
    with pytest.raises(DataError, match="missing"):
        Image.of("images/" + "0" * 64 + ".png", tmp_path)
