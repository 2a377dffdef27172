"""Chat templates by name, for models that come without one or are to get another.

Each is one file beside this module, a template that stands alone: it becomes part of the model that gets it.
"""

from __future__ import annotations

from posttrain_plugins.templates.library.index import (
    TEMPLATES,
    NamedTemplate,
    TemplateName,
    named_template,
)

__all__ = [
    "END_OF_TURN",
    "START_OF_TURN",
    "TEMPLATES",
    "NamedTemplate",
    "TemplateName",
    "chatml",
    "named_template",
]

START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"


def chatml(start: str = START_OF_TURN, end: str = END_OF_TURN) -> str:
    """Return a ChatML template: every turn is `start`, role, newline, content, `end`, newline.

    Args:
        start: What opens a turn.
        end: What closes it; it should be one token of the tokenizer, since generation stops there.
    """
    source = named_template("chatml").source
    return source.replace(START_OF_TURN, _quoted(start)).replace(END_OF_TURN, _quoted(end))


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
