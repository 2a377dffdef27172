import numpy as np
import pytest
import torch
from helpers.laid_out import alone, build, example, logp, mistral, ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training.layouts import LAYOUTS
from posttrain_plugins.training.layouts import blocks as blocks_module
from posttrain_plugins.training.layouts.blocks import Block, plan
from posttrain_plugins.training.microbatch import Segments

PAIR = Example(
    7,
    (
        TokenSequence([1, 2, 3, 4], [0, 0, 1, 1], "chosen"),
        TokenSequence([1, 2, 3, 5, 6], [False, False, True, True, False], "rejected"),
    ),
    weight=0.5,
)
SINGLE = Example(8, (TokenSequence([8, 9], [True, True], "completion"),))


def listed(micro):
    names = ("tokens", "positions", "selected", "targets", "sequence", "lengths", "weight")
    return {name: getattr(micro, name).tolist() for name in names}


def test_padded_by_hand():
    assert listed(LAYOUTS["padded"].arrange([PAIR, PAIR], 0, "cpu")) == {
        "tokens": [[1, 2, 3, 4, 0], [1, 2, 3, 5, 6]] * 2,
        "positions": [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]] * 2,
        "selected": [1, 2, 6, 7, 11, 12, 16, 17],
        "targets": [3, 4, 3, 5] * 2,
        "sequence": [0, 0, 1, 1, 2, 2, 3, 3],
        "lengths": [2, 2, 2, 2],
        "weight": [0.5, 0.5],
    }


def test_packed_by_hand():
    micro = LAYOUTS["packed"].arrange([PAIR, SINGLE], 0, "cpu")
    assert listed(micro) == {
        "tokens": [[1, 2, 3, 4, 1, 2, 3, 5, 6, 8, 9]],
        "positions": [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]],
        "selected": [1, 2, 5, 6, 9],
        "targets": [3, 4, 3, 5, 9],
        "sequence": [0, 0, 1, 1, 2],
        "lengths": [2, 2, 1],
        "weight": [0.5, 1.0],
    }
    assert micro.segments == Segments([0, 4, 9], [4, 5, 2], [-1, -1, -1])


def test_shared_prefix_by_hand():
    """The answers' first token is the same, so it is supervised for both at one position."""
    micro = LAYOUTS["shared_prefix"].arrange([SINGLE, PAIR], 0, "cpu")
    assert listed(micro) == {
        "tokens": [[8, 9, 1, 2, 3, 4, 5, 6]],
        "positions": [[0, 1, 0, 1, 2, 3, 3, 4]],
        "selected": [0, 3, 4, 3, 4],
        "targets": [9, 3, 4, 3, 5],
        "sequence": [0, 1, 1, 2, 2],
        "lengths": [1, 2, 2],
        "weight": [1.0, 0.5],
    }
    assert micro.segments == Segments((0, 2, 5, 6), (2, 3, 1, 2), (-1, -1, 1, 1))
    assert micro.real.all()


@pytest.mark.parametrize(
    ("sequences", "shared"),
    [
        (([1, 2, 3],), 0),
        (([1, 2, 3], [1, 2, 3]), 2),
        (([1, 2, 3], [1]), 0),
        (([1, 2, 3], [4, 2, 3]), 0),
        (([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 4, 4]), 2),
        (([1, 2, 3, 4], [1, 2]), 1),
    ],
)
def test_every_sequence_keeps_a_token_of_its_own(sequences, shared):
    made = tuple(TokenSequence(tokens, [True] * len(tokens), "completion") for tokens in sequences)
    assert Example(0, made).prefix == shared
    assert Example(0, made[::-1]).prefix == shared


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_examples_make_one_row_of_padding(layout):
    micro = layout.arrange([], 3, "cpu")
    assert micro.tokens.tolist() == [[3, 3]] and not micro.real.any() and layout.size([]) == 2
    assert micro.segments is None
    for empty in (micro.selected, micro.targets, micro.sequence, micro.lengths, micro.weight):
        assert empty.shape == (0,)
    assert micro.selected.dtype == torch.int64 and micro.weight.dtype == torch.float32
    model = build(mistral)
    with layout.attending(model, micro):
        assert model(**micro.inputs).logits.shape[:2] == (1, 2)


SHAPES = st.lists(
    st.tuples(st.integers(0, 14), st.lists(st.integers(1, 12), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(("piece", "call", "most"), [(128, 2000, 1 << 20), (4, 2000, 1 << 20), (6, 20, 30)])
def test_lengths_do_not_matter(piece, call, most, monkeypatch):
    monkeypatch.setattr(blocks_module, "PIECE", piece)
    monkeypatch.setattr(blocks_module, "CALL", call)
    monkeypatch.setattr(blocks_module, "MASK", most)
    model = build(mistral).eval()

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(SHAPES, st.integers(0, 99))
    def check(shapes, seed):
        examples = [example(prompt, each, seed, row) for row, (prompt, each) in enumerate(shapes)]
        expected = alone(model, examples)
        for layout in LAYOUTS.values():
            micro = layout.arrange(examples, 0, "cpu")
            assert micro.tokens.numel() == layout.size(examples)
            assert (
                micro.lengths.tolist() == np.bincount(micro.sequence, minlength=len(micro.lengths)).tolist()
            )
            assert (logp(model, layout, examples) - expected).abs().le(1e-5).all()

    with torch.no_grad():
        check()


def test_a_blocks_mask_goes_by_position():
    block = Block(count=2, queries=2, inherited=3, prefix=np.array([3, 1]))
    seen = block.visible(window=3).astype(int).tolist()
    # Keys: three of the prefix, two own. The first piece's queries stand at 3 and 4, the second's at 1 and 2.
    assert seen == [[[[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]], [[[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]]]
    assert block.visible(None)[0, 0].astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_equal_prefixes_share_a_mask():
    assert Block(5, 2, 3, np.full(5, 3)).visible(None).shape == (1, 1, 2, 5)


def test_a_prompt_is_attended_once():
    prompt, answer = 100, 5
    segments = Segments([0, 100, 105, 110], [prompt, answer, answer, answer], [-1, 0, 0, 0])
    made = plan(segments, torch.device("cpu"))
    assert [(each.count, each.queries, each.inherited) for each in made.blocks] == [(3, 5, 100), (1, 100, 0)]
    assert made.queries[made.back].tolist() == list(range(115))


def test_similar_lengths_share_a_call_and_others_do_not():
    segments = Segments([0, 90, 175, 585], [90, 85, 410, 20], [-1] * 4)
    made = plan(segments, torch.device("cpu"))
    assert sum(each.count * each.queries for each in made.blocks) < 1.1 * 605
    assert max(each.queries for each in made.blocks) == blocks_module.PIECE


def test_examples_of_one_sequence_are_as_packed():
    singles = [Example(row, ragged()[0].sequences[:1]) for row in range(3)]
    one, other = (LAYOUTS[name].arrange(singles, 0, "cpu") for name in ("packed", "shared_prefix"))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.selected, other.selected)
