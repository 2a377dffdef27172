"""Preferences whose prompt is what both sides begin with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.contracts.format import Column, Row
from posttrain_plugins.data.formats.foreign import Foreign, Misshapen, demand
from posttrain_plugins.data.formats.passages import others
from posttrain_plugins.data.formats.preference import SIDES, Preference
from posttrain_plugins.data.formats.schema import begins_with_prompt, holds
from posttrain_plugins.data.formats.values import turns_problem

_SPEAKER = re.compile(r"\n\n(Human|Assistant):[ ]?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class ImplicitPreference(Foreign):
    """`chosen` and `rejected` as whole conversations; the history that they share is the prompt."""

    columns = SIDES
    optional = ("tools", "chat_template_kwargs", "image", "images")
    becomes = "preference"
    canonical = Preference

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Two columns of conversations, and no prompt."""
        return "prompt" not in schema and all(holds(schema, side, "list") for side in SIDES)

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row with an explicit prompt."""
        yield others(row, *SIDES) | parted(*(_conversation(row, side) for side in SIDES))


class FullPreference(Foreign):
    """`prompt` beside conversations that hold it too, as in UltraFeedback's binarized form; its scores travel along."""

    columns = ("prompt", *SIDES)
    optional = ("tools", "score_chosen", "score_rejected")
    becomes = "preference"
    canonical = Preference

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """A prompt, and sides that do not begin with the answer."""
        return super().fits(schema) and any(begins_with_prompt(schema, side) for side in SIDES)

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row with the shared history as its prompt."""
        made = parted(*(_conversation(row, side) for side in SIDES))
        prompt = row["prompt"]
        if isinstance(prompt, str):
            asked = [turn.get("content") for turn in made["prompt"] if turn["role"] == "user"]
            demand(
                any(isinstance(text, str) and text.strip() == prompt.strip() for text in asked),
                "`prompt` is no user turn that `chosen` and `rejected` share",
            )
        else:
            demand(prompt == made["prompt"], "`prompt` is not what `chosen` and `rejected` share")
        yield others(row, *self.columns) | made


class HhRlhf(Foreign):
    r"""`chosen` and `rejected` as transcripts of turns that begin with `\n\nHuman:` and `\n\nAssistant:`.

    Bai et al., arXiv 2204.05862.
    """

    columns = SIDES
    becomes = "preference"
    canonical = Preference

    def fits(self, schema: Mapping[str, Column]) -> bool:
        """Two columns of strings, and no prompt."""
        return "prompt" not in schema and all(holds(schema, side, "string") for side in SIDES)

    def converted(self, row: Row) -> Iterable[Row]:
        """Return the row as messages with an explicit prompt."""
        yield others(row, *SIDES) | parted(*(_transcript(row, side) for side in SIDES))


def parted(chosen: Sequence[Any], rejected: Sequence[Any]) -> dict[str, list[Any]]:
    """Divide two conversations into the history that they share and what differs.

    Equal conversations part at their last answer.

    Raises:
        Misshapen: They share nothing, or part at something else than the assistant's turn.
    """
    most = min(len(chosen), len(rejected))
    shared = next((at for at in range(most) if chosen[at] != rejected[at]), most)
    if chosen == rejected:
        answers = [at for at, turn in enumerate(chosen) if turn["role"] == "assistant"]
        shared = answers[-1] if answers else 0
    if not shared:
        raise Misshapen(
            "`chosen` and `rejected` share no history that could be the prompt; where it stands in another column, "
            "rename that to `prompt`"
        )
    for side, turns in zip(SIDES, (chosen, rejected), strict=True):
        if shared == len(turns):
            raise Misshapen(f"`{side}` ends where the other side goes on; it has no answer of its own")
        if turns[shared]["role"] != "assistant":
            raise Misshapen(
                f"`{side}` parts from the other side at message {shared + 1}, a `{turns[shared]['role']}` turn; "
                "they must part at an assistant's answer"
            )
    return {
        "prompt": list(chosen[:shared]),
        "chosen": list(chosen[shared:]),
        "rejected": list(rejected[shared:]),
    }


def _conversation(row: Row, side: str) -> list[Any]:
    turns = row[side]
    demand(isinstance(turns, list), f"`{side}` is {type(turns).__name__}, not a list of messages")
    problem = turns_problem(turns)
    demand(problem is None, f"`{side}` {problem}")
    return list(turns)


def _transcript(row: Row, side: str) -> list[dict[str, str]]:
    text = row[side]
    demand(isinstance(text, str), f"`{side}` is {type(text).__name__}, not a transcript")
    before, *pieces = _SPEAKER.split(text if text.startswith("\n\n") else f"\n\n{text.lstrip()}")
    demand(
        bool(pieces) and not before.strip(),
        f"`{side}` is no transcript that begins with `Human:`; other strings need a column `prompt`",
    )
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
