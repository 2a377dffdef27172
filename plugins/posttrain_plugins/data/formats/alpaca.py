"""Alpaca: an instruction, what it is about, and the answer (https://crfm.stanford.edu/2023/03/13/alpaca.html)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.contracts.format import Column, Row
from posttrain_plugins.data.formats.foreign import Foreign, Misshapen, demand, string
from posttrain_plugins.data.formats.passages import others
from posttrain_plugins.data.formats.prompts import PromptCompletion
from posttrain_plugins.data.formats.schema import holds


class Alpaca(Foreign):
    """`instruction`, `input` and `output`, with `system` and `history` where there are any.

    They become messages: `system`, the turns of `history`, and instruction and input as the user's turn, with an
    empty line between.
    """

    columns = ("instruction", "output")
    optional = ("input", "system", "history")
    becomes = "prompt_completion"
    canonical = PromptCompletion

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Instructions and outputs that are strings."""
        return all(holds(schema, column, "string") for column in self.columns)

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row as prompt and completion."""
        instruction, answer = string(row, "instruction"), string(row, "output")
        about, system = string(row, "input", optional=True), string(row, "system", optional=True)
        demand(bool(instruction.strip()), "`instruction` is empty")
        demand(bool(answer.strip()), "`output` is empty")
        prompt = [{"role": "system", "content": system}] if system.strip() else []
        prompt += _earlier(row.get("history"))
        asked = f"{instruction}\n\n{about}" if about.strip() else instruction
        prompt.append({"role": "user", "content": asked})
        rest = others(row, *self.columns, *self.optional)
        yield rest | {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}


def _earlier(history: Any) -> list[dict[str, Any]]:
    """Return earlier pairs of instruction and answer as turns."""
    if not history:
        return []
    turns: list[dict[str, Any]] = []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)):
            raise Misshapen("`history` is not a list of pairs of instruction and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns
