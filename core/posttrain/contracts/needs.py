"""What a loss may need beside log-probs, and how a batch refuses what nobody declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from posttrain.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor


class Need(StrEnum):
    """What a loss must be given beside log-probs; what nobody needs is not computed.

    REFERENCE: Σ log π_ref of each sequence. REFERENCE_TOKENS: log π_ref of each token as well. ENTROPY: the policy's
    entropy at each token, with gradient. SQUARES: Σ_v π(v)² at each token, with gradient. MEAN_LOGP: the mean of log
    π(v) over the vocabulary at each token, with gradient.
    MISMATCHED: log-probs of another row's answer to each prompt, for `measure` to estimate the KL divergence from
    the reference. RIVALS: several answers to each prompt. MARGIN: by how much the rewards of a row's answers should
    differ, where the data says. AUTHORS: which answer of a pair the policy wrote. PREFERENCE: how likely the chosen
    answer of a pair is preferred to the rejected one.
    """

    REFERENCE = "reference"
    REFERENCE_TOKENS = "reference_tokens"
    ENTROPY = "entropy"
    SQUARES = "squares"
    MEAN_LOGP = "mean_logp"
    MISMATCHED = "mismatched"
    RIVALS = "rivals"
    MARGIN = "margin"
    AUTHORS = "authors"
    PREFERENCE = "preference"


REFERENCES = frozenset({Need.REFERENCE, Need.REFERENCE_TOKENS})
"""What has to be known of the reference."""


class Undeclared(PluginError):
    """A loss reads what its batch holds only where a need is declared."""

    def of(self, loss: str) -> Undeclared:
        """Return the error that names the loss, too."""
        where = f"loss `{loss}`" if self.where is None else f"loss `{loss}`, {self.where}"
        return Undeclared(self.message, where=where, found=self.found, fix=self.fix)


def _refuse(self: Absent, *args: Any) -> NoReturn:
    raise self.error()


class Absent:
    """Stands in a batch for a field that was not made: whatever is done with it is an error.

    `None` would say so in words that name neither field nor need, and zeros would be trained on.

    Args:
        need: What has to be declared.
        field: How the field is called.
    """

    def __init__(self, need: Need, field: str) -> None:
        self._need, self._field = need, field

    def error(self) -> Undeclared:
        """Return the error that says what to declare."""
        name = f"Need.{self._need.name}"
        return Undeclared(
            f"the batch does not hold `{self._field}`",
            found=f"a loss that reads it, and a batch that was made without `{name}`",
            fix=f"declare `{name}` in the loss's `needs`; a `batch` of a trainer's own has to fill the field",
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise next(each for each in _flat((args, kwargs or {})) if isinstance(each, Absent)).error()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what copies, pickles and inspects objects asks for these
            raise AttributeError(name)
        raise self.error()

    def __repr__(self) -> str:
        return f"Absent({self._need.name}, {self._field})"

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = _refuse


def _flat(value: Any) -> Iterator[Any]:
    """Yield what stands in nested arguments."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def held(value: Any, need: Need, field: str) -> Tensor:
    """Return a field of a batch that is there where a loss declares that it needs it.

    Args:
        value: The field.
        need: What has to be declared.
        field: How the field is called, for the message.

    Raises:
        Undeclared: It is not there.
    """
    if value is None or isinstance(value, Absent):
        raise Absent(need, field).error()
    return cast("Tensor", value)


class Governed:
    """Base of what a loss is given: fields that needs govern, and that nobody has filled, refuse to be read.

    Class attributes:
        governed: What has to be declared for a field. `None` in one becomes an `Absent`.
    """

    governed: ClassVar[Mapping[str, Need]] = {}

    def __post_init__(self) -> None:
        for field, need in self.governed.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, Absent(need, field))

    def holds(self, field: str) -> bool:
        """Whether a field is there."""
        return not isinstance(getattr(self, field), Absent | None)
