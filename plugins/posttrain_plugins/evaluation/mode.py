"""Running a model without training it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout and gradients off, and put the model back into the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
