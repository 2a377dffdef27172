"""The callback contract: what joins a training beside its loss.

The light half is registered, has options, and says whether it can change what is trained. The heavy half is a
`transformers.TrainerCallback`, made in the worker; the protocols below are what it may do beyond that. torch and
transformers appear in annotations only.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from posttrain.contracts.backend import Parallel
from posttrain.contracts.component import Config, NoOptions
from posttrain.contracts.stage import StageContext

if TYPE_CHECKING:
    from torch import Tensor


class Callback(ABC):
    """Registered under `Group.CALLBACK` as a class; instantiated without arguments. Light: the plan imports it.

    Class attributes:
        config: Its options.
        target: `module:attribute` of what makes the `transformers.TrainerCallback`: called on every rank with a
            `Training` and the options.
        watches_only: It cannot change what the training puts out, so neither it nor its options are part of the key.
    """

    config: ClassVar[type[Config]] = NoOptions
    target: ClassVar[str]
    watches_only: ClassVar[bool] = False

    def problems(self, config: Any, training: Any) -> Sequence[str]:
        """Return which of a trainer's options do not work with it, and why."""
        return ()

    def ports(self, config: Any) -> Sequence[str]:
        """Return the output ports that it adds: policies beside that of port `model`."""
        return ()


class Training(Protocol):
    """What a callback is given of the training that it joins, on every rank.

    Attributes:
        context: The stage's: notes, metrics, tables, secrets.
        config: The trainer's options.
        work: A directory of the callback's own; it survives a crash and a resume. Rank 0 alone writes there.
        steps: How many optimizer steps the training is to take.
        policy: The policy, with the attributes `model` and `encoder`.
        parallel: The ranks.
    """

    context: StageContext
    config: Any
    work: Path
    steps: int
    policy: Any
    parallel: Parallel

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trained tensors by name, whole, on the CPU of rank 0; empty on other ranks.

        All ranks have to call it. The tensors may be the model's own: copy what is to be kept.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return what the step came to: `loss`, `grad_norm`, and the metrics of the loss. The same on every rank."""

    def aside(self) -> AbstractContextManager[None]:
        """Do something that is no training: its time is not counted, and random generators stay as they were."""


@runtime_checkable
class Stateful(Protocol):
    """A callback whose state is part of each checkpoint.

    A state is made of mappings, lists, tuples, tensors and plain values. Rank 0's is kept, and all ranks get it.
    """

    def state(self) -> Any:
        """Return the state after the step just done."""

    def restore(self, state: Any) -> None:
        """Go on from a state."""


@runtime_checkable
class Finishing(Protocol):
    """A callback that has to know which step is the last; early stopping or another callback may end it sooner."""

    def last_step(self, step: int) -> None:
        """Take the last step in, on every rank: when it is evaluated, before the checkpoint of the end is written.

        It may be called more than once. A training that was asked to stop has no last step yet.

        Args:
            step: The number of the step.
        """


@runtime_checkable
class Concluding(Protocol):
    """A callback that has a say in what the training puts out."""

    def conclude(self, weights: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return weights by output port: `model`, or a port of its own. On rank 0 alone.

        Args:
            weights: What port `model` is to hold: the trained tensors by name.
        """


@runtime_checkable
class Delivering(Protocol):
    """A callback that does something with what the training put out."""

    def deliver(self, outputs: Mapping[str, Path]) -> None:
        """Look at the finished policies, by output port. On rank 0 alone, after all else; what fails is tried again.

        A failure fails the stage; a resume starts from the end of the training.
        """
