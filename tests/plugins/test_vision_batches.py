"""What the model sees of a row with images does not depend on the rows beside it, nor on how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.vision import FAMILIES, picture, write_model

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.data.images.gallery import Gallery
from posttrain_plugins.data.images.image import Image
from posttrain_plugins.models.mode import evaluating
from posttrain_plugins.models.policy import load_model
from posttrain_plugins.preparation.truncation import shortened
from posttrain_plugins.templates.encoder import Encoded, Encoder
from posttrain_plugins.training.batches import PIECE, probe
from posttrain_plugins.training.head import AnalyticHead, FullHead, Wanted, choose_head
from posttrain_plugins.training.layouts import LAYOUTS, choose_layout
from posttrain_plugins.training.layouts.choice import why_not

EXACT = 1e-5
SIZES = [(40, 30), (60, 20), (20, 50), (28, 28), (40, 30)]


@dataclass(frozen=True)
class Eye:
    """A tiny model with some images."""

    model: Any
    encoder: Encoder
    images: Sequence[Image]

    def sequence(self, question: Sequence[Any], answer: str, role: str = "completion") -> TokenSequence:
        """Encode a turn; numbers in the question stand for images."""
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in question
        ]
        images = [self.images[part] for part in question if isinstance(part, int)]
        prompt = [{"role": "user", "content": parts}]
        (found,) = self.encoder.encode([Passage(role, prompt, answer, images=images)])
        assert isinstance(found, Encoded), found
        return TokenSequence(found.tokens, found.supervised, role, images=found.images)


@pytest.fixture(scope="module", params=FAMILIES)
def eye(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eye:
    root = tmp_path_factory.mktemp(request.param)
    directory = write_model(root / "model", request.param)
    gallery = Gallery(root)
    images = [Image.of(gallery.take(picture(*size, seed)), root) for seed, size in enumerate(SIZES)]
    return Eye(load_model(directory, "float32"), Encoder.open(directory), images)


def rows(eye: Eye) -> list[Example]:
    """One image, several images, the same image again, no image; of ragged lengths."""
    sequences = [
        eye.sequence([0, "What is in this picture?"], "A cat"),
        eye.sequence(
            ["Look at both of them: ", 1, " and ", 2, ", compare"], "two cats and a dog; nothing else"
        ),
        eye.sequence(["What?"], "nothing else"),
        eye.sequence([2, "red?"], "A red square on a blue ground"),
        eye.sequence([3, 0], "no"),
    ]
    return [Example(row, (sequence,)) for row, sequence in enumerate(sequences)]


def pairs(eye: Eye) -> list[Example]:
    """Pairs that share an image, and one without."""
    questions = [[0, "What is in this picture?"], ["What?"], [1, 2]]
    return [
        Example(
            row,
            (
                eye.sequence(question, "A red square", "chosen"),
                eye.sequence(question, "A blue dog, two cats", "rejected"),
            ),
        )
        for row, question in enumerate(questions)
    ]


def log_probs(eye: Eye, layout: str, examples: Sequence[Example]) -> torch.Tensor:
    arranged = LAYOUTS[layout].arrange(examples, 0, "cpu")
    with evaluating(eye.model), LAYOUTS[layout].attending(eye.model, arranged):
        return FullHead()(eye.model, arranged, Wanted()).logp


def alone(eye: Eye, examples: Sequence[Example]) -> torch.Tensor:
    singles = [Example(0, (sequence,)) for example in examples for sequence in example.sequences]
    return torch.cat([log_probs(eye, "padded", [single]) for single in singles])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("examples", [rows, pairs])
def test_a_row_among_others_is_the_row_alone(eye: Eye, layout: str, examples: Any) -> None:
    given = examples(eye)
    torch.testing.assert_close(log_probs(eye, layout, given), alone(eye, given), rtol=0, atol=EXACT)


def test_the_model_looks_at_the_image(eye: Eye) -> None:
    """Another image of the same size, another log-prob: or the test above would compare texts."""
    (example,) = rows(eye)[:1]
    (sequence,) = example.sequences
    other = replace(sequence.images[0], image=eye.images[4])
    changed = replace(example, sequences=(replace(sequence, images=(other,)),))
    difference = log_probs(eye, "padded", [changed]) - log_probs(eye, "padded", [example])
    assert difference.abs().max() > 100 * EXACT


def test_the_order_of_images_counts(eye: Eye) -> None:
    """Two images of one size give the same tokens in either order, but not the same answer."""
    one, other = (Example(0, (eye.sequence([*order, "?"], "A cat"),)) for order in ([0, 4], [4, 0]))
    assert one.sequences[0].tokens == other.sequences[0].tokens
    difference = log_probs(eye, "padded", [one]) - log_probs(eye, "padded", [other])
    assert difference.abs().max() > 100 * EXACT


def test_answers_as_the_plain_model_gives_them(eye: Eye) -> None:
    """The row alone agrees with transformers' own call, positions on several axes left to the model."""
    (example,) = rows(eye)[1:2]
    (sequence,) = example.sequences
    micro = LAYOUTS["padded"].arrange([example], 0, "cpu")
    inputs = {name: value for name, value in micro.inputs.items() if name != "position_ids"}
    placeholder = eye.encoder.expansion.placeholder  # type: ignore[union-attr]
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (micro.tokens == placeholder).int()
    with evaluating(eye.model):
        logits = eye.model(**inputs, attention_mask=torch.ones_like(micro.tokens)).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, micro.tokens[0, 1:, None])[:, 0]
    counts = torch.tensor([bool(each) for each in sequence.supervised[1:]])
    torch.testing.assert_close(log_probs(eye, "padded", [example]), expected[counts], rtol=0, atol=EXACT)


