"""Log-probs of the starting policy, computed once before the first update and kept for a resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.artifacts.manifest import canonical
from posttrain.contracts.loss import Need
from posttrain.contracts.trainer import Example
from posttrain_plugins.training.checkpoints import damage, write_directory
from posttrain_plugins.training.step import Stepper

LOG_PROBS = "log_probs.safetensors"
IDENTITY = "identity.json"
_INTEGER = np.dtype("<i8")


def reference_log_probs(
    stepper: Stepper,
    examples: Sequence[Example],
    directory: Path,
    identity: str,
    pause: Callable[[int], None],
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
        pause: Called with the number of examples done after each micro-batch; may raise to stop.
    """
    if damage(directory) is None and json.loads((directory / IDENTITY).read_text()) == identity:
        return _by_row(load_file(directory / LOG_PROBS))
    score = stepper.log_probs if Need.REFERENCE_TOKENS in stepper.needs else stepper.totals
    found = score(examples, pause)
    rows = sorted(found)

    def fill(path: Path) -> None:
        sizes = torch.tensor([len(found[row]) for row in rows])
        values = torch.cat([found[row] for row in rows])
        save_file({"rows": torch.tensor(rows), "sizes": sizes, "log_probs": values}, path / LOG_PROBS)
        (path / IDENTITY).write_text(json.dumps(identity))

    if stepper.parallel.rank == 0:
        write_directory(directory, fill)
    return found


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


def _by_row(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    parts = tensors["log_probs"].split(tensors["sizes"].tolist())
    return dict(zip(tensors["rows"].tolist(), parts, strict=True))
