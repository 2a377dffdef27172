"""Small trainings with callbacks, registered ones and those of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contexts import FakeContext
from helpers.training import completion_rows, context_for, train

from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.callback import Callback
from posttrain.contracts.component import Choice
from posttrain.errors import Interrupted

STEPS = 6


def sft(directory: Path, model: Artifact, callbacks: list[Any], **options: Any) -> FakeContext:
    chosen = {"max_steps": STEPS, "batch_size": 2, "save_steps": 0, "callbacks": callbacks, **options}
    context = context_for(directory, "train.sft", model, completion_rows(), "prompt_completion", **chosen)
    return context


def trained(directory: Path, model: Artifact, callbacks: list[Any], **options: Any) -> FakeContext:
    context = sft(directory, model, callbacks, **options)
    train(context)
    return context


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def interrupted_and_resumed(
    directory: Path, model: Artifact, callbacks: list[Any], **options: Any
) -> FakeContext:
    first = sft(directory, model, callbacks, **options)
    first.stop_at = 3
    with pytest.raises(Interrupted):
        train(first)
    return trained(directory, model, callbacks, **options)


def foreign(
    directory: Path,
    model: Artifact,
    plugin: type[Callback],
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> FakeContext:
    """A training with a callback that is not registered, behind others."""
    context = sft(directory, model, list(callbacks), **options)
    joined = (*context.config.callbacks, Choice(name="acme/mine"))
    context.config = context.config.model_copy(update={"callbacks": joined})
    context.components["acme/mine"] = plugin
    return context
