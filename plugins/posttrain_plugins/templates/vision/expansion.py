"""From one placeholder token an image to the tokens that stand for its patches.

Numbers come from the size of the image and the model's configuration alone; nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from posttrain.errors import DataError
from posttrain_plugins.data.images.image import Image
from posttrain_plugins.templates.tokenizer import read_json
from posttrain_plugins.templates.vision.families import FAMILIES, Block
from posttrain_plugins.templates.vision.files import Vision

if TYPE_CHECKING:
    from posttrain_plugins.templates.encoded import Encoded

    E = TypeVar("E", bound=Encoded)


@dataclass(frozen=True)
class Placed:
    """An image in a token sequence.

    Args:
        image: The image.
        start: The first token that stands for it.
        end: The token after the last one.
        vision: The model that is to see it.
    """

    image: Image
    start: int
    end: int
    vision: Vision


@dataclass
class Expansion:
    """Puts the tokens of images in the place of placeholders.

    Args:
        vision: What the model directory says.
        placeholder: The token that the chat template writes for an image.
    """

    vision: Vision
    placeholder: int
    _block: Block | None = field(default=None, repr=False)

    def expand(self, encoded: E, images: Sequence[Image]) -> E:
        """Return a sequence with the tokens of its images, none of them supervised.

        Sequences without images have to be shown too: a placeholder that stands for nothing is refused.

        Args:
            encoded: Holds one placeholder for each image.
            images: The images in the order of their placeholders.

        Raises:
            DataError: There are more or fewer placeholders than images, or an image does not suit the model.
        """
        tokens = encoded.tokens
        if not images and self.placeholder not in tokens:
            return encoded
        places = [at for at, token in enumerate(tokens) if token == self.placeholder]
        if len(places) != len(images):
            raise DataError(
                "the text has not as many places for images as the row has images",
                found=f"{len(places)} placeholder token(s) and {len(images)} image(s)",
                fix="give messages one part `{type: image}` for each image, keep the placeholder out of texts, and use "
                "a chat template that shows parts; only trainers are given the images of rows",
            )
        return self._expanded(encoded, places, images)

    def _expanded(self, encoded: E, places: Sequence[int], images: Sequence[Image]) -> E:
        tokens: list[int] = []
        supervised: list[bool] = []
        placed = []
        done = 0
        for at, image in zip(places, images, strict=True):
            tokens += encoded.tokens[done:at]
            supervised += encoded.supervised[done:at]
            block = self.block(image)
            placed.append(Placed(image, len(tokens), len(tokens) + len(block), self.vision))
            tokens += block
            supervised += [False] * len(block)
            done = at + 1
        tokens += encoded.tokens[done:]
        supervised += encoded.supervised[done:]
        return replace(encoded, tokens=tokens, supervised=supervised, images=tuple(placed))

    def block(self, image: Image) -> Sequence[int]:
        """Return the tokens that stand for an image.

        Raises:
            DataError: The image does not suit the model, or the model's files do not fit each other.
        """
        if self._block is None:
            self._block = FAMILIES[self.vision.family](self.vision)
        try:
            return self._block(*image.size)
        except DataError as error:
            error.where = error.where or image.name
            raise


def expanded(expansion: Expansion | None, encoded: E | DataError, images: Sequence[Image]) -> E | DataError:
    """Expand the images of a sequence; an error is returned in its place, and one that is given stays.

    Args:
        expansion: The model's; None where it takes no images.
        encoded: The sequence, or what was wrong with it.
        images: Its images.
    """
    if expansion is None and images:
        families = ", ".join(FAMILIES)
        return DataError(
            "the row has images, but the model takes none", expected=f"a model of type {families}"
        )
    if expansion is None or isinstance(encoded, DataError):
        return encoded
    try:
        return expansion.expand(encoded, images)
    except DataError as error:
        return error


def expansion_of(directory: Path) -> Expansion | None:
    """Return what images become for the model in a directory; None for one that takes none.

    Raises:
        DataError: A configuration file is malformed.
    """
    config = read_json(directory / "config.json")
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        return None
    placeholder = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(placeholder, int):
        raise DataError(
            "the model's configuration does not say which token stands for an image",
            where=str(directory / "config.json"),
            expected="`image_token_id`",
        )
    return Expansion(Vision(directory, family), placeholder)