def test_no_image_token_is_predicted(eye: Eye) -> None:
    micro = LAYOUTS["packed"].arrange(rows(eye), 0, "cpu")
    assert eye.encoder.expansion is not None
    assert eye.encoder.expansion.placeholder not in micro.targets


def test_without_images_the_model_is_called_as_ever(eye: Eye) -> None:
    micro = LAYOUTS["padded"].arrange(rows(eye)[2:3], 0, "cpu")
    assert micro.pixels is None and set(micro.inputs) == {"input_ids", "use_cache"}


def test_the_fast_head_and_every_layout_pass_the_trial(eye: Eye) -> None:
    tried = probe(rows(eye))
    head, told = choose_head(eye.model, LAYOUTS["padded"].arrange(tried, 0, "cpu"), 1e-4)
    assert isinstance(head, AnalyticHead) and told is None
    for layout in LAYOUTS.values():
        assert why_not(eye.model, layout, probe(pairs(eye)), 1e-4) is None
    chosen, told = choose_layout(eye.model, [rows(eye)], tried, 1e-4)
    assert told is None and chosen.name in LAYOUTS


def test_the_trial_has_a_row_with_an_image(eye: Eye) -> None:
    """Even where the shortest rows have none; of a long row it is a piece, from the last image on."""
    short = [replace(rows(eye)[2], row=row) for row in range(5)]
    long = eye.sequence(["What? " * 40, 1, "in the middle", 0, "and? "], "A red square; " * 40)
    *texts, seen = probe([*short, Example(9, (long,))])
    assert len(texts) == 1
    (piece,) = seen.sequences
    (placed,) = piece.images
    last = long.images[-1]
    assert placed.image == last.image and placed.start == 0
    assert list(piece.tokens) == list(long.tokens[last.start : last.start + len(piece.tokens)])
    assert placed.end + PIECE <= len(piece.tokens) < placed.end + 3 * PIECE
    assert piece.predicted > 0


@pytest.mark.parametrize("policy", ["keep_start", "keep_end"])
def test_truncation_never_cuts_an_image(eye: Eye, policy: str) -> None:
    """A limit for every length: what stays holds all of its images, or the row is dropped with the reason."""
    sequence = eye.sequence(["What? ", 0, " in this", 3, "picture?"], "A red square on a blue ground")
    example, kept = Example(0, (sequence,)), 0
    for limit in range(1, len(sequence.tokens)):
        found = shortened(example, limit, policy, None)
        if isinstance(found, str):
            continue
        kept += 1
        (short,) = found.sequences
        assert len(short.tokens) <= limit and len(short.images) == 2
        for before, after in zip(sequence.images, short.images, strict=True):
            assert list(short.tokens[after.start : after.end]) == list(
                sequence.tokens[before.start : before.end]
            )
        given = LAYOUTS["padded"].arrange([found], 0, "cpu")
        with evaluating(eye.model):
            eye.model(**given.inputs)
    assert kept


def test_positions_on_several_axes_by_hand(tmp_path: Path) -> None:
    """Three words, 2 rows of 3, one word: rows and columns count on from 3, and the text from 3 + 3."""
    directory = write_model(tmp_path / "model", "qwen2_5_vl")
    encoder = Encoder.open(directory)
    assert encoder.expansion is not None
    image = Image.of(Gallery(tmp_path).take(picture(42, 28)), tmp_path)
    pad = encoder.expansion.placeholder
    found = encoder.expansion.expand(Encoded([1, 2, 3, pad, 4], [False] * 4 + [True]), [image])
    example = Example(0, (TokenSequence(found.tokens, found.supervised, "completion", images=found.images),))
    positions = LAYOUTS["padded"].arrange([example], 0, "cpu").inputs["position_ids"]
    assert positions[:, 0].tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6],
    ]
    packed = LAYOUTS["packed"].arrange([example, example], 0, "cpu").inputs["position_ids"]
    assert packed[0, 0].tolist() == [*range(10), *range(10)]
    assert packed[1:, 0].tolist() == [[*row, *row] for row in positions[:, 0].tolist()]
