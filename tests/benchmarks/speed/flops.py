"""The operations that a training step cannot do without, counted from lengths and shapes.

A multiplication and an addition are two operations. A matrix of P elements costs 2·P a token forwards, as much
for the gradient of its input and as much for its own gradient. Counted are: the body once for each real token,
where the sides of a pair share the tokens of their prompt; causal attention without the masked half; the head at
the positions that predict supervised tokens alone. Norms, activations, the loss and the optimizer are not
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scenarios import Shape

SIDES = {"sft": ("completion",), "dpo": ("chosen", "rejected")}


@dataclass(frozen=True)
class Work:
    """Sums over rows.

    Args:
        tokens: Real tokens; a prompt that both sides of a pair share counts once.
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


def work_of(row: Mapping[str, str], objective: str) -> Work:
    """Count one row; every word is a token, and an end token closes each answer."""
    prompt = len(row["prompt"].split())
    answers = [len(row[side].split()) + 1 for side in SIDES[objective]]
    attended = prompt * (prompt + 1) // 2
    attended += sum(answer * prompt + answer * (answer + 1) // 2 for answer in answers)
    return Work(prompt + sum(answers), sum(prompt + answer for answer in answers), attended, sum(answers))


def total(rows: Iterable[Mapping[str, str]], objective: str) -> Work:
    """Count several rows."""
    return sum((work_of(row, objective) for row in rows), Work())


def forward(shape: Shape, work: Work) -> float:
    """Operations of one forward pass."""
    attention = 4.0 * work.attended * shape.width * shape.layers
    return 2.0 * shape.body * work.tokens + attention + 2.0 * shape.vocabulary * shape.width * work.supervised


def necessary(shape: Shape, work: Work, objective: str, lora: bool) -> float:
    """Operations of a step and, for preferences, of its share of the pass over the reference.

    Frozen matrices need no gradient of their own; the adapters' are too small to count.
    """
    once = forward(shape, work)
    matrices = once - 4.0 * work.attended * shape.width * shape.layers
    training = 3.0 * once - (matrices if lora else 0.0)
    return training + (once if objective == "dpo" else 0.0)
