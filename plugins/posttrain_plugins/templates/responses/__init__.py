"""Reading a model's answer back into a message: reasoning, text and tool calls, by the family of its chat template.

What does not fit the family's format is never dropped: it stays in the content, and a problem says what is wrong.
"""

from posttrain_plugins.templates.responses.choice import FAMILIES, ResponseParser, parser_for
from posttrain_plugins.templates.responses.parsed import ParsedResponse, Parser, Tools

__all__ = ["FAMILIES", "ParsedResponse", "Parser", "ResponseParser", "Tools", "parser_for"]
