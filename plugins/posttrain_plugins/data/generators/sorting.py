"""A seeded task in plain words, for models that already speak: put words into alphabetical order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from posttrain.contracts.component import Config
from posttrain.errors import DataError

WORDS = tuple(
    """
    apple bag ball bear bed bird boat book box bread bridge bus cake candle car cat chair clock cloud coat
    coin cup desk dog door dress drum duck ear egg eye farm fish flag flower fork fox frog garden gate glass
    goat gold grass hand hat hill horse house ice island jar key king kite knife lake lamp leaf lemon lion
    map milk mirror moon mouse nail nest net night nose ocean onion orange oven owl paper park pear pen
    piano pig pillow pin plate pond queen rain ring river road robe roof rope rose sail salt sand ship shoe
    snow soap sock sofa song spoon star stone sun table tent tiger train tree truck vase violin wall watch
    water well wheel wind window wolf yard zebra
    """.split()  # noqa: SIM905 - a word list reads best as text
)


class SortWordsConfig(Config):
    """The lists to sort."""

    words: int = Field(default=3, ge=2, le=8, description="words in each list, all different")


class SortWords:
    """Sort a short list of common words: `pear, fig, apple` is answered with `apple, fig, pear`."""

    config = SortWordsConfig
    format = "prompt_completion"
    columns = ("prompt", "completion", "answer")

    def __call__(self, config: SortWordsConfig, rows: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield `rows` rows with different prompts.

        Raises:
            DataError: There are not that many lists.
        """
        room = math.perm(len(WORDS), config.words)
        if rows * 2 > room:
            raise DataError(
                f"`sort_words` cannot draw {rows} different lists",
                found=f"{room} possible lists",
                fix=f"ask for at most {room // 2} rows, or give it more `words`",
            )
        draw, seen = random.Random(seed), set[tuple[str, ...]]()
        while len(seen) < rows:
            words = tuple(draw.sample(WORDS, config.words))
            if words not in seen:
                seen.add(words)
                yield _row(words)


def _row(words: tuple[str, ...]) -> dict[str, Any]:
    answer = ", ".join(sorted(words))
    question = (
        f"Sort these words alphabetically, separated by commas, and say nothing else: {', '.join(words)}"
    )
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
        "answer": answer,
    }
