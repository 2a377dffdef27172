"""Rendering chat templates in a sandbox, byte for byte as `transformers` does.

Templates come with models from anywhere: they run in jinja2's immutable sandbox and see plain JSON only.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from posttrain.artifacts.fingerprint import Refusal

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that a message's reasoning goes by."""

Message = Mapping[str, Any]


class ChatTemplate:
    """A chat template with the special tokens it may name.

    Args:
        source: The jinja2 source.
        special_tokens: `bos_token`, `eos_token` and so on, as text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: dt.datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            messages: The turns; keys whose value is None are dropped.
            add_generation_prompt: End with what opens an assistant turn.
            tools: JSON schemas of the tools.
            now: What `strftime_now` reads; the clock when None.
            arguments: What the template is given besides, such as `enable_thinking`.

        Raises:
            Refusal: The template declines the conversation, or cannot be compiled or rendered.
        """
        return self.written(self.variables(messages, add_generation_prompt, tools, now, arguments))

    def written(self, variables: Mapping[str, Any]) -> str:
        """Return what the template writes of its variables.

        Raises:
            Refusal: As `render`.
        """
        with refusing():
            return self._template.render(variables)

    def variables(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        now: dt.datetime | None,
        arguments: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return what the template is given."""
        return {
            **self.special_tokens,
            **(arguments or {}),
            "messages": [prepared(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": (now or dt.datetime.now()).strftime,
        }

    @cached_property
    def _template(self) -> Template:
        with refusing():
            return _environment().from_string(self.source)


def parse(source: str) -> nodes.Template:
    """Return the syntax tree of a chat template.

    Raises:
        Refusal: It cannot be parsed.
    """
    with refusing():
        return _environment().parse(source)


def prepared(message: Message) -> dict[str, Any]:
    """Drop empty fields and spell reasoning under every name that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what a template raises into a `Refusal`."""
    import jinja2

    try:
        yield
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Refusal(str(error)) from error


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_tag(str), loopcontrols]
    )
    equip(environment)
    return environment


def equip(environment: Environment) -> None:
    """Add what chat templates may use besides jinja's own."""
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _namespace()


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, spelled as `transformers` does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise Refusal(message)


class _Dict:
    """The `dict` that templates see: it builds dictionaries and exposes no type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _namespace() -> type:
    """Return a `namespace` without underscored attributes, which reach Python's internals."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def checked(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template cannot set the attribute {name!r} on a namespace")

    class TemplateNamespace(Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, given = args[0], args[1:]
            attributes = dict(*given, **kwargs)
            for name in attributes:
                checked(name)
            Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            checked(name)
            Namespace.__setitem__(self, name, value)

    return TemplateNamespace


def generation_tag(write: Callable[[str], str]) -> type:
    """Return an extension for `{% generation %}`, which marks the assistant's text: it writes the body."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return write(caller())

    return GenerationTag
