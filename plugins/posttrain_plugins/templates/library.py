"""Chat templates for models that come without one."""

from __future__ import annotations

START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

_CHATML = """\
{%- for message in messages -%}
{{ '@start' + message['role'] + '\\n' + message['content'] + '@end' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '@startassistant\\n' }}
{%- endif -%}
"""


def chatml(start: str = START_OF_TURN, end: str = END_OF_TURN) -> str:
    """Return a ChatML template: every turn is `start`, role, newline, content, `end`, newline.

    Args:
        start: What opens a turn.
        end: What closes it; it should be one token of the tokenizer, since generation stops there.
    """
    return _CHATML.replace("@start", _quoted(start)).replace("@end", _quoted(end))


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
