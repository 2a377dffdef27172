"""UltraFeedback: an instruction with several completions and their ratings (Cui et al., arXiv 2310.01377)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.contracts.format import Column, Row
from posttrain_plugins.data.formats.foreign import Foreign, Misshapen, demand
from posttrain_plugins.data.formats.passages import others
from posttrain_plugins.data.formats.preference import Preference
from posttrain_plugins.data.formats.schema import holds

_TEXTS = ("response", "completion", "text", "content")
_SCORES = ("overall_score", "rating", "score")


class UltraFeedback(Foreign):
    """`instruction` and `completions`, a list of objects with a text (`response`) and a score (`overall_score`).

    The best completion is preferred to the worst; the first of equals stands for them. Where all are equal, nothing
    can be learned and the row is left out. The scores travel along as `score_chosen` and `score_rejected`.
    """

    columns = ("instruction", "completions")
    optional = ("system",)
    becomes = "preference"
    canonical = Preference

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Lists of completions with something that can be a score."""
        found = schema.get("completions")
        return (
            super().fits(schema)
            and holds(schema, "completions", "list")
            and found is not None
            and bool(found.keys & set(_SCORES))
        )

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the best and the worst completion as a pair."""
        instruction, completions = row["instruction"], row["completions"]
        demand(isinstance(instruction, str) and bool(instruction.strip()), "`instruction` is no text")
        demand(
            isinstance(completions, list) and bool(completions), "`completions` is not a list of completions"
        )
        scored = [_scored(one, number) for number, one in enumerate(completions, 1)]
        best = max(scored, key=lambda each: each[1])
        worst = min(scored, key=lambda each: each[1])
        if best[1] == worst[1]:
            return
        yield others(row, *self.columns) | {
            "prompt": [{"role": "user", "content": instruction}],
            "chosen": [{"role": "assistant", "content": best[0]}],
            "rejected": [{"role": "assistant", "content": worst[0]}],
            "score_chosen": best[1],
            "score_rejected": worst[1],
        }


def _scored(completion: Any, number: int) -> tuple[str, float]:
    """Return the text and the score of one completion."""
    where = f"`completions` entry {number}"
    demand(isinstance(completion, Mapping), f"{where} is {type(completion).__name__}, not an object")
    text = next((completion[key] for key in _TEXTS if isinstance(completion.get(key), str)), None)
    score = next((completion[key] for key in _SCORES if completion.get(key) is not None), None)
    if text is None:
        raise Misshapen(f"{where} has no text; it needs one of {', '.join(_TEXTS)}")
    try:
        number_of = float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise Misshapen(f"{where} has no score; it needs a number as one of {', '.join(_SCORES)}") from error
    demand(math.isfinite(number_of), f"{where} has the score {score}")
    return text, number_of
