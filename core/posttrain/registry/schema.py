"""The JSON Schema of options, with the options of every component they may name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.contracts.component import Config
from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.validation import config_of

USES = "x-posttrain-uses"
_CHOICE = re.compile(r"#/\$defs/(.*\.)?Choice")
Schema = dict[str, Any]


def config_schema(model: type[Config], catalogue: Catalogue) -> Schema:
    """Return the JSON Schema of a stage's options.

    A field that names a component takes a bare name or a mapping of the name and that component's own
    options; each group's alternatives stand once, under `$defs`, as `uses.<group>`. Components that cannot be
    loaded cannot be used either, so they are left out; `posttrain plugins check` reports them.
    """
    schema = model.model_json_schema()
    definitions: Schema = schema.pop("$defs", {})
    pending = _linked(schema) | _linked(definitions)
    done: set[str] = set()
    while pending:
        group = pending.pop()
        done.add(group)
        alternatives, found = _alternatives(Group(group), catalogue)
        definitions.update(found)
        definitions[f"uses.{group}"] = {"oneOf": alternatives}
        pending |= (_linked(found) | _linked(alternatives)) - done
    definitions.pop("Choice", None)
    named = _references(schema) | _references(definitions)
    definitions = {
        key: value for key, value in definitions.items() if key in named or not key.startswith("default.")
    }
    return {**schema, "$defs": definitions} if definitions else schema


def _alternatives(group: Group, catalogue: Catalogue) -> tuple[list[Schema], Schema]:
    alternatives: list[Schema] = []
    definitions: Schema = {}
    for name in catalogue.names(group):
        try:
            model = config_of(catalogue.load(group, name))
        except PluginError:
            continue
        prefix = f"{group}.{name.replace('/', '.')}."
        schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
        inner = schema.pop("$defs", {})
        definitions.update({f"{prefix}{key}": value for key, value in inner.items() if key != "Choice"})
        summary = catalogue.entry(group, name).registration.summary
        alternatives.extend(_spellings(catalogue.aliases(group, name), summary, schema))
        definitions[_nameless(group, name)] = {
            "type": "object",
            "description": summary,
            "properties": schema.get("properties", {}),
            "required": schema.get("required", []),
            "additionalProperties": False,
        }
    return alternatives, definitions


def _spellings(names: list[str], summary: str, options: Schema) -> Iterator[Schema]:
    required = options.get("required", [])
    name: Schema = {"const": names[0]} if len(names) == 1 else {"enum": names}
    if not required:
        yield {**name, "description": summary}
    yield {
        "type": "object",
        "description": summary,
        "properties": {"name": name, **options.get("properties", {})},
        "required": ["name", *required],
        "additionalProperties": False,
    }


def _linked(schema: Any) -> set[str]:
    """Turn every marked field of a schema, in place, into a link to its group; return the groups."""
    if isinstance(schema, list):
        return {group for item in schema for group in _linked(item)}
    if not isinstance(schema, Mapping):
        return set()
    groups = {group for item in schema.values() for group in _linked(item)}
    if isinstance(schema, dict) and USES in schema:
        group = schema.pop(USES)
        link = f"#/$defs/uses.{group}"
        schema.update({key: _named(item, link) for key, item in schema.items() if key != "default"})
        default = schema.get("default")
        if isinstance(default, Mapping):
            arms = [{"$ref": schema.pop("$ref")}] if "$ref" in schema else schema.pop("anyOf")
            schema["anyOf"] = [*arms, {"$ref": f"#/$defs/{_nameless(group, default['name'])}"}]
        groups.add(group)
    return groups


def _named(schema: Any, link: str) -> Any:
    """Return the schema of a marked field with its choices, alone or in a list, replaced by a link."""
    if isinstance(schema, str) and _CHOICE.fullmatch(schema):
        return link
    if isinstance(schema, list):
        return [_named(item, link) for item in schema]
    if isinstance(schema, Mapping):
        return {key: _named(item, link) for key, item in schema.items()}
    return schema


def _nameless(group: str, name: str) -> str:
    """Return the definition of a component's options without its name."""
    return f"default.{group}.{name.replace('/', '.')}"


def _references(schema: Any) -> set[str]:
    """Return the definitions that a schema refers to."""
    if isinstance(schema, list):
        return {name for item in schema for name in _references(item)}
    if not isinstance(schema, Mapping):
        return set()
    own = {schema["$ref"].removeprefix("#/$defs/")} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*(_references(item) for item in schema.values()))
