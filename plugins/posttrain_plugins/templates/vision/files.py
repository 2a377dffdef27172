"""What the files of a vision-language model say about its images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain_plugins.templates.tokenizer import TokenizerFiles, read_json

PROCESSOR = "processor_config.json"
IMAGE_PROCESSOR = "preprocessor_config.json"
PROCESSOR_FILES = (PROCESSOR, IMAGE_PROCESSOR, "video_preprocessor_config.json")
"""What travels with a model beside its tokenizer."""


@dataclass(frozen=True)
class Vision:
    """A vision-language model's directory.

    Args:
        directory: The directory.
        family: Its `model_type`.
    """

    directory: Path
    family: str

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return read_json(self.directory / "config.json")

    @property
    def processor(self) -> dict[str, Any]:
        """The content of `processor_config.json`; empty without one."""
        return read_json(self.directory / PROCESSOR)

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the image processor, from whichever file holds them.

        Raises:
            DataError: Neither does.
        """
        found = self.processor.get("image_processor") or read_json(self.directory / IMAGE_PROCESSOR)
        if not found:
            raise DataError(
                "the model has no image processor",
                where=str(self.directory),
                expected=f"`{IMAGE_PROCESSOR}`, or `image_processor` in `{PROCESSOR}`",
                fix="load the model with all of its files",
            )
        return dict(found)

    @property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer's files."""
        return TokenizerFiles.read(self.directory)

    def number(self, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
        """Return a positive whole number of a configuration.

        Raises:
            DataError: It is not there, or something else.
        """
        value = values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(
                f"the model's files give no usable `{name}`", where=str(self.directory), found=repr(value)
            )
        return value
