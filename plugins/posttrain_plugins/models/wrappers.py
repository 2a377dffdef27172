"""Sparing processes that use no DeepSpeed its import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_wrapped() -> Iterator[None]:
    """Let accelerate look for no DeepSpeed engine around a model.

    transformers unwraps a model before it saves it and when it makes a Trainer. Where DeepSpeed is installed,
    accelerate imports it for that, which takes 3 s, whether or not it is used. No model is wrapped there here.
    """
    from accelerate.utils import other

    before = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = before
