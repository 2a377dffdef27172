from __future__ import annotations

from pathlib import Path

import pytest
from helpers.looking import model_at, shown, turns
from helpers.tokenizers_of_all_kinds import KINDS

from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import TokenSequence
from posttrain_plugins.inspection.pieces import cut_off, located, pieces_of
from posttrain_plugins.inspection.views import Look, Piece, Side
from posttrain_plugins.templates.encoder import Encoder

ANSWERS = ["It said: look it up!", "привет 👍 שלום", "  edges\n", "The quick brown fox"]


def side(encoder: Encoder, passage: Passage) -> tuple[str, Side, TokenSequence]:
    (encoded,) = encoder.encode([passage])
    sequence = TokenSequence(encoded.tokens, encoded.supervised, passage.role, encoded.straddling)
    reading = encoder.read(passage)
    return (
        reading.text,
        Side("completion", pieces_of(encoder, reading.text, reading.spans, sequence, sequence)),
        sequence,
    )


@pytest.fixture(scope="module", params=sorted(KINDS))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder.open(model_at(tmp_path_factory.mktemp(request.param), request.param, bos=True))


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_pieces_are_the_text_and_the_tokens_of_training(encoder: Encoder, answer: str) -> None:
    for passage in (
        Passage("completion", None, turns("user word", answer, "καλημέρα", "ok")),
        Passage("completion", "The quick ", answer),
        Passage("completion", None, answer),
        Passage("completion", turns("привет"), [{"role": "assistant", "content": answer}]),
    ):
        text, seen, sequence = side(encoder, passage)
        assert "".join(piece.text for piece in seen.pieces) == text
        tokens = [piece for piece in seen.pieces if piece.id is not None]
        assert [piece.id for piece in tokens] == list(sequence.tokens)
        assert [piece.supervised for piece in tokens] == [
            bool(counts) and at > 0 for at, counts in enumerate(sequence.supervised)
        ]
        assert seen.counts["straddling"] == sequence.straddling


def test_what_is_learned_is_the_answer_and_its_end(tmp_path: Path) -> None:
    encoder = Encoder.open(model_at(tmp_path))
    passage = Passage("completion", None, turns("Look it up", "It said: word", "And?", "name 👍"))
    _, seen, _ = side(encoder, passage)
    assert shown(seen, Look.LEARNED) == "It said: word<|im_end|>name 👍<|im_end|>"
    ends = [piece for piece in seen.pieces if piece.text == "<|im_end|>"]
    assert [piece.special for piece in ends] == [True] * 4
    assert [piece.supervised for piece in ends] == [False, True, False, True]


def test_a_first_token_and_an_end_token_stand_in_no_text(tmp_path: Path) -> None:
    encoder = Encoder.open(model_at(tmp_path, bos=True))
    _, seen, _ = side(encoder, Passage("completion", "The quick", " brown fox"))
    first, last = seen.pieces[0], seen.pieces[-1]
    assert (first.text, first.shown, first.special, first.supervised) == ("", "<s>", True, False)
    assert (last.text, last.shown, last.supervised) == ("", "<|im_end|>", True)


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    encoder = Encoder.open(model_at(tmp_path))
    text, seen, sequence = side(encoder, Passage("completion", None, "ꙮ"))
    assert text == "ꙮ"
    assert [piece.text for piece in seen.pieces] == ["ꙮ", *[""] * (len(sequence.tokens) - 1)]
    assert len(sequence.tokens) > 2


def test_tokens_that_the_text_does_not_explain_are_placed_by_what_they_spell(tmp_path: Path) -> None:
    encoder = Encoder.open(model_at(tmp_path))
    plain = encoder.files.plain
    letters = [plain.encode(letter).ids[0] for letter in "word"]
    image = plain.token_to_id("<|im_start|>")
    before, after = plain.encode("The ").ids, plain.encode(" fox").ids
    tokens = [*before, *letters, image, image, image, *after]
    text = "The word fox"
    places = located(encoder, text, tokens)
    assert "".join(text[start:end] for start, end in places) == text
    assert [text[start:end] for start, end in places[len(before) : len(before) + 7]] == [*"word", "", "", ""]


@pytest.mark.parametrize(
    ("kept", "cut"),
    [
        ([1, 2, 3, 4, 5], []),
        ([1, 2, 3], [3, 4]),
        ([3, 4, 5], [0, 1]),
        ([1, 4, 5], [1, 2]),
    ],
)
def test_what_truncation_took(kept: list[int], cut: list[int]) -> None:
    whole = TokenSequence([1, 2, 3, 4, 5], bytes(5), "completion")
    assert list(cut_off(whole, TokenSequence(kept, bytes(len(kept)), "completion"))) == cut


def test_what_truncation_took_of_tokens_that_repeat() -> None:
    whole = TokenSequence([7, 7, 7, 7, 1], bytes(5), "completion")
    gone = cut_off(whole, TokenSequence([7, 7, 1], bytes(3), "completion"))
    assert [token for at, token in enumerate(whole.tokens) if at not in gone] == [7, 7, 1]


def test_looks() -> None:
    assert Piece("a", 1, "a").look is Look.GIVEN
    assert Piece("a", 1, "a", supervised=True).look is Look.LEARNED
    assert Piece("a", 1, "a", straddling=True).look is Look.STRADDLING
    assert Piece("a", None, "").look is Look.LOOSE
    assert Piece("a", 1, "a", supervised=True, cut=True).look is Look.CUT
