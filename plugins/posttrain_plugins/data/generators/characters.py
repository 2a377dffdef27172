"""Seeded tasks that need no download: small enough to learn on a CPU, with answers that can be checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, PositiveInt, model_validator

from posttrain.contracts.component import Config
from posttrain.errors import DataError
from posttrain_plugins.data.generators.sorting import SortWords
from posttrain_plugins.data.generators.steps import RunningSum

_FORMAT = "prompt_completion"
_COLUMNS = ("prompt", "completion", "answer")


class StringsConfig(Config):
    """Strings to reverse."""

    min_length: PositiveInt = Field(default=3, description="shortest string, in characters")
    max_length: PositiveInt = Field(default=6, description="longest string")
    alphabet: str = Field(default="abcdefgh", min_length=1, description="the characters they are made of")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is above max_length {self.max_length}")
        if len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError("alphabet names a character twice")
        if self.alphabet != "".join(self.alphabet.split()):
            raise ValueError("alphabet must hold no white space: chat templates may trim it")
        return self


class ReverseConfig(StringsConfig):
    """The strings to reverse, and how well."""

    careless: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="the share of completions in which two neighbouring letters are swapped, like "
        "demonstrations of mixed quality; `answer` stays right",
    )


class Reverse:
    """Reverse a string: `abc` is answered with `cba`. Lengths are drawn evenly while strings last."""

    config = ReverseConfig
    format = _FORMAT
    columns = _COLUMNS

    def __call__(self, config: ReverseConfig, rows: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield `rows` rows with different prompts.

        Raises:
            DataError: There are not that many strings.
        """
        size = len(config.alphabet)
        lengths = {length: size**length for length in range(config.min_length, config.max_length + 1)}
        _require_room("reverse", rows, sum(lengths.values()), "a larger `max_length` or `alphabet`")
        draw = random.Random(seed)
        drawn = {length: _Distinct(draw, count) for length, count in lengths.items()}
        for _ in range(rows):
            length = draw.choice([length for length, numbers in drawn.items() if numbers.left])
            text = _spell(drawn[length].next(), length, config.alphabet)
            answer = text[::-1]
            careless = config.careless > 0 and draw.random() < config.careless
            yield _row(text, answer, _with_slip(answer, draw) if careless else answer)


class ReversePairs:
    """Reverse a string: the reversal is chosen, and one in which two neighbouring letters are swapped is rejected.

    Where all letters are the same, the rejected answer has one too many.
    """

    config = StringsConfig
    format = "preference"
    columns = ("prompt", "chosen", "rejected", "answer")

    def __call__(self, config: StringsConfig, rows: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield `rows` rows with different prompts.

        Raises:
            DataError: There are not that many strings.
        """
        careless = ReverseConfig(**config.model_dump(), careless=1.0)
        for row in Reverse()(careless, rows, seed):
            answer, slip = row["answer"], row["completion"][0]["content"]
            rejected = answer + answer[0] if slip == answer else slip
            yield {
                "prompt": row["prompt"],
                "chosen": [{"role": "assistant", "content": answer}],
                "rejected": [{"role": "assistant", "content": rejected}],
                "answer": answer,
            }


class AdditionConfig(Config):
    """The numbers to add."""

    digits: int = Field(default=2, ge=1, le=18, description="digits of each number, leading zeros included")


class Addition:
    """Add two numbers whose digits are written lowest first: `21+43` (12 + 34) is answered with `64` (46)."""

    config = AdditionConfig
    format = _FORMAT
    columns = _COLUMNS

    def __call__(self, config: AdditionConfig, rows: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield `rows` rows with different prompts.

        Raises:
            DataError: There are not that many sums.
        """
        base = 10**config.digits
        _require_room("addition", rows, base * base, "more `digits`")
        numbers = _Distinct(random.Random(seed), base * base)
        for _ in range(rows):
            left, right = divmod(numbers.next(), base)
            width = config.digits
            yield _row(f"{_reversed(left, width)}+{_reversed(right, width)}", str(left + right)[::-1])


class _Distinct:
    """Different numbers below `count`, in random order: a shuffle that only stores what it has drawn."""

    def __init__(self, draw: random.Random, count: int) -> None:
        self._draw = draw
        self._moved: dict[int, int] = {}
        self.left = count

    def next(self) -> int:
        chosen = self._draw.randrange(self.left)
        self.left -= 1
        number = self._moved.get(chosen, chosen)
        self._moved[chosen] = self._moved.pop(self.left, self.left)
        return number


def _require_room(name: str, rows: int, available: int, remedy: str) -> None:
    if rows > available:
        raise DataError(
            f"`{name}` cannot make {rows} different prompts",
            found=f"{available} possible prompts",
            fix=f"ask for at most {available} rows, or give it {remedy}",
        )


def _spell(number: int, length: int, alphabet: str) -> str:
    letters = []
    for _ in range(length):
        number, letter = divmod(number, len(alphabet))
        letters.append(alphabet[letter])
    return "".join(letters)


def _reversed(number: int, width: int) -> str:
    return f"{number:0{width}d}"[::-1]


def _with_slip(answer: str, draw: random.Random) -> str:
    """Swap two neighbouring letters that differ; an answer without such a pair stays as it is."""
    places = [at for at in range(len(answer) - 1) if answer[at] != answer[at + 1]]
    if not places:
        return answer
    at = draw.choice(places)
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def _row(prompt: str, answer: str, completion: str | None = None) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": answer if completion is None else completion}],
        "answer": answer,
    }


BUILT_IN: dict[str, type[Any]] = {
    "reverse": Reverse,
    "reverse_pairs": ReversePairs,
    "addition": Addition,
    "sort_words": SortWords,
    "running_sum": RunningSum,
}
"""Those whose rows can be made while planning."""
