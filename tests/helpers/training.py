"""A stage context without a worker, and small training runs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.contexts import FakeContext as Context
from helpers.contexts import catalogue, configured
from helpers.models import as_artifact, save_tiny_model

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import Group
from posttrain.contracts.stage import Outcome
from posttrain_plugins.data.conversation import as_messages
from posttrain_plugins.data.rows import write_rows


def fitting_losses(uses: str) -> list[str]:
    """Name the registered losses of the family that a trainer drives."""
    family = catalogue().stage(uses).family
    names = catalogue().names(Group.LOSS)
    return [name for name in names if catalogue().load(Group.LOSS, name).family == family]


TRAININGS = [(uses, loss) for uses in catalogue().names(Group.TRAINER) for loss in fitting_losses(uses)]
"""Every registered trainer with every loss that fits it: a new plugin is tested when it arrives."""


def model_artifact(directory: Path, **options: Any) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, save_tiny_model(directory, **options))


def dataset_artifact(directory: Path, rows: Sequence[Mapping[str, Any]], format: str) -> Artifact:
    directory.mkdir(parents=True, exist_ok=True)
    return as_artifact(directory, write_rows(directory, rows, format), Kind.DATASET)


def completion_rows(count: int = 10) -> list[dict[str, Any]]:
    """Answers of ragged lengths, from one to many tokens."""
    return [{"prompt": f"say {i}:", "completion": "ab" * (1 + i * 3 % 8) + str(i)} for i in range(count)]


def preference_rows(count: int = 6) -> list[dict[str, Any]]:
    return [
        {"prompt": f"q{i}", "chosen": "yes" * (1 + i % 4), "rejected": "no" * (1 + i * 5 % 7)}
        for i in range(count)
    ]


ROWS: Mapping[str, Callable[[int], list[dict[str, Any]]]] = {
    "prompt_completion": completion_rows,
    "preference": preference_rows,
    "text": lambda count: [{"text": f"{i} ab" * (1 + i * 3 % 8)} for i in range(count)],
    "messages": lambda count: [
        {"messages": [*as_messages(row["prompt"]), {"role": "assistant", "content": row["completion"]}]}
        for row in completion_rows(count)
    ],
}
"""Rows of every format that a trainer may take."""


def format_of(uses: str) -> str:
    """Choose the first format that a trainer takes."""
    return next(format for format in ROWS if format in catalogue().stage(uses).formats)


def context_for(
    directory: Path,
    uses: str,
    model: Artifact,
    rows: Sequence[Mapping[str, Any]],
    format: str,
    **options: Any,
) -> Context:
    """A context for one training; the same directory again resumes it."""
    data = dataset_artifact(directory / "data", rows, format)
    stage = catalogue().stage(uses)
    config = configured(stage, **{"logging_steps": 1, "learning_rate": 1e-2, **options})
    return Context(directory, stage, config, {"model": [model], "data": [data]})


def train(context: Context) -> Outcome:
    from posttrain_plugins.training.ranks import run

    return run(context)


def weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (file,) = path.glob("*.safetensors")
    return load_file(file)
