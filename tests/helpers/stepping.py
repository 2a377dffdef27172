"""Steps of every trainer with every loss that fits it, on a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from helpers.contexts import catalogue
from helpers.losses import KINDS
from helpers.models import char_tokenizer, tiny_judge, tiny_llama
from helpers.training import ROWS, TRAININGS, format_of, often, tried_once

from posttrain.contracts.component import Component
from posttrain.contracts.loss import REFERENCES, Loss, Need
from posttrain.contracts.registration import Group
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.backends.single import Single
from posttrain_plugins.data import formats
from posttrain_plugins.preparation.examples import prepare
from posttrain_plugins.templates.encoder import Encoder
from posttrain_plugins.training.batches import Budget, probe
from posttrain_plugins.training.head import choose_head, choose_value_head
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.step import Stepper

OF_KINDS = tried_once(
    {
        uses: [name for name, loss in KINDS.items() if loss.family == catalogue().stage(uses).family]
        for uses in catalogue().names(Group.TRAINER)
    }
)
"""Losses of every kind that the contract allows, each with a trainer."""

ALL = [*often(TRAININGS), *OF_KINDS]
"""Every registered trainer and every registered loss, and the losses of every kind."""


@cache
def encoder() -> Encoder:
    with TemporaryDirectory() as directory:
        char_tokenizer(Path(directory))
        return Encoder.open(Path(directory))


def examples(uses: str, count: int = 7) -> list[Example]:
    """Examples of ragged lengths and weights, made by the trainer itself from rows of its format."""
    return list(_examples(uses, count))


@cache
def _examples(uses: str, count: int) -> tuple[Example, ...]:
    format, trainer = format_of(uses), catalogue().stage(uses)
    made = prepare(
        trainer,
        trainer.rows(ROWS[format](count), formats.format_of(format), frozenset(Need), seed=0),
        encoder(),
        formats.format_of(format),
        max_length=None,
        truncation="error",
        weight_column=None,
        supervise=trainer.supervise(trainer.config()),
        needs=frozenset(Need),
    )
    return tuple(replace(each, weight=0.5 + each.row % 3) for each in made.examples)


def _sequences(uses: str) -> Sequence[TokenSequence]:
    return examples(uses)[0].sequences


def stepper(
    uses: str,
    loss: str,
    tokens: int = 10_000,
    layout: str = "padded",
    plugin: Loss | None = None,
    model: Any = None,
    **options: Any,
) -> Stepper:
    """A stepper over a tiny Llama with attention by segments, with a head for numbers where the trainer wants that.

    `options` go to the model's config.
    """
    plugin = plugin or KINDS.get(loss) or catalogue().make(Group.LOSS, loss)
    trainer = catalogue().stage(uses)
    make = partial(tiny_judge, kind=trainer.kind) if trainer.valued else tiny_llama
    model = model or make(encoder().vocabulary, attn_implementation="sdpa", **options).train()
    chosen = LAYOUTS[layout]
    first = LAYOUTS["padded"].arrange(probe(examples(uses)), 0, "cpu")
    head, told = (
        (choose_value_head(model, first), None)
        if trainer.valued
        else choose_head(model, first, 1e-4, 1 << 28)
    )
    assert told is None, told
    made = Stepper(
        model=model,
        trainer=trainer,
        loss=Component(loss, plugin, plugin.config()),
        pad=0,
        budget=Budget(tokens),
        head=head,
        layout=chosen,
        parallel=Single(),
        config=trainer.config(),
    )
    if made.needs & REFERENCES:
        told = torch.tensor(
            [-3.0 * at if each.measured else -at for at, each in enumerate(_sequences(uses), 1)]
        )
        made.reference = {row: told * (row + 9) for row in range(100)}
    return made


BOUND = 2e-6
"""How far two steps may be apart."""

Gradient = tuple[float, dict[str, float], list[torch.Tensor]]
"""Loss, metrics and gradients of a step."""


@cache
def plain(uses: str, loss: str) -> Gradient:
    """What a step comes to that is one padded micro-batch of all examples: what every other way is compared with."""
    return gradient(stepper(uses, loss), examples(uses))


def gradient(made: Stepper, rows: Sequence[Example]) -> Gradient:
    made.model.zero_grad()
    result = made.backward(rows)
    return result.loss, dict(result.metrics), [p.grad.clone() for p in made.model.parameters()]


class Thread(Single):
    """A rank that is a thread of this process; `sum` waits for the others."""

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._given, self._barrier = rank, len(given), given, barrier

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self._given[self.rank] = tensor.detach().clone()
        self._barrier.wait()
        assert len({(each.shape, each.dtype) for each in self._given}) == 1, self._given
        total = torch.stack(self._given).sum(0)
        self._barrier.wait()
        return total


def on_threads(ranks: int, work: Callable[[Thread], Any]) -> list[Any]:
    """Do the same work on ranks that are threads; return what each of them returns."""
    barrier = threading.Barrier(ranks, timeout=20)
    given: list[Any] = [None] * ranks

    def run(rank: int) -> Any:
        try:
            return work(Thread(rank, given, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        found = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [each.exception() for each in found if each.exception() is not None]
    # What the other ranks see of a rank's end is a broken barrier.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in found]


def apart(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, of the largest element: of the largest update of an SGD step."""
    gaps = [(one - other).abs().max() for one, other in zip(found, expected, strict=True)]
    # Unlike Python's, torch's largest of several is no number where one of them is none.
    return float(torch.stack(gaps).max()) / max(float(tensor.abs().max()) for tensor in expected)


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """No element differs by more than `BOUND` of the largest one."""
    assert apart(found, expected) <= BOUND
