"""The random generators that training may draw from, saved and put back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def random_state() -> dict[str, Any]:
    """Return the state of every generator that training may draw from."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to a saved state."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def diverge(seed: int, rank: int) -> None:
    """Let ranks draw different numbers from now on, such as dropout masks; rank 0 draws what one process would."""
    if rank:
        digest = hashlib.sha256(f"rank:{seed}:{rank}".encode()).digest()
        number = int.from_bytes(digest[:4], "big")
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)


class Replay:
    """Lets a second forward pass of a micro-batch draw the same dropout masks as the first.

    Args:
        device: Where the draws are made.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def first(self, index: int, forward: Callable[[], T]) -> T:
        """Run a first pass and remember where the generators stood."""
        self._states[index] = self._now()
        return forward()

    def rewind(self, index: int) -> None:
        """Put the generators back to where a first pass started."""
        self._set(self._states[index])

    def again(self, index: int, forward: Callable[[], T]) -> T:
        """Run a second pass from where the first one started; one without a first pass just runs.

        The generators go on from where they stand: the first passes have drawn what a single pass would.
        """
        if index not in self._states:
            return forward()
        now = self._now()
        self._set(self._states[index])
        found = forward()
        self._set(now)
        return found

    def _now(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def _set(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if self._cuda is not None and state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._cuda)
