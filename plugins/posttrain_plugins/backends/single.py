"""One process: nothing is shared."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.backend import Place
from posttrain.contracts.component import Config
from posttrain_plugins.backends.whole import Whole
from posttrain_plugins.training.accumulation import Accumulation
from posttrain_plugins.training.lookup import Lookup


class Single(Whole):
    """The whole training in this process."""

    repeatable = True

    def __init__(self, place: Place | None = None, config: Config | None = None) -> None:
        self.rank, self.size = 0, 1

    @cached_property
    def device(self) -> torch.device:
        """A GPU where there is one; looked for at the first use: a process that has looked cannot fork ranks."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def wrap(self, model: Any, optimizer: Any, precision: Any = None) -> tuple[Any, Any]:
        """Leave both as they are, but for where the gradient of the embedding is added."""
        embedding = model.get_input_embeddings()
        if Lookup.fits(embedding):
            embedding.forward = Lookup(embedding)
        return model, optimizer

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the micro-batch's gradient."""
        if self.device.type == "cpu":
            Accumulation().run(loss)
        else:
            # Autograd has a thread of its own for each GPU.
            torch.autograd.backward(loss)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return it as it is."""
        return tensor

    def agree(self, value: Any) -> Any:
        """Return it as it is."""
        return value

    def barrier(self) -> None:
        """Go on at once."""

    def close(self) -> None:
        """Leave nothing."""
