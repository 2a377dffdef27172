"""Answers without a format."""

from __future__ import annotations

from posttrain_plugins.templates.responses.parsed import ENDS, Draft, Tools


class Plain:
    """Everything is content."""

    name = "plain"
    ends = ENDS
    opening = ""
    marks: tuple[str, ...] = ()

    def read(self, text: str, opened: bool, draft: Draft, tools: Tools) -> None:
        """See `Family.read`."""
        draft.content.append(text)
