"""Checks of what a loss declares: options, needs, purity, and the example in its docstring."""

from __future__ import annotations

import copy
import doctest
import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.contracts.loss import LossOutput
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry.validation import HELD, faults
from posttrain_plugins.testing.losses.subject import LossSubject, shown
from posttrain_plugins.testing.stepping import Shown, measured, terms_of
from posttrain_plugins.testing.worked import worked

__tracebackhide__ = True


def contract(subject: LossSubject) -> None:
    """Its class attributes and signatures are those of a loss."""
    wrong = list(faults(Group.LOSS, subject.loss))
    if wrong:
        raise subject.refuse("; ".join(wrong))
    if not (subject.loss.__doc__ or "").strip():
        raise subject.refuse("it has no docstring")


def options(subject: LossSubject) -> None:
    """Options survive JSON, and every one is described."""
    config = subject.config
    again = type(config).model_validate_json(config.model_dump_json())
    if again != config:
        raise subject.refuse(f"its options do not survive JSON: {config!r} becomes {again!r}")
    told = "\n".join(base.__doc__ or "" for base in type(config).__mro__)
    for name, field in type(config).model_fields.items():
        if not field.description and not re.search(rf"^\s+{name}: \S", told, re.MULTILINE):
            raise subject.refuse(f"the option {name!r} has no description")


def needs(subject: LossSubject) -> None:
    """It reads nothing that it does not declare, and its options only add to what it declares."""
    declared, missing = subject.needs, subject.loss.needs - subject.needs
    if missing:
        raise subject.refuse(f"`needs_of` leaves out {', '.join(sorted(missing))}, which `needs` declares")
    beyond = declared - HELD[subject.family]
    if beyond:
        raise subject.refuse(f"no batch of the family {subject.family} holds {', '.join(sorted(beyond))}")
    drawn = subject.draw(seed=40)
    try:
        bare = subject.take(drawn).outputs[0]
    except (TypeError, AttributeError, PluginError) as error:
        raise subject.refuse(f"it reads what it does not declare in `needs`: {error}") from error
    full = subject.take(replace(drawn, lavish=True)).outputs[0]
    for number, (one, two) in enumerate(zip(bare.terms, full.terms, strict=True)):
        if not torch.equal(one.values, two.values):
            raise subject.refuse(
                f"term {number} depends on something that `needs` does not declare, and that is not computed then"
            )


def purity(subject: LossSubject) -> None:
    """The same batch gives the same terms, and batch, sums and state stay as they are."""
    plugin, config = subject.plugin, subject.config
    drawn = subject.draw(seed=41)
    (part,), state = shown([drawn]), plugin.begin(config)
    kept, kept_state = copy.deepcopy(part), copy.deepcopy(state)
    with torch.random.fork_rng(devices=[]):
        found = [_seeded(subject, part, state, seed) for seed in (0, 1)]
    if state != kept_state:
        raise subject.refuse(f"it changes the state it is given: {kept_state!r} has become {state!r}")
    changed = _changed(kept.batch, part.batch) or _changed(kept.measured, part.measured)
    if changed is not None:
        raise subject.refuse(f"it changes `{changed}` of the batch it is given")
    for one, two in zip(found[0].terms, found[1].terms, strict=True):
        if not torch.equal(one.values, two.values):
            raise subject.refuse("the same batch gives other values the second time")


def _seeded(subject: LossSubject, part: Shown, state: Any, seed: int) -> LossOutput:
    plugin, config = subject.plugin, subject.config
    torch.manual_seed(seed)
    stats = measured(plugin, config, [part], state)
    kept = {name: value.clone() for name, value in stats.items()}
    now = plugin.advance(state, stats, config)
    before = copy.deepcopy(now)
    output = terms_of(plugin, plugin(part.batch, config, stats, now))
    if now != before:
        raise subject.refuse(f"it changes its state in __call__: {before!r} has become {now!r}")
    for name, value in stats.items():
        if not torch.equal(value, kept[name]):
            raise subject.refuse(f"it changes the sum {name!r} that it is given")
    return output


def _changed(before: Any, after: Any) -> str | None:
    for field in fields(before):
        one, two = getattr(before, field.name), getattr(after, field.name)
        if isinstance(one, Tensor):
            if not torch.equal(one.nan_to_num(), two.nan_to_num()):
                return field.name
        elif is_dataclass(one):
            inner = _changed(one, two)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def example(subject: LossSubject) -> None:
    """The docstring has an example with `worked`, and it says what Python says."""
    loss = subject.loss
    names = {**vars(sys.modules[loss.__module__]), loss.__name__: loss, "worked": worked}
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    found = [each for each in finder.find(loss, loss.__name__, module=False, globs=names) if each.examples]
    if not any("worked(" in each.source for test in found for each in test.examples):
        raise subject.refuse("its docstring has no example; show one with `>>> worked(TheLoss, …)`")
    for test in found:
        told = io.StringIO()
        with redirect_stdout(io.StringIO()):
            result = doctest.DocTestRunner(verbose=False).run(test, out=told.write)
        if result.failed:
            raise subject.refuse(f"the example in its docstring is wrong:\n{told.getvalue()}")
