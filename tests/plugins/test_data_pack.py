from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contexts import FakeContext, catalogue, configured
from helpers.models import as_artifact
from hypothesis import given
from hypothesis import strategies as st

from posttrain.artifacts.kinds import DatasetFacts, Kind, TokenFacts
from posttrain.artifacts.manifest import Artifact
from posttrain.contracts.registration import load_target
from posttrain.contracts.stage import Input, Level, Outcome
from posttrain.contracts.trainer import Example, TokenSequence
from posttrain.errors import DataError
from posttrain_plugins.data.tokens.packing import Piece, best_fit, efficiency, split, wrap
from posttrain_plugins.data.tokens.token_rows import FORMATS, Records, TokenRows, TokenWriter

PIECES = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(PIECES, st.integers(1, 60))
def test_best_fit_loses_nothing_and_overfills_nothing(sizes: list[int], capacity: int):
    bins = best_fit(sizes, capacity)
    assert sorted(item for each in bins for item in each) == list(range(len(sizes)))
    assert all(len(each) == 1 or sum(sizes[item] for item in each) <= capacity for each in bins)


@given(PIECES, st.integers(50, 200))
def test_best_fit_is_as_good_as_a_search_over_all_bins(sizes: list[int], capacity: int):
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if not fitting:
            fitting = [len(rooms)]
            rooms.append(capacity)
        rooms[min(fitting, key=rooms.__getitem__)] -= size
    found = best_fit(sizes, capacity)
    assert sorted(capacity - sum(sizes[item] for item in each) for each in found) == sorted(rooms)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1), st.integers(1, 90))
def test_best_fit_keeps_both_limits(sizes: list[tuple[int, int]], limit: int):
    first, second = zip(*sizes, strict=True)
    bins = best_fit(first, 60, second, limit)
    assert sorted(item for each in bins for item in each) == list(range(len(sizes)))
    for each in bins:
        fits = sum(first[i] for i in each) <= 60 and sum(second[i] for i in each) <= limit
        assert fits or len(each) == 1


