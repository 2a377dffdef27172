"""The backend contract: how the ranks of one training share its model, its gradient and its optimizer.

A backend cannot change what is trained but for rounding, so it is part of no key. The loop deals one step's
examples to the ranks and gives each of them the same number of micro-batches; a backend adds the rest. torch
appears in annotations only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from posttrain.contracts.component import Config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where one rank stands.

    Args:
        rank: Its number, from 0.
        size: How many ranks there are.
        meeting: A file by which the ranks find each other; None for a single process.
    """

    rank: int = 0
    size: int = 1
    meeting: Path | None = None


class Split(StrEnum):
    """What ranks may hold parts of: the model's weights, their gradients, the optimizer's state.

    OPENED: weights too while the model is opened, on a GPU; else a rank's device holds all of them before it keeps its
    part.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    OPENED = "opened"


class Ranks(Config):
    """Options of every backend with several ranks."""

    ranks: int = Field(default=2, ge=1, description="processes that share each optimizer step")


class Parallel(ABC):
    """What one rank holds while it trains. Every method but `backward` is called by all ranks, in the same order.

    Attributes:
        rank: Its number, from 0.
        size: How many ranks there are.
        device: The torch device that it computes on.
        layout: How the optimizer's state is split over the ranks; empty where each rank has all of it.
        repeatable: Whether a step that was broken off can be started again.
    """

    rank: int
    size: int
    device: Any
    layout: str = ""
    repeatable: bool = False

    @contextmanager
    def loading(self) -> Iterator[str | None]:
        """Surround what opens the model and what `prepare` does to it; yield the device to open it on.

        None is the device that this rank computes on. A backend that splits the weights in `prepare` lets ranks take
        turns here, so that no more than one of them holds all of them.
        """
        yield None

    def prepare(self, model: Any) -> None:
        """Shard the model in place, where that has to be done before its optimizer is made.

        Called when the model is ready, and once more right before the optimizer is made.
        """
        return None

    @abstractmethod
    def wrap(self, model: Any, optimizer: Any, precision: Any = None) -> tuple[Any, Any]:
        """Return what the loop is to call and to step instead of the model and its optimizer.

        Args:
            model: The model, prepared.
            optimizer: Its optimizer.
            precision: The torch type that autocast computes in; None where it does not.
        """

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; after the `last` one of a step every rank has the mean over ranks.

        The loss is multiplied by the number of ranks already, so that mean is the gradient of the whole step.
        """

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of every rank's tensor, which must have the same shape and type on all of them."""

    @abstractmethod
    def agree(self, value: Any) -> Any:
        """Return rank 0's value, which must have a JSON form, on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for every rank."""

    @abstractmethod
    def clip(self, model: Any, limit: float) -> float:
        """Return the norm of the whole gradient and scale it down to `limit`, which may be infinite."""

    @abstractmethod
    def weights(self, model: Any, trainable: bool = False) -> Mapping[str, Tensor]:
        """Return an ordinary state dict on the CPU of rank 0, whatever the sharding; empty on other ranks.

        Its tensors may be the model's own. A parameter with several names stands under all of them, and saved
        buffers belong to it.

        Args:
            model: The model, not wrapped.
            trainable: Leave frozen parameters out.
        """

    @abstractmethod
    def load(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        """Copy an ordinary state dict, complete or of trainable parameters, into the model, not wrapped."""

    @abstractmethod
    def state(self, optimizer: Any) -> Any:
        """Return the optimizer's state as nested dicts, lists and tensors.

        Where `layout` is not empty this is the rank's own part, else the whole of it.
        """

    @abstractmethod
    def restore(self, optimizer: Any, state: Any) -> None:
        """Put a saved state back."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group of ranks."""


class Backend(ABC):
    """Registered under `Group.BACKEND` as a class; instantiated without arguments. Light: the plan imports it.

    Class attributes:
        config: Its options.
        target: `module:class` of its `Parallel`, made of a `Place` and the options.
    """

    config: ClassVar[type[Config]] = Ranks
    target: ClassVar[str]

    def ranks(self, config: Any) -> int:
        """Return how many processes to start."""
        return int(config.ranks)

    def split(self, config: Any) -> frozenset[Split]:
        """Return what is split over the ranks, for estimates; by default each rank holds all."""
        return frozenset()

    def problems(self, config: Any, training: Any) -> Sequence[str]:
        """Return which of a trainer's options do not work with it, and why."""
        return ()
