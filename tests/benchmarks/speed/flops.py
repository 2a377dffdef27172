"""The operations that a training step cannot do without, counted from lengths and shapes.

A multiplication and an addition are two operations. A matrix of P elements costs 2·P a token forwards, as much
for the gradient of its input and as much for its own gradient. Counted are: the body once for each real token,
where the answers to a prompt share its tokens; causal attention without the masked half; the head at the positions
that predict supervised tokens alone. Norms, activations, the loss, the head of a reward model and the optimizer are
not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objectives import Objective
from scenarios import Shape


@dataclass(frozen=True)
class Work:
    """Sums over rows.

    Args:
        tokens: Real tokens; a prompt that several answers share counts once.
        rows: Real tokens of the sequences as they are, shared prompts in each.
        attended: Pairs of tokens of which one attends to the other, itself included.
        supervised: Tokens that need a distribution over the vocabulary.
    """

    tokens: int = 0
    rows: int = 0
    attended: int = 0
    supervised: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.rows + other.rows,
            self.attended + other.attended,
            self.supervised + other.supervised,
        )


def work_of(row: Mapping[str, Any], columns: Sequence[str]) -> Work:
    """Count one row with the answers in some columns; every word is a token, and an end token closes each answer."""
    prompt = len(row["prompt"].split())
    answers = [len(row[column].split()) + 1 for column in columns]
    attended = prompt * (prompt + 1) // 2
    attended += sum(answer * prompt + answer * (answer + 1) // 2 for answer in answers)
    return Work(prompt + sum(answers), sum(prompt + answer for answer in answers), attended, sum(answers))


def total(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Work:
    """Count several rows."""
    return sum((work_of(row, columns) for row in rows), Work())


def forward(shape: Shape, work: Work) -> float:
    """Operations of one forward pass."""
    attention = 4.0 * work.attended * shape.width * shape.layers
    return 2.0 * shape.body * work.tokens + attention + 2.0 * shape.vocabulary * shape.width * work.supervised


def necessary(shape: Shape, rows: Sequence[Mapping[str, Any]], objective: Objective, lora: bool) -> float:
    """Operations of the steps over some rows, and of their share of the pass over the reference.

    Answers that are only measured need no gradient. Frozen matrices need none of their own; the adapters' are too
    small to count.
    """
    learned = _work(rows, objective, objective.learned)
    once = forward(shape, learned)
    every = forward(shape, _work(rows, objective, (*objective.learned, *objective.measured)))
    matrices = once - 4.0 * learned.attended * shape.width * shape.layers
    training = 2.0 * once + every - (matrices if lora else 0.0)
    return training + (every if objective.referenced else 0.0)


def _work(rows: Sequence[Mapping[str, Any]], objective: Objective, columns: Sequence[str]) -> Work:
    work = total(rows, columns)
    return replace(work, supervised=0) if objective.judged else work
