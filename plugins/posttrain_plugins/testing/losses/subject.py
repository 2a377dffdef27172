"""The loss that is checked: its options, what it declares, and random steps for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import Family, Loss, LossOutput, Need, Scope, State
from posttrain.contracts.reduction import Counts
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.components import validate_config
from posttrain.registry.discovery import discover
from posttrain.registry.validation import faults
from posttrain_plugins.testing.draws import Draw, draw
from posttrain_plugins.testing.stepping import Shown, Taken, measured, take_step
from posttrain_plugins.testing.suites import Nonconformance, place_of

__tracebackhide__ = True


class Monotone(StrEnum):
    """In which direction a loss is promised never to rise.

    MARGIN: a better answer that becomes likelier (or gets a higher reward) and a worse one that becomes less so.
    BETTER: the better answer alone. WORSE: the worse answer alone.
    """

    MARGIN = "margin"
    BETTER = "better"
    WORSE = "worse"


@dataclass(frozen=True)
class LossSubject:
    """A loss under test.

    Args:
        label: What people call it.
        loss: The class.
        options: Its options; the defaults where left out.
        monotone: The direction in which it must not rise; None where nothing is promised.
        others: A value beside its own of options that none is known for.
        idle: Options that have no effect on single steps, with the reason.
        known: The plugins that its options may name; those that are installed, by default.
    """

    label: str
    loss: type[Loss]
    options: Mapping[str, Any]
    monotone: Monotone | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    known: Catalogue | None = None

    @cached_property
    def plugin(self) -> Loss:
        """The loss itself."""
        return self.loss()

    @cached_property
    def config(self) -> Any:
        """Its validated options."""
        return validate_config(self.loss.config, self.options, self.known or discover())

    @property
    def family(self) -> Family:
        """Which batch it takes."""
        return self.loss.family

    @property
    def needs(self) -> frozenset[Need]:
        """What its batch must hold beside log-probs, with these options."""
        return self.plugin.needs_of(self.config)

    @property
    def parted(self) -> bool:
        """Whether it is called on parts of a step."""
        return self.loss.scope is Scope.MICRO_BATCH

    @property
    def remembers(self) -> bool:
        """Whether it keeps something from step to step."""
        return self.loss.begin is not Loss.begin or self.loss.advance is not Loss.advance

    def draw(self, seed: int = 0, examples: int = 4, dtype: torch.dtype = torch.float64) -> Draw:
        """Draw a random step."""
        return draw(self.family, self.needs, seed, examples, dtype)

    def take(self, *parts: Draw, state: State | None = None) -> Taken:
        """Take one step over parts of it, in the way that the loop does."""
        return take_step(self.plugin, self.config, shown(parts), state)

    def called(self, drawn: Draw) -> LossOutput:
        """Call the loss on the whole of a first step."""
        parts, before = shown([drawn]), self.plugin.begin(self.config)
        stats = measured(self.plugin, self.config, parts, before)
        now = self.plugin.advance(before, stats, self.config)
        output: Any = self.plugin(parts[0].batch, self.config, stats, now)
        if not isinstance(output, LossOutput):
            raise self.refuse(
                f"it must return a LossOutput with at least one term, but returned {output!r:.80}"
            )
        return output

    def slopes(self, drawn: Draw, state: State | None = None) -> tuple[Taken, tuple[Tensor, ...]]:
        """Take a step and return dL/d of every learned number of each token."""
        learned, leaves = drawn.with_leaves()
        taken = self.take(learned, state=state)
        return taken, gradients(taken.total, leaves)

    def refuse(self, message: str) -> Nonconformance:
        """Return the error that says what is wrong with the loss, and where it is written."""
        return Nonconformance(f"{self.label} ({place_of(self.loss)}): {message}")


def shown(parts: Sequence[Draw]) -> list[Shown]:
    """Return parts of one step as the loop shows them: each with the denominators of the whole."""
    whole = sum_of([part.counts for part in parts])
    return [Shown(each.batch(), each.part(whole), each.measured()) for each in parts]


def gradients(total: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of every leaf; zeros where nothing depends on one."""
    if not total.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(total, list(leaves), allow_unused=True, materialize_grads=True)


def sum_of(counts: Sequence[Counts]) -> Counts:
    """Add up the denominators of parts."""
    roles = {name: sum(each.roles.get(name, 0) for each in counts) for each in counts for name in each.roles}
    return Counts(
        sum(each.tokens for each in counts),
        sum(each.sequences for each in counts),
        sum(each.examples for each in counts),
        roles,
    )


def loss_subject(
    target: str | type[Loss],
    options: Mapping[str, Any] | None = None,
    monotone: str | None = None,
    files: Sequence[str | Path] = (),
    *,
    others: Mapping[str, Any] | None = None,
    idle: Mapping[str, str] | None = None,
) -> LossSubject:
    """Find a loss by its name, or take the class itself, and check its declarations.

    Raises:
        PluginError: There is no such loss, or it breaks the contract.
        Nonconformance: The class breaks the contract.
    """
    known = discover([Path(file) for file in files])
    promised: dict[str, Any] = {
        "options": dict(options or {}),
        "monotone": None if monotone is None else Monotone(monotone),
        "others": dict(others or {}),
        "idle": dict(idle or {}),
        "known": known,
    }
    if isinstance(target, str):
        return LossSubject(target, known.load(Group.LOSS, target), **promised)
    if not isinstance(target, type):
        raise PluginError(
            "the conformance suite takes the name of a loss or its class", found=f"{target!r:.80}"
        )
    wrong = list(faults(Group.LOSS, target))
    if wrong:
        raise Nonconformance(f"{target.__name__} ({place_of(target)}) is no loss: {'; '.join(wrong)}")
    return LossSubject(target.__name__, target, **promised)
