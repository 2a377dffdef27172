"""Trainings on rows with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.contexts import FakeContext, catalogue, configured
from helpers.training import dataset_artifact
from helpers.vision import picture

from posttrain.artifacts.manifest import Artifact
from posttrain_plugins.data.images.gallery import Gallery

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

SIZES = [(40, 30), (60, 20), (20, 50), (28, 28)]


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


IMAGE = {"type": "image"}


def rows(directory: Path) -> list[dict[str, Any]]:
    """One image, two images, none."""
    gallery = Gallery(directory)
    names = [gallery.take(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    found = []
    for index in range(8):
        question, images = [
            (user(IMAGE, "What is in this picture?"), names[index % 4 : index % 4 + 1]),
            (user("Look at ", IMAGE, "and", IMAGE), [names[index % 4], names[(index + 1) % 4]]),
            (user("What?"), []),
        ][index % 3]
        found.append({"prompt": [question], "images": images, "index": index})
    return found


def sft_rows(directory: Path) -> list[dict[str, Any]]:
    answers = ("A cat", "two cats and a dog", "nothing else")
    return [
        {**row, "completion": [{"role": "assistant", "content": answers[row["index"] % 3]}]}
        for row in rows(directory)
    ]


def context(
    root: Path, uses: str, model: Artifact, given: Sequence[Mapping[str, Any]], format: str, **options: Any
) -> FakeContext:
    data = dataset_artifact(root / "data", given, format)
    stage = catalogue().stage(uses)
    config = configured(stage, **{"logging_steps": 1, "learning_rate": 1e-2, "batch_size": 4, **options})
    return FakeContext(root, stage, config, {"model": [model], "data": [data]})
