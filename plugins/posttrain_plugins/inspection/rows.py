"""Single rows as training takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from posttrain.contracts.format import Format
from posttrain.contracts.passage import Passage
from posttrain.contracts.trainer import Example
from posttrain.errors import DataError
from posttrain_plugins.inspection.hints import fix_of
from posttrain_plugins.inspection.pieces import pieces_of
from posttrain_plugins.inspection.views import Piece, Remark, RowView, Side, Turn
from posttrain_plugins.preparation.accounts import Account
from posttrain_plugins.preparation.examples import Preparation

Row = Mapping[str, Any]


@dataclass
class Recorder:
    """An encoder that remembers what it was asked last, what it answered, and the codes of all of its notes."""

    encoder: Any
    passages: list[Passage] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)

    def encode(self, passages: Sequence[Passage]) -> list[Any]:
        """Encode passages, and remember them."""
        self.passages = list(passages)
        self.answers = self.encoder.encode(passages)
        notes = (
            note for answer in self.answers if not isinstance(answer, DataError) for note in answer.notes
        )
        self.codes.update((note.message, note.code) for note in notes)
        return self.answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


def row_view(preparation: Preparation, format: Format, row: Row, index: int, place: str) -> RowView:
    """Look at one row.

    Args:
        preparation: How training takes rows.
        format: The dataset's format.
        row: The row.
        index: Its index in the dataset.
        place: Where it stands in its file.
    """
    recorder = Recorder(preparation.encoder)
    recording = replace(preparation, encoder=recorder)
    kept, dropped = _taken(recording, row, index)
    sides = _sides(recording, recorder, kept)
    return RowView(
        number=index + 1,
        place=place,
        turns=turns_of(_said(format, row)),
        tools=_tools(recorder.passages),
        others=_others(row, format),
        sides=sides,
        common=_common(sides),
        dropped=dropped,
    )


def _taken(preparation: Preparation, row: Row, index: int) -> tuple[Example | None, str | None]:
    """Return a row as training has it, or why training leaves it out or stops at it."""
    account = Account()
    try:
        examples = list(preparation.examples([row], account, index))
        account.refused.check(1)
    except DataError as error:
        return None, str(error)
    return (examples[0], None) if examples else (None, next(iter(account.dropped)))


def _sides(preparation: Preparation, recorder: Recorder, kept: Example | None) -> tuple[Side, ...]:
    """Return the sequences of a row, those of one that is left out too; none where one could not be encoded."""
    encoder, sides = recorder.encoder, []
    if any(isinstance(answer, DataError) for answer in recorder.answers):
        return ()
    for number, (passage, answer) in enumerate(zip(recorder.passages, recorder.answers, strict=True)):
        whole = preparation.sequence(passage, answer)
        reading = encoder.read(passage)
        after = whole if kept is None else kept.sequences[number]
        sides.append(
            Side(
                role=passage.role,
                pieces=pieces_of(encoder, reading.text, reading.spans, whole, after, reading.controls),
                remarks=tuple(Remark(n.code, n.message, n.turn, fix_of(n.code)) for n in answer.notes),
                images=len(whole.images),
            )
        )
    return tuple(sides)


def _common(sides: Sequence[Side]) -> int:
    """Count the pieces that all sides begin with, up to the first that is learned."""
    if len(sides) < 2:
        return 0
    columns = zip(*(side.pieces for side in sides), strict=False)
    return sum(1 for _ in takewhile(_shared, columns))


def _shared(pieces: tuple[Piece, ...]) -> bool:
    return not pieces[0].supervised and all(piece == pieces[0] for piece in pieces)


def _said(format: Format, row: Row) -> Sequence[Passage]:
    try:
        return format.passages(row)
    except DataError:
        return ()  # the row is left out for this very reason, which is shown


def turns_of(passages: Sequence[Passage]) -> tuple[Turn, ...]:
    """Return what passages say, message by message; a prompt that they share once."""
    turns: list[Turn] = []
    for number, passage in enumerate(passages):
        if passage.prompt is not None and (number == 0 or passage.prompt != passages[0].prompt):
            part = "prompt" if number == 0 else f"prompt of {passage.role}"
            turns.extend(_turns(part, passage.prompt))
        if passage.completion is not None:
            alone = passage.prompt is None and len(passages) == 1
            turns.extend(_turns("conversation" if alone else passage.role, passage.completion))
    return tuple(turns)


def _turns(part: str, said: Any) -> list[Turn]:
    if isinstance(said, str):
        return [Turn(part, "", said)]
    return [
        Turn(
            part,
            str(message.get("role")),
            _content(message.get("content")),
            {key: _json(value) for key, value in message.items() if key not in ("role", "content")},
        )
        for message in said
    ]


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        str(part["text"]) if isinstance(part, Mapping) and "text" in part else f"[{_kind(part)}]"
        for part in content
    )


def _kind(part: Any) -> str:
    return str(part.get("type", "part")) if isinstance(part, Mapping) else str(part)


def _tools(passages: Sequence[Passage]) -> tuple[str, ...]:
    return tuple(map(_json, passages[0].tools or ())) if passages else ()


def _others(row: Row, format: Format) -> dict[str, str]:
    used = {*format.columns, *format.optional}
    return {name: _json(value) for name, value in row.items() if name not in used}


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
