from __future__ import annotations

from array import array
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training.batches import (
    Budget,
    DataOrder,
    StepSampler,
    collate,
    cut,
    predicted,
)


def example(row: int, *lengths: int, prompt: int = 1) -> Example:
    sequences = tuple(
        TokenSequence(list(range(5, 5 + n)), [i >= prompt for i in range(n)], "completion") for n in lengths
    )
    return Example(row, sequences)


def test_an_epoch_visits_each_example_once_and_keeps_the_ragged_last_step():
    steps = DataOrder(10, 4, seed=1, shuffle=True).epoch(0)
    assert [len(step) for step in steps] == [4, 4, 2]
    assert sorted(chain.from_iterable(steps)) == list(range(10))


def test_order_depends_on_seed_and_epoch_alone():
    order = DataOrder(50, 8, seed=1, shuffle=True)
    torch.manual_seed(0)
    first = order.epoch(1)
    torch.rand(7)
    assert DataOrder(50, 8, seed=1, shuffle=True).epoch(1) == first
    assert order.epoch(0) != first
    assert DataOrder(50, 8, seed=2, shuffle=True).epoch(1) != first


def test_without_shuffle_the_dataset_keeps_its_order():
    order = DataOrder(5, 2, seed=1, shuffle=False)
    assert order.epoch(0) == order.epoch(3) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_visited_are_the_rows_of_the_first_steps(steps: int):
    order = DataOrder(10, 3, seed=4, shuffle=True)
    rows = [step for epoch in range(3) for step in order.epoch(epoch)][:steps]
    assert order.visited(steps) == sorted({position for step in rows for position in step})


def test_sampler_follows_the_epoch_it_is_told():
    order = DataOrder(6, 2, seed=0, shuffle=True)
    sampler = StepSampler(order)
    sampler.set_epoch(2)
    assert list(sampler) == order.epoch(2)
    assert len(sampler) == 3


@given(
    st.lists(st.tuples(st.integers(2, 400), st.integers(2, 400)), min_size=1, max_size=30),
    st.integers(1, 1000),
)
def test_cut_keeps_every_example_whole_and_stays_in_the_budget(lengths: list[tuple[int, int]], budget: int):
    examples = [example(row, *pair) for row, pair in enumerate(lengths)]
    parts = cut(examples, Budget(budget))
    assert Counter(each.row for part in parts for each in part) == Counter(range(len(lengths)))
    for part in parts:
        padded = max(each.longest for each in part) * sum(len(each.sequences) for each in part)
        assert padded <= budget or len(part) == 1


def test_cut_separates_lengths_that_would_mostly_be_padding():
    examples = [example(row, length) for row, length in enumerate([300, 10, 290, 12])]
    assert [[each.longest for each in part] for part in cut(examples, Budget(10_000))] == [
        [300, 290],
        [12, 10],
    ]


def test_collate_pads_on_the_right_and_marks_what_predicts():
    micro = collate([example(0, 3, prompt=2), example(1, 4, prompt=1)], pad=9, device=torch.device("cpu"))
    assert micro.tokens.tolist() == [[5, 6, 7, 9], [5, 6, 7, 8]]
    assert micro.real.tolist() == [[True, True, True, False], [True] * 4]
    assert micro.predicting.tolist() == [[False, True, False, False], [True, True, True, False]]
    assert micro.targets.tolist() == [7, 6, 7, 8]
    assert micro.sequence.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("kind", [list, bytes, tuple, lambda flags: array("b", flags)])
def test_supervision_may_come_in_any_sequence(kind):
    flags = TokenSequence(array("i", [4, 5, 6, 7]), kind([0, 0, 1, 0]), "completion")
    assert collate([Example(0, (flags,))], 0, torch.device("cpu")).targets.tolist() == [6]
    assert flags.predicted == 1


def test_the_first_token_is_never_a_target():
    micro = collate([example(0, 3, prompt=0)], pad=0, device=torch.device("cpu"))
    assert micro.targets.tolist() == [6, 7]


def test_padding_equal_to_a_supervised_token_loses_nothing():
    one = Example(0, (TokenSequence([4, 5, 2], [False, True, True], "completion"),))
    two = Example(1, (TokenSequence([4, 5, 6, 7, 2], [False, True, True, True, True], "completion"),))
    micro = collate([one, two], pad=2, device=torch.device("cpu"))
    assert micro.targets.tolist() == [5, 2, 5, 6, 7, 2]
    assert micro.real.sum(1).tolist() == [3, 5]


def test_cut_bounds_the_supervised_tokens_too():
    examples = [example(row, 10, prompt=4) for row in range(7)] + [example(7, 40)]
    parts = cut(examples, Budget(10_000, supervised=13))
    assert [[each.row for each in part] for part in parts] == [[7], [0, 1], [2, 3], [4, 5], [6]]
    assert all(sum(map(predicted, part)) <= 13 or len(part) == 1 for part in parts)
    assert cut(examples, Budget(10_000, supervised=10_000)) == cut(examples, Budget(10_000))
