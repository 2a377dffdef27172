from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    cut,
    deal,
    probe,
)
from posttrain_plugins.training.layouts.layout import fillable, filled


class Padded:
    """Rows as long as the longest."""

    def size(self, examples: Sequence[Example]) -> int:
        return max((e.longest for e in examples), default=1) * sum(len(e.sequences) for e in examples)

    def load(self, example: Example) -> int | None:
        return None

    def room(self, tokens: int) -> int:
        return tokens


class Packed:
    """No padding."""

    def size(self, examples: Sequence[Example]) -> int:
        return sum(e.size for e in examples)

    def load(self, example: Example) -> int | None:
        return example.size

    def room(self, tokens: int) -> int:
        return tokens


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
    parts = cut(examples, Padded(), Budget(budget))
    assert Counter(each.row for part in parts for each in part) == Counter(range(len(lengths)))
    for part in parts:
        padded = max(each.longest for each in part) * sum(len(each.sequences) for each in part)
        assert padded <= budget or len(part) == 1


def test_cut_separates_lengths_that_would_mostly_be_padding():
    examples = [example(row, length) for row, length in enumerate([300, 10, 290, 12])]
    assert [[each.longest for each in part] for part in cut(examples, Padded(), Budget(10_000))] == [
        [300, 290],
        [12, 10],
    ]


def test_cut_bounds_the_supervised_tokens_too():
    examples = [example(row, 10, prompt=4) for row in range(7)] + [example(7, 40)]
    parts = cut(examples, Padded(), Budget(10_000, supervised=13))
    assert [[each.row for each in part] for part in parts] == [[7], [0, 1], [2, 3], [4, 5], [6]]
    assert all(sum(each.predicted for each in part) <= 13 or len(part) == 1 for part in parts)
    assert cut(examples, Padded(), Budget(10_000, supervised=10_000)) == cut(
        examples, Padded(), Budget(10_000)
    )


def test_without_padding_a_step_is_packed_by_best_fit():
    examples = [example(row, length) for row, length in enumerate([2, 6, 3, 5, 4])]
    parts = cut(examples, Packed(), Budget(10))
    assert [[each.longest for each in part] for part in parts] == [[6, 4], [5, 3, 2]]
    bounded = cut(examples, Packed(), Budget(10, supervised=6))
    assert all(sum(each.predicted for each in part) <= 6 for part in bounded)
    assert all(sum(each.size for each in part) <= 10 for part in bounded)
    assert len(bounded) == 3


def test_rows_that_are_filled_up_keep_the_budget():
    for tokens in (2, 100, 255, 256, 300, 319, 320, 2048):
        room = fillable(tokens)
        assert filled(room) <= tokens < filled(room + 1)


def test_a_packed_row_is_visited_whole_and_counts_as_one():
    order = DataOrder(7, 2, seed=3, shuffle=True, packs=[range(0, 3), range(3, 4), range(4, 7)])
    assert order.steps_per_epoch == 2
    first, second = order.epoch(0)
    assert sorted(first + second) == list(range(7))
    assert {0, 1, 2} <= set(first) or {0, 1, 2}.isdisjoint(first)
    assert order.visited(1) == sorted(first)
    assert order.visited(2) == list(range(7))


@given(
    st.lists(st.integers(2, 300), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 700),
    st.sampled_from([Padded(), Packed()]),
)
def test_every_rank_gets_as_many_micro_batches_and_no_example_is_lost(
    lengths: list[int], ranks: int, budget: int, layout: Padded | Packed
):
    examples = [example(row, length) for row, length in enumerate(lengths)]
    dealt = deal(examples, layout, Budget(budget), ranks)
    assert all(len(parts) == ranks for parts in dealt.rounds)
    assert [len(dealt.of(rank)) for rank in range(ranks)] == [len(dealt.rounds)] * ranks
    assert sorted(each.row for each in dealt.examples) == list(range(len(lengths)))
    assert all(layout.size(part) <= budget or len(part) == 1 for part in dealt.of(0) if part)
    assert dealt.counts.tokens == sum(length - 1 for length in lengths)
    assert (dealt.counts.sequences, dealt.counts.examples) == (len(lengths), len(lengths))


def test_a_step_with_fewer_examples_than_ranks_leaves_some_without():
    dealt = deal([example(0, 5)], Padded(), Budget(100), 3)
    assert sorted(len(part) for part in dealt.rounds[0]) == [0, 0, 1]


def test_a_step_of_one_micro_batch_is_split_about_evenly_among_ranks():
    examples = [example(row, length) for row, length in enumerate([40, 30, 20, 10])]
    (parts,) = deal(examples, Packed(), Budget(1000), 2).rounds
    assert sorted(sum(each.size for each in part) for part in parts) == [40, 60]


def test_the_deal_does_not_depend_on_the_order_of_the_examples():
    examples = [example(row, length) for row, length in enumerate([40, 31, 22, 13, 9])]
    one, other = (deal(each, Padded(), Budget(60), 2) for each in (examples, examples[::-1]))
    rows = [[[e.row for e in part] for part in parts] for parts in one.rounds]
    assert rows == [[[e.row for e in part] for part in parts] for parts in other.rounds]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=4))
def test_the_prefix_is_what_all_sequences_share_with_a_token_left_for_each(tokens: list[list[int]]):
    sequences = tuple(TokenSequence(each, [True] * len(each), "completion") for each in tokens)
    found = Example(0, sequences).prefix
    assert all(each[:found] == tokens[0][:found] for each in tokens)
    assert all(len(each) > found for each in tokens)
    longer = found + 1
    assert any(len(each) <= longer or each[:longer] != tokens[0][:longer] for each in tokens)


@given(st.lists(st.tuples(st.integers(2, 300), st.integers(1, 290)), min_size=1, max_size=6))
def test_a_probe_is_short_and_has_something_to_predict_in_every_sequence(shapes: list[tuple[int, int]]):
    examples = [
        example(row, length, prompt=min(prompt, length - 1)) for row, (length, prompt) in enumerate(shapes)
    ]
    chosen = probe(examples)
    assert 1 <= len(chosen) <= 2
    assert all(each.longest <= 32 and each.sequences[0].predicted for each in chosen)
    if len({each.longest for each in examples}) > 1:
        assert len({each.longest for each in chosen}) == 2
