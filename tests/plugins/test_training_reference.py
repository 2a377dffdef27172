from __future__ import annotations

import tracemalloc
from array import array
from dataclasses import replace

from posttrain.contracts.trainer import Example, TokenSequence
from posttrain_plugins.training.reference import reference_identity


def examples() -> list[Example]:
    return [
        Example(
            row,
            tuple(TokenSequence([4, 5, row], [False, True, True], role) for role in ("chosen", "rejected")),
        )
        for row in range(3)
    ]


def identity(rows: list[Example], policy: str = "p", **options: object) -> str:
    return reference_identity(policy, rows, options)


def test_the_identity_tells_apart_what_the_log_probs_depend_on():
    rows = examples()
    first, *others = rows
    chosen, rejected = first.sequences
    changed = [
        identity(rows, "q"),
        identity(rows, seed=1),
        identity([replace(first, row=9), *others]),
        identity(rows[1:]),
        identity([replace(first, sequences=(rejected, replace(chosen, tokens=[4, 5, 6]))), *others]),
        identity(
            [replace(first, sequences=(replace(chosen, supervised=[False, False, True]), rejected)), *others]
        ),
        # Where one sequence ends and the next begins counts.
        identity(
            [
                replace(
                    first,
                    sequences=(
                        TokenSequence([4, 5, 0, 4], [0] * 4, "c"),
                        TokenSequence([5, 0], [0] * 2, "r"),
                    ),
                ),
                *others,
            ]
        ),
    ]
    assert len({identity(rows), *changed}) == len(changed) + 1
    assert identity(rows) == identity(examples())


def test_the_identity_does_not_depend_on_how_tokens_are_held():
    rows = examples()
    compact = [
        replace(
            row,
            sequences=tuple(
                TokenSequence(array("i", each.tokens), bytearray(map(int, each.supervised)), each.role)
                for each in row.sequences
            ),
        )
        for row in rows
    ]
    assert identity(rows) == identity(compact)


def test_the_identity_takes_no_memory_that_grows_with_the_dataset():
    tokens, supervised = array("i", range(1000)), bytearray([0, *[1] * 999])
    rows = [Example(row, (TokenSequence(tokens, supervised, "chosen"),)) for row in range(500)]
    tracemalloc.start()
    identity(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