def test_best_fit_by_hand():
    assert best_fit([5, 4, 3, 2, 6], 10) == [[4, 1], [0, 2, 3]]
    assert best_fit([12, 3], 10) == [[0], [1]]
    assert best_fit([4, 4, 4, 4], 100, [5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert best_fit([], 10) == []


@given(PIECES, st.integers(1, 20))
def test_split_and_wrap_cut_without_a_gap(lengths: list[int], capacity: int):
    whole = [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    for pieces in (split(lengths, capacity), [p for row in wrap(lengths, capacity) for p in row]):
        assert [(p.document, t) for p in pieces for t in range(p.start, p.stop)] == whole
    rows = wrap(lengths, capacity)
    assert all(sum(p.size for p in row) == capacity for row in rows[:-1])
    assert all(piece.size <= capacity for piece in split(lengths, capacity))


def test_efficiency_is_the_share_of_full_places():
    assert efficiency(30, 4, 10) == 0.75


def document(number: int, prompt: int, answer: int) -> Example:
    tokens = [1000 * number + place for place in range(prompt + answer)]
    learned = [place >= max(prompt, 1) for place in range(prompt + answer)]
    return Example(number, (TokenSequence(tokens, learned, "completion"),), 1.0 + number)


def pair(number: int, chosen: int, rejected: int) -> Example:
    sides = [
        TokenSequence([1000 * number + 500 * side + t for t in range(n)], [t > 0 for t in range(n)], role)
        for side, (n, role) in enumerate([(chosen, "chosen"), (rejected, "rejected")])
    ]
    return Example(number, tuple(sides))


def stored(directory: Path, examples: Sequence[Example], longest: int, format: str = "tokens") -> Artifact:
    """A tokenized dataset in two batches."""
    directory.mkdir()
    with TokenWriter(directory, FORMATS[format]) as writer:
        for part in filter(None, (examples[:2], examples[2:])):
            records = Records(FORMATS[format])
            for example in part:
                records.add([example])
            writer.add(records.batch(), [f"{example.row:016x}" for example in part])
    facts = DatasetFacts(
        format=format, rows=len(examples), tokens=TokenFacts(tokenizer="t", max_length=longest, packed=False)
    )
    return as_artifact(directory, facts, Kind.DATASET)


def packed(directory: Path, data: Artifact, **options: Any) -> tuple[TokenRows, Outcome, FakeContext]:
    stage = catalogue().stage("data.pack")
    context = FakeContext(directory, stage, configured(stage, **options), {"data": [data]})
    outcome = load_target(stage.target)(context)
    return TokenRows(context.output("data")), outcome, context


def held(rows: TokenRows) -> list[list[tuple[int, int]]]:
    """What each row holds: the first token and the length of each sequence."""
    return [
        [(int(s.tokens[0]), len(s.tokens)) for example in row for s in example.sequences]
        for row in rows.examples()
    ]


def labels(rows: TokenRows) -> Counter[tuple[int, bool]]:
    return Counter(
        (int(token), bool(counts))
        for row in rows.examples()
        for example in row
        for sequence in example.sequences
        for token, counts in zip(sequence.tokens, sequence.supervised, strict=True)
    )


def test_best_fit_packs_over_the_whole_dataset_and_keeps_documents_apart(tmp_path: Path):
    sizes = [(2, 3), (1, 3), (1, 2), (1, 1), (2, 4)]
    data = stored(tmp_path / "data", [document(n, *size) for n, size in enumerate(sizes)], 10)
    rows, outcome, context = packed(tmp_path, data)
    assert held(rows) == [[(0, 5), (2000, 3), (3000, 2)], [(1000, 4), (4000, 6)]]
    assert [[example.weight for example in row] for row in rows.examples()] == [[1.0, 3.0, 4.0], [2.0, 5.0]]
    assert labels(rows) == labels(TokenRows(data.path))
    assert list(rows.prompts()) == [
        "0000000000000000 0000000000000002 0000000000000003",
        "0000000000000001 0000000000000004",
    ]
    assert outcome.figures == {
        "rows": 2.0, "documents": 5.0, "efficiency": 1.0, "documents_cut": 0.0, "tokens_lost": 0.0,
        "answer_tokens_lost": 0.0,
    }  # fmt: skip
    assert context.notes == []
    facts = context.result("data").facts
    assert (facts.format, facts.rows, facts.tokens.packed, facts.tokens.max_length) == ("tokens", 2, True, 10)
    assert (facts.tokens.tokenizer, outcome.summary) == (
        "t",
        "5 documents in 2 rows of 10 tokens, 100.0% full",
    )


def test_packed_rows_follow_the_dataset_rather_than_lengths(tmp_path: Path):
    data = stored(tmp_path / "data", [document(n, 1, n + 1) for n in range(6)], 7)
    rows, *_ = packed(tmp_path, data)
    assert [row[0][0] for row in held(rows)] == sorted(row[0][0] for row in held(rows))


def test_pairs_are_packed_whole(tmp_path: Path):
    data = stored(
        tmp_path / "data", [pair(0, 3, 5), pair(1, 4, 2), pair(2, 2, 2), pair(3, 2, 2)], 8, "token_pairs"
    )
    rows, outcome, _ = packed(tmp_path, data, length=14)
    assert rows.roles == ("chosen", "rejected")
    assert held(rows) == [
        [(0, 3), (500, 5), (1000, 4), (1500, 2)],
        [(2000, 2), (2500, 2), (3000, 2), (3500, 2)],
    ]
    assert all(
        [s.role for s in e.sequences] == ["chosen", "rejected"] for row in rows.examples() for e in row
    )
    assert outcome.figures["efficiency"] == 22 / 28


def test_best_fit_refuses_to_cut(tmp_path: Path):
    data = stored(tmp_path / "data", [document(0, 1, 2), document(1, 1, 9)], 10)
    with pytest.raises(DataError, match="longer than a row") as caught:
        packed(tmp_path, data, length=8)
    assert (caught.value.where, caught.value.found) == ("row 2", "10 tokens")


def test_split_keeps_every_token_and_label_of_texts(tmp_path: Path):
    data = stored(tmp_path / "data", [document(n, 0, size) for n, size in enumerate([7, 3, 12, 2])], 12)
    rows, outcome, context = packed(tmp_path, data, strategy="split", length=5)
    assert labels(rows) == labels(TokenRows(data.path))
    assert all(sum(size for _, size in row) <= 5 for row in held(rows))
    assert (outcome.figures["documents_cut"], outcome.figures["tokens_lost"]) == (2.0, 0.0)
    # 7 = 5 + 2 and 12 = 5 + 5 + 2: three pieces begin with a token that nothing predicts.
    assert outcome.figures["answer_tokens_lost"] == 3.0
    assert context.warnings[0].startswith("2 of 4 documents were cut; 0 tokens are left out, and 3 tokens")
    assert context.result("data").facts.tokens.max_length == 5


def test_a_tail_without_its_prompt_is_made_only_when_asked_for(tmp_path: Path):
    data = stored(tmp_path / "data", [document(0, 3, 6), document(1, 1, 2)], 9)
    rows, outcome, _ = packed(tmp_path / "a", data, strategy="split", length=5)
    assert held(rows) == [[(0, 5)], [(1000, 3)]]
    assert (outcome.figures["tokens_lost"], outcome.figures["answer_tokens_lost"]) == (4.0, 4.0)
    rows, outcome, _ = packed(tmp_path / "b", data, strategy="split", length=5, orphans=True)
    assert held(rows) == [[(0, 5)], [(5, 4)], [(1000, 3)]]
    assert labels(rows) == labels(TokenRows(data.path))
    assert (outcome.figures["tokens_lost"], outcome.figures["answer_tokens_lost"]) == (0.0, 1.0)


def test_a_prompt_that_is_longer_than_a_row_takes_no_place(tmp_path: Path):
    data = stored(tmp_path / "data", [document(0, 6, 3), document(1, 1, 2)], 9)
    rows, outcome, _ = packed(tmp_path, data, strategy="split", length=5)
    assert held(rows) == [[(1000, 3)]]
    assert (outcome.figures["documents_cut"], outcome.figures["answer_tokens_lost"]) == (1.0, 3.0)


def test_wrap_fills_every_row_and_leaves_out_what_teaches_nothing(tmp_path: Path):
    data = stored(tmp_path / "data", [document(n, 0, size) for n, size in enumerate([7, 3, 12, 2])], 12)
    rows, outcome, _ = packed(tmp_path, data, strategy="wrap", length=6)
    # The seventh token of the first document stands alone in the second row, so that nothing predicts it.
    assert held(rows) == [[(0, 6)], [(1000, 3), (2000, 2)], [(2002, 6)], [(2008, 4), (3000, 2)]]
    assert (outcome.figures["efficiency"], outcome.figures["tokens_lost"]) == (23 / 24, 1.0)


def test_wrap_does_not_part_an_answer_from_its_prompt_unasked(tmp_path: Path):
    data = stored(tmp_path / "data", [document(0, 1, 5), document(1, 2, 3)], 6)
    with pytest.raises(DataError, match="part an answer from its prompt") as caught:
        packed(tmp_path / "a", data, strategy="wrap", length=8)
    assert caught.value.where == "row 2"
    rows, *_ = packed(tmp_path / "b", data, strategy="wrap", length=8, orphans=True)
    assert held(rows) == [[(0, 6)], [(1002, 3)]]


def findings(facts: DatasetFacts, **options: Any) -> list[tuple[Level, str]]:
    stage = catalogue().stage("data.pack")
    inputs = {"data": [Input("tokens.data", Kind.DATASET, facts)]}
    return [(each.level, each.message) for each in stage.check(configured(stage, **options), inputs)]


def test_what_cannot_be_packed_is_found_while_planning():
    pairs = DatasetFacts(format="token_pairs", tokens=TokenFacts(max_length=8, packed=False))
    assert findings(pairs) == []
    ((level, message),) = findings(pairs, strategy="split")
    assert level is Level.ERROR and "both sides of a pair" in message
    ((level, message),) = findings(
        DatasetFacts(format="tokens", tokens=TokenFacts(max_length=8, packed=True))
    )
    assert level is Level.ERROR and "packed already" in message
    ((level, message),) = findings(DatasetFacts(format="tokens", tokens=TokenFacts(packed=False)))
    assert level is Level.ERROR and "how long" in message
    ((level, message),) = findings(
        DatasetFacts(format="tokens", tokens=TokenFacts(max_length=8, packed=False)), length=6
    )
    assert level is Level.WARNING and "documents of 8" in message


def test_a_damaged_file_is_an_error(tmp_path: Path):
    (tmp_path / "tokens.arrow").write_bytes(b"ARROW1\0\0rubbish")
    with pytest.raises(DataError, match="cannot be read"):
        TokenRows(tmp_path)


def test_a_piece_knows_its_size():
    assert Piece(3, 4, 9).size == 5
