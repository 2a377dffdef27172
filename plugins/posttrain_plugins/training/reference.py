"""Log-probs of the starting policy, computed once before the first update and kept for a resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.artifacts.manifest import Artifact, canonical
from posttrain.contracts.loss import Need
from posttrain.contracts.trainer import Example
from posttrain.errors import StageError
from posttrain_plugins.training.checkpoints import damage, write_directory
from posttrain_plugins.training.memory import short_of_memory
from posttrain_plugins.training.step import Stepper

LOG_PROBS = "log_probs.safetensors"
IDENTITY = "identity.json"
_INTEGER = np.dtype("<i8")
Pause = Callable[[int], None]
"""Called with the number of examples done after each micro-batch; may raise to stop."""


def reference_log_probs(
    stepper: Stepper, examples: Sequence[Example], directory: Path, identity: str, pause: Pause
) -> dict[int, Tensor]:
    """Return Σ log π_ref over each sequence, shape [sequences], float32, by row.

    Where `Need.REFERENCE_TOKENS` is declared, it is log π_ref of each supervised token instead, shape [tokens].

    The model that is given is the reference: before its first update the policy is exactly that, whatever
    adapters it carries. It is scored in evaluation mode. Values belong to rows, not to places in an order.

    Args:
        stepper: Scores with the starting policy.
        examples: The rows that training will visit.
        directory: Where the result is kept.
        identity: Digest of what it depends on (model, rows, options); a stored result of another one is not
            used.
        pause: See `Pause`.
    """
    if damage(directory) is None and json.loads((directory / IDENTITY).read_text()) == identity:
        return read_log_probs(directory)
    found = scored(stepper, examples, Need.REFERENCE_TOKENS in stepper.needs, pause)
    if stepper.parallel.rank == 0:
        write_directory(directory, partial(write_log_probs, found=found, identity=identity))
    return found


def scored(stepper: Stepper, examples: Sequence[Example], tokens: bool, pause: Pause) -> dict[int, Tensor]:
    """Return the log-probs of each row's answers: of each token by itself, or their sums.

    Raises:
        StageError: Memory ran out.
    """
    with short_of_memory("a pass over the reference"):
        return (stepper.log_probs if tokens else stepper.totals)(examples, pause)


def given_log_probs(
    artifact: Artifact, examples: Sequence[Example], identity: str, tokens: bool
) -> dict[int, Tensor]:
    """Return the log-probs that `data.log_probs` has made, as `reference_log_probs` would return them.

    Args:
        artifact: What it made.
        examples: All rows of the training's dataset.
        identity: Digest of what they have to depend on.
        tokens: Whether the log-prob of each token is needed.

    Raises:
        StageError: They are those of something else, or not of single tokens.
    """
    if json.loads((artifact.path / IDENTITY).read_text()) != identity:
        raise StageError(
            "the log-probs are not those of this policy on these rows",
            where="port `log_probs`",
            found=f"log-probs of {artifact.facts.rows} rows, scored otherwise",
            expected="the same policy, dataset, tokens and options as here",
            fix="give `data.log_probs` the inputs and options of this training",
        )
    kept = artifact.facts.log_probs.tokens
    if tokens and not kept:
        raise StageError(
            "the loss needs the log-prob of each token, and only their sums are there",
            where="port `log_probs`",
            fix="set `tokens: true` of `data.log_probs`",
        )
    found = read_log_probs(artifact.path)
    if not kept or tokens:
        return found
    return {example.row: _sums(example, found[example.row]) for example in examples}


def _sums(example: Example, tokens: Tensor) -> Tensor:
    """Add the log-probs of each sequence up, in the order in which the loop does it."""
    lengths = torch.tensor([sequence.predicted for sequence in example.sequences])
    return tokens.new_zeros(len(lengths)).index_add(0, torch.repeat_interleave(lengths), tokens)


def log_probs_identity(config: Any, policy: str, examples: Sequence[Example]) -> str:
    """Digest what log-probs depend on, with the options of a trainer or of `data.log_probs`.

    A fresh adapter changes nothing yet, and so is no part of it.
    """
    quantization = config.quantization and config.quantization.model_dump(mode="json")
    return reference_identity(policy, examples, {"precision": config.precision, "quantization": quantization})


def write_log_probs(directory: Path, found: Mapping[int, Tensor], identity: str) -> None:
    """Write log-probs by row, and the digest of what they depend on."""
    rows = sorted(found)
    sizes = torch.tensor([len(found[row]) for row in rows])
    values = torch.cat([found[row] for row in rows])
    save_file({"rows": torch.tensor(rows), "sizes": sizes, "log_probs": values}, directory / LOG_PROBS)
    (directory / IDENTITY).write_text(json.dumps(identity))


def read_log_probs(directory: Path) -> dict[int, Tensor]:
    """Read log-probs by row."""
    tensors = load_file(directory / LOG_PROBS)
    parts = tensors["log_probs"].split(tensors["sizes"].tolist())
    return dict(zip(tensors["rows"].tolist(), parts, strict=True))


def reference_identity(policy: str, examples: Sequence[Example], options: Mapping[str, object]) -> str:
    """Digest what reference log-probs depend on, row by row: a dataset is not copied for it."""
    digest = hashlib.sha256(canonical([policy, dict(options)]))
    for example in examples:
        digest.update(np.array([example.row, len(example.sequences)], _INTEGER).tobytes())
        for sequence in example.sequences:
            digest.update(np.array([len(sequence.tokens)], _INTEGER).tobytes())
            digest.update(np.asarray(sequence.tokens, _INTEGER).tobytes())
            digest.update(np.fromiter(map(bool, sequence.supervised), bool, len(sequence.tokens)).tobytes())
            digest.update(canonical([placed.image.name for placed in sequence.images]))
    return digest.hexdigest()
