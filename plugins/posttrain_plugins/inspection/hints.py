"""What can be done about what a reading notes."""

from __future__ import annotations

from collections.abc import Mapping

_FIXES: Mapping[str, str] = {
    "dropped-field": "remove the field, put it into the content, or use a template that prints it",
    "dropped-turn": "leave such turns out, or use a template that prints them",
    "trimmed": "remove white space from the edges of the rows' texts, so that data and training agree",
    "reordered": "order the rows' messages as the template prints them",
    "merged": "merge such messages in the rows, or use a template that keeps them apart",
    "rewritten": "look at the text as it is rendered; where that is not meant, use a template that prints it as it is",
    "no-end-of-turn": "use a template that ends the assistant's turn: `template: chatml` of `model.load`",
    "partial-prompt": "use a template whose generation prompt is what stands before its answers, or generate from that",
    "control-token": "remove the token from the text if it is not meant; it is encoded as plain characters",
    "steps-apart": "choose a `step_separator` that the tokenizer keeps apart from what follows, such as a line break",
    "markers-differ": "nothing has to be done: what is learned follows the answer, not the template's markers",
}


def fix_of(code: str) -> str | None:
    """Return what to do about a note, where something is to be done."""
    return _FIXES.get(code)
