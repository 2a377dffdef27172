"""What goes wrong in a step: values that are no numbers, memory that runs out or is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fixed_values import Values, two_rows
from helpers.step_cases import EVERY_TRAINING
from helpers.stepping import (
    assert_same,
    encoder,
    examples,
    gradient,
    plain,
    stepper,
)

from posttrain.contracts.loss import LossOutput, Term, TokenBatch
from posttrain.contracts.reduction import (
    TOKEN_MEAN,
)
from posttrain.contracts.trainer import Scores
from posttrain.errors import StageError
from posttrain_plugins.launchers import local
from posttrain_plugins.training.reference import scored


def test_rows_of_a_micro_batch_that_is_not_finite_are_named():
    class Broken(Values):
        def __call__(self, batch: TokenBatch, config: Any, stats: Any, state: Any) -> LossOutput:
            values = -batch.logp * torch.where(batch.weight == 2.0, math.nan, 1.0)
            return LossOutput([Term(values, TOKEN_MEAN)])

    found = stepper("train.sft", "broken", 1, plugin=Broken(TOKEN_MEAN)).backward(two_rows())
    assert math.isnan(found.loss)
    assert found.suspects == [1]


class Full:
    """Memory for micro-batches up to a size."""

    def __init__(self, made: Any, error: BaseException, tokens: int) -> None:
        self.score, self.error, self.tokens = made.score, error, tokens
        self.failed: list[int] = []

    def __call__(self, micro: Any) -> Scores:
        if micro.tokens.numel() > self.tokens:
            self.failed.append(micro.tokens.numel())
            raise self.error
        return self.score(micro)


SHORTAGES = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
)


@EVERY_TRAINING
def test_a_step_that_runs_out_of_memory_is_done_again_with_half_the_budget(uses: str, loss: str):
    assert_done_again(uses, loss, MemoryError())


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("uses", "loss"), [("train.sft", "nll"), ("train.dpo", "running-mean")])
def test_so_it_is_however_the_lack_of_memory_is_told(uses: str, loss: str, error: BaseException):
    assert_done_again(uses, loss, error)


def assert_done_again(uses: str, loss: str, error: BaseException) -> None:
    rows, told = examples(uses), []
    _, _, expected = plain(uses, loss)
    made = stepper(uses, loss, 512)
    made.smaller = told.append
    made.score = Full(made, error, max(made.layout.size([row]) for row in rows))
    assert_same(gradient(made, rows)[2], expected)
    assert told and made.budget == told[-1]
    tried = [512, *(budget.tokens for budget in told)]
    assert all(later <= earlier // 2 for earlier, later in pairwise(tried))
    assert all(later < earlier for earlier, later in pairwise(made.score.failed)), "each trial is another one"
    once = stepper(uses, loss)
    once.backward(rows)
    assert made.state == {name: pytest.approx(value, rel=1e-5) for name, value in once.state.items()}


def test_an_example_that_does_not_fit_ends_with_an_error():
    """It is not tried again: there is nothing to cut, and a resume with more memory is to have its budget."""
    made, rows, told = stepper("train.sft", "nll", 512), examples("train.sft"), []
    made.smaller = told.append
    made.score = Full(made, MemoryError(), 0)
    with pytest.raises(StageError, match="memory ran out") as caught:
        made.backward(rows)
    assert caught.value.where == "a micro-batch of one example"
    sizes = [made.layout.size([row]) for row in rows]
    assert min(sizes) < made.budget.tokens == told[-1].tokens < 2 * max(sizes)
    failed, tries = made.score.failed[-1], len(made.score.failed)
    with pytest.raises(StageError, match="memory ran out"):
        made.backward(rows)
    assert made.score.failed[tries:] == [failed] and made.budget == told[-1]


@pytest.mark.parametrize(
    ("passed", "where"),
    [
        (lambda made, rows: made.evaluate(rows), "an evaluation"),
        (lambda made, rows: scored(made, rows, False, lambda done: None), "a pass over the reference"),
    ],
    ids=["evaluation", "reference"],
)
def test_a_pass_without_gradient_says_what_to_do(passed: Callable[..., Any], where: str):
    made = stepper("train.sft", "nll", 512)
    made.score = Full(made, MemoryError(), 0)
    with pytest.raises(StageError, match="memory ran out") as caught:
        passed(made, examples("train.sft"))
    assert caught.value.where == where
    assert "micro_batch_tokens" in caught.value.fix


def test_another_error_is_no_lack_of_memory():
    made = stepper("train.sft", "nll")
    made.score = Full(made, RuntimeError("a wrong shape"), 0)
    with pytest.raises(RuntimeError, match="a wrong shape"):
        made.backward(examples("train.sft"))


def test_what_is_kept_of_a_step_holds_no_graph():
    """The number of living tensors does not grow with the steps."""
    import gc

    made, rows = stepper("train.dpo", "running-mean"), examples("train.dpo", 3)

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    for _ in range(3):
        gradient(made, rows)
    before = living()
    for _ in range(10):
        gradient(made, rows)
    assert living() == before


def test_the_vocabulary_is_that_of_the_encoder():
    assert stepper("train.sft", "nll").model.config.vocab_size == encoder().vocabulary


def test_what_fails_on_the_only_rank_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    clock = count()
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=waits.append))
    with pytest.raises(ZeroDivisionError):
        local.Team([], tmp_path, lambda *_: None).lead(lambda: 1 / 0)
    assert waits == []
