"""What `model.average` does: weight files in, weight files out, one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.artifacts.kinds import Kind
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.stage import Outcome, StageContext
from posttrain.errors import StageError
from posttrain_plugins.models.artifact import (
    CONFIG,
    WEIGHTS,
    facts_of,
    weight_files,
    without_incidentals,
    write_config,
)
from posttrain_plugins.models.average import BASE, EQUAL, MODELS, AverageConfig
from posttrain_plugins.models.merge import MODEL
from posttrain_plugins.models.mixtures import Recipe, equal_or
from posttrain_plugins.models.policy import copy_companions, load_model
from posttrain_plugins.models.probe import logits_of, probe_of
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.templates.tokenizer import read_json

_INDEX = f"{WEIGHTS}.index.json"
_PRECISION = frozenset({"dtype", "torch_dtype"})


class _Weights:
    """The tensors of one model's files, by name."""

    def __init__(self, artifact: Artifact, stack: ExitStack) -> None:
        self.files = weight_files(artifact.path)
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in self.files]
        self._where = {name: file for file in opened for name in sorted(file.keys())}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def run(context: StageContext) -> Outcome:
    """Average the models' weights.

    Raises:
        StageError: The models are not alike, or what came out computes numbers that are not finite.
    """
    config: AverageConfig = context.config
    models, base = list(context.inputs[MODELS]), list(context.inputs.get(BASE, ()))
    for other in (*models[1:], *base):
        _require_alike(models[0], other)
    recipe = Recipe(
        config.method,
        equal_or(config.weights, len(models)),
        1.0 if config.density is None else config.density,
        config.scale,
        config.seed,
    )
    output = context.output(MODEL)
    _write(output, models, base, recipe, getattr(torch, config.dtype))
    _write_config(models[0].path, output, config.dtype)
    copy_companions(models[0].path, output)
    _require_finite(output)
    facts = facts_of(output)
    context.describe(MODEL, Kind.MODEL, facts)
    summary = f"{config.method} of {len(models)} models, {facts.parameters:,} parameters in {facts.dtype}"
    return Outcome(figures={"models": float(len(models))}, summary=summary)


def _require_alike(one: Artifact, other: Artifact) -> None:
    for name in EQUAL:
        own, theirs = getattr(one.facts, name), getattr(other.facts, name)
        if own != theirs:
            raise StageError(
                f"the models differ in {name}",
                where=f"{one.ref} and {other.ref}",
                found=f"{own} and {theirs}",
                fix="average models of one architecture with one tokenizer, such as trainings of one base",
            )
    first, second = (_options(each.path) for each in (one, other))
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if differing:
        raise StageError(
            "the models' configs differ",
            where=f"{one.ref} and {other.ref}",
            found=", ".join(differing[:5]),
            fix="average models of one architecture, such as trainings of one base",
        )


def _options(directory: Path) -> dict[str, Any]:
    config = without_incidentals(read_json(directory / CONFIG))
    return {name: value for name, value in config.items() if name not in _PRECISION}


def _write(
    output: Path, models: Sequence[Artifact], base: Sequence[Artifact], recipe: Recipe, dtype: torch.dtype
) -> None:
    """Write files cut as those of the first model."""
    with ExitStack() as stack:
        opened = [_Weights(artifact, stack) for artifact in (*models, *base)]
        _require_same_tensors(models[0], opened)
        numbers = {name: number for number, name in enumerate(sorted(opened[0].names))}
        placed: dict[str, str] = {}
        for path in opened[0].files:
            with safe_open(path, framework="pt") as file:
                names = sorted(file.keys())
            tensors = {
                name: _mixed([each[name] for each in opened], len(models), recipe, numbers[name]).to(dtype)
                for name in names
            }
            save_file(tensors, output / path.name, metadata={"format": "pt"})
            placed |= dict.fromkeys(names, path.name)
    if len(opened[0].files) > 1:
        size = sum((output / name).stat().st_size for name in set(placed.values()))
        write_config(output / _INDEX, {"metadata": {"total_size": size}, "weight_map": placed})


def _mixed(found: Sequence[Tensor], count: int, recipe: Recipe, number: int) -> Tensor:
    """Mix one tensor; the last one found is that of the base where there is one."""
    if not found[0].is_floating_point():
        return found[0]
    whole = [tensor.float() for tensor in found]
    return recipe.mix(whole[:count], whole[count] if len(whole) > count else None, number).contiguous()


def _require_same_tensors(first: Artifact, opened: Sequence[_Weights]) -> None:
    for other in opened[1:]:
        if unlike := sorted(opened[0].names ^ other.names):
            raise StageError(
                "not all models have the same weights", where=first.ref, found=", ".join(unlike[:5])
            )
        shapes = [name for name in sorted(other.names) if other[name].shape != opened[0][name].shape]
        if shapes:
            raise StageError("weights have different shapes", where=first.ref, found=", ".join(shapes[:5]))


def _write_config(source: Path, output: Path, dtype: str) -> None:
    config: Mapping[str, Any] = read_json(source / CONFIG)
    write_config(output / CONFIG, {**config, **{name: dtype for name in _PRECISION & config.keys()}})


def _require_finite(directory: Path) -> None:
    """Open what was written and run it.

    Raises:
        StageError: A logit is not finite.
    """
    probe = probe_of(Encoder.open(directory))
    model = load_model(directory, "float32")
    if not all(bool(logits.isfinite().all()) for logits in logits_of(model, probe)):
        raise StageError(
            "the averaged model computes numbers that are not finite",
            where=str(directory),
            fix="lower `scale`, or average models that come from one base",
        )
