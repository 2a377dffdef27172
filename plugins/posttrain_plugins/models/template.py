"""The chat template that a stage is told to give a model: one of the library by its name, or a file."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from posttrain.artifacts.fingerprint import Refusal
from posttrain.errors import DataError
from posttrain.wording import did_you_mean
from posttrain_plugins.models.artifact import GENERATION, write_config
from posttrain_plugins.models.dialogue import declared_eos, forget_overruled
from posttrain_plugins.templates.encoder import CLOCK, Encoder
from posttrain_plugins.templates.library import (
    END_OF_TURN,
    TEMPLATES,
    NamedTemplate,
    TemplateName,
    chatml,
    named_template,
)
from posttrain_plugins.templates.render import ChatTemplate
from posttrain_plugins.templates.tokenizer import TEMPLATE, TokenizerFiles

_SUFFIX = ".jinja"


_USER, _ANSWER = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
_RESULT = {"role": "tool", "content": "", "tool_call_id": "a1b2c3d4e"}
_BLANK: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([{"role": "system", "content": ""}, _USER, _ANSWER], None),
    ([_USER, _ANSWER, _USER], None),
    (
        [_USER, {**_ANSWER, "tool_calls": [_CALL]}, _RESULT, _ANSWER],
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}],
    ),
)


def _known(value: Any) -> Any:
    if isinstance(value, str) and value not in TEMPLATES:
        near = did_you_mean(value, TEMPLATES) or "a template of your own is a path that ends in `.jinja`"
        raise ValueError(f"there is no chat template `{value}`: {near} (there are {', '.join(TEMPLATES)})")
    return value


def _files_too(schema: dict[str, Any]) -> None:
    if "anyOf" not in schema:
        schema["anyOf"] = [{name: schema.pop(name) for name in ("enum", "type")}]
    schema["anyOf"].append({"type": "string", "pattern": r"\.jinja$"})


TemplateOption = Annotated[TemplateName, BeforeValidator(_known)]
"""The name of a template of the library."""


def template_field(default: str | None, description: str) -> Any:
    """Return the field of an option `template`, which may hold a path as well as a name."""
    return Field(
        default=default,
        description=f"{description}: a name, or a path that ends in `.jinja`",
        json_schema_extra=_files_too,
    )


def with_file(values: Any) -> Any:
    """Move a path from the option `template` to `template_file`, whose content is part of the key.

    Raises:
        ValueError: Both name a file.
    """
    value = values.get("template") if isinstance(values, Mapping) else None
    if not isinstance(value, str) or not value.endswith(_SUFFIX):
        return values
    if values.get("template_file") is not None:
        raise ValueError("give `template` or `template_file`, not both")
    return {**{key: item for key, item in values.items() if key != "template"}, "template_file": value}


def template_source(name: str | None, file: Path | None) -> str:
    """Return the source of a template of the library, or what a file holds.

    Raises:
        DataError: The file is not UTF-8 text.
    """
    if file is None:
        return named_template(str(name)).source
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template is not UTF-8 text: {error}", where=str(file)) from error


def text_of_template(source: str, special: Sequence[str], end: str) -> str:
    """Return the characters that a template writes itself, around empty messages.

    Args:
        source: The template.
        special: Special tokens, whose characters do not count.
        end: The end-of-sequence token.
    """
    template = ChatTemplate(source, {"eos_token": end})
    found: set[str] = set()
    for messages, tools in _BLANK:
        for opened in (False, True):
            try:
                text = template.render(messages, opened, tools, CLOCK)
            except Refusal:
                continue
            for token in sorted(special, key=len, reverse=True):
                text = text.replace(token, "")
            found |= set(text)
    return "".join(sorted(found | set(string.digits if found & set(string.digits) else "")))


def put_template(directory: Path, name: str | None, file: Path | None) -> None:
    """Make a template a model's only one and its ends of turn ids at which a generation stops.

    Args:
        directory: The files of the model, tokenizer included.
        name: A template of the library.
        file: A file with one, in its place.

    Raises:
        DataError: The tokenizer lacks tokens that the template writes.
    """
    source, ends = _chosen(directory, name, file)
    (directory / TEMPLATE).write_text(source, encoding="utf-8", newline="")
    forget_overruled(directory)
    encoder = Encoder.open(directory)
    if stops := _more_stops(encoder, ends):
        write_config(directory / GENERATION, {**encoder.generation, "eos_token_id": stops})


def templated(directory: Path, name: str | None, file: Path | None) -> Encoder:
    """Return what encodes for a model once `put_template` has done its work; changes no file.

    Args:
        directory: As `put_template`.
        name: As `put_template`.
        file: As `put_template`.

    Raises:
        DataError: As `put_template`.
    """
    source, ends = _chosen(directory, name, file)
    encoder = Encoder.open(directory)
    encoder.files = replace(encoder.files, template=source)
    encoder.template = ChatTemplate(source, encoder.files.special_tokens)
    if stops := _more_stops(encoder, ends):
        encoder.generation = {**encoder.generation, "eos_token_id": stops}
    return encoder


def _chosen(directory: Path, name: str | None, file: Path | None) -> tuple[str, tuple[str, ...]]:
    """Return the source of the template that is meant, and the tokens it is known to end turns with."""
    if name is None:
        return template_source(None, file), ()
    named = named_template(name)
    return fitted(directory, named), named.ends


def fitted(directory: Path, template: NamedTemplate) -> str:
    """Return a template's source for a tokenizer, which must have its tokens.

    ChatML alone is fitted: where its own end of turn is missing, the end-of-sequence token takes its place.

    Raises:
        DataError: Tokens are missing.
    """
    files = TokenizerFiles.read(directory)
    ends_by_eos = not template.ends or (template.name == "chatml" and not _has(files, END_OF_TURN))
    if ends_by_eos and "eos_token" not in files.special_tokens:
        raise DataError(
            "the tokenizer has no token to end a turn with",
            where=str(directory),
            expected=f"{_ticked(template.ends[:1])} among its special tokens, or an `eos_token`"
            if template.ends
            else "an `eos_token`",
            fix="name `eos_token` in `tokenizer_config.json`, or use a template made for this tokenizer",
        )
    if template.name == "chatml":
        return chatml(end=files.special_tokens["eos_token"]) if ends_by_eos else template.source
    missing = [token for token in template.tokens if not _has(files, token)]
    if missing:
        raise DataError(
            f"the tokenizer has no tokens for some marks of the chat template `{template.name}`",
            where=str(directory),
            found=f"missing {_ticked(missing)}",
            expected="each mark is one token, or the model could not tell it from text",
            fix="use a template made for this tokenizer, or one whose marks are text, such as `zephyr` or `vicuna`",
        )
    return template.source


def _more_stops(encoder: Encoder, ends: tuple[str, ...]) -> list[int] | None:
    """Return the ids that other tools are to stop at, if the template's ends of turn are not all among them yet."""
    declared = declared_eos(encoder)
    named = {encoder.files.plain.token_to_id(end) for end in ends} - {None}
    turns = {encoder.end_of_turn} - {None}
    added = sorted(id for id in {*named, *turns} if id is not None and id not in declared)
    return [*declared, *added] if added else None


def _has(files: TokenizerFiles, token: str) -> bool:
    return files.plain.token_to_id(token) in files.added


def _ticked(tokens: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{token}`" for token in tokens)
