"""What a loss does not declare that it needs, its batch refuses to tell."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.stepping import examples, stepper

from posttrain.contracts.loss import Absent, Family, Loss, LossOutput, Need, Term, Undeclared
from posttrain.contracts.reduction import EXAMPLE_MEAN, TOKEN_MEAN
from posttrain.contracts.registration import Group
from posttrain.registry.discovery import discover
from posttrain_plugins.testing.draws import make_batch
from posttrain_plugins.testing.losses.subject import loss_subject

UNREAD = frozenset({Need.RIVALS, Need.ENTROPY})
"""Needs that no field alone tells: which rows there are, and whether a field has a gradient."""


def declared() -> Iterator[Any]:
    for name in discover().names(Group.LOSS):
        for need in sorted(loss_subject(name).needs - UNREAD):
            yield pytest.param(name, need, id=f"{name}-{need}")


@pytest.mark.parametrize(("name", "need"), list(declared()))
def test_a_registered_loss_without_one_of_its_needs_is_refused(name: str, need: Need) -> None:
    subject = loss_subject(name)
    implied = {Need.REFERENCE: {need, Need.REFERENCE_TOKENS}}.get(need, {need})
    with pytest.raises(Undeclared, match=f"declare `Need.({'|'.join(each.name for each in implied)})`"):
        subject.take(replace(subject.draw(seed=1), needs=subject.needs - implied))


@pytest.mark.parametrize("family", list(Family))
def test_every_governed_field_refuses_where_nothing_is_declared(family: Family) -> None:
    batch = make_batch(family, needs=frozenset())
    parts = [batch, *([batch.tokens] if family is Family.PREFERENCE else [])]
    found = {(type(each).__name__, field) for each in parts for field in getattr(each, "governed", ())}
    for each in parts:
        for field in fields(each):
            value = getattr(each, field.name)
            refuses = isinstance(value, Absent)
            assert refuses == ((type(each).__name__, field.name) in found and field.name != "entropy")
            if refuses:
                with pytest.raises(Undeclared, match=f"does not hold `{field.name}`"):
                    batch.weight - value


USES: tuple[Callable[[Any, torch.Tensor], Any], ...] = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.lt,
    lambda absent, one: one - absent,
    lambda absent, one: one * absent,
    lambda absent, one: one >= absent,
    lambda absent, one: one == absent,
    lambda absent, one: -absent,
    lambda absent, one: absent.detach(),
    lambda absent, one: absent.shape,
    lambda absent, one: absent[0],
    lambda absent, one: len(absent),
    lambda absent, one: bool(absent),
    lambda absent, one: torch.stack([one, absent]),
    lambda absent, one: torch.nn.functional.softplus(absent),
    lambda absent, one: one.where(one > 0, absent),
    lambda absent, one: one.where(absent, one),
)


@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_with_what_is_absent_is_refused(use: Callable[[Any, torch.Tensor], Any]) -> None:
    absent = copy.deepcopy(Absent(Need.MARGIN, "margin"))
    with pytest.raises(Undeclared, match=r"declare `Need\.MARGIN`"):
        use(absent, torch.ones(2))


class Careless(Loss):
    """Declares nothing."""

    def __init__(self, family: Family, reads: Callable[[Any], Any]) -> None:
        self.family, self.reads = family, reads  # type: ignore[misc]

    def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> LossOutput:
        mean = TOKEN_MEAN if self.family is Family.TOKEN else EXAMPLE_MEAN
        return LossOutput([Term(self.reads(batch) * batch.weight, mean)])


@pytest.mark.parametrize(
    ("uses", "family", "reads", "need"),
    [
        ("train.dpo", Family.PREFERENCE, lambda batch: batch.margin, Need.REFERENCE),
        ("train.dpo", Family.PREFERENCE, lambda batch: batch.chosen - batch.reference_chosen, Need.REFERENCE),
        ("train.dpo", Family.PREFERENCE, lambda batch: batch.tokens.reference, Need.REFERENCE_TOKENS),
        ("train.dpo", Family.PREFERENCE, lambda batch: batch.chosen * batch.own, Need.AUTHORS),
        ("train.kto", Family.UNPAIRED, lambda batch: batch.log_ratio, Need.REFERENCE),
        ("train.kto", Family.UNPAIRED, lambda batch: batch.logp - batch.mismatched, Need.MISMATCHED),
        ("train.sft", Family.TOKEN, lambda batch: batch.squares - batch.logp, Need.SQUARES),
        ("train.sft", Family.TOKEN, lambda batch: -batch.logp - batch.entropy, Need.ENTROPY),
    ],
)
def test_a_step_names_loss_field_and_need(uses: str, family: Family, reads: Any, need: Need) -> None:
    made = stepper(uses, "careless", plugin=Careless(family, reads))
    with pytest.raises(Undeclared) as refused:
        made.backward(examples(uses))
    assert "loss `careless`" in str(refused.value)
    assert f"declare `Need.{need.name}`" in str(refused.value)


def test_an_entropy_that_is_only_reported_needs_no_declaration() -> None:
    class Reporting(Careless):
        def __call__(self, batch: Any, config: Any, stats: Any, state: Any) -> LossOutput:
            return LossOutput([Term(-batch.logp, TOKEN_MEAN)], {"entropy": batch.entropy})

    made = stepper("train.sft", "reporting", plugin=Reporting(Family.TOKEN, lambda batch: batch))
    assert made.backward(examples("train.sft")).metrics["entropy"] > 0
