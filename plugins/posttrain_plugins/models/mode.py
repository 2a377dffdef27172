"""Running a model without training it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout and gradients off, and put the model back into the mode it was in.

    Not torch's inference mode: what a model caches meanwhile, it must be able to train with afterwards.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
