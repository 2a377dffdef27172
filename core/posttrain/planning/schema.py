"""The JSON Schema (draft 2020-12) of a pipeline file, for editors: completion, descriptions, typos."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.planning.references import NAME
from posttrain.planning.spec import PipelineSpec

if TYPE_CHECKING:
    from posttrain.contracts.stage import Stage
    from posttrain.registry.catalogue import Catalogue

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Json = dict[str, Any]


def pipeline_schema(catalogue: Catalogue) -> Json:
    """Return the schema of a whole file, in which `uses` decides what `with` and `inputs` may hold.

    Options that a stage requires are not required here: they may come from `defaults` or from a matrix.

    Args:
        catalogue: The plugins there are.
    """
    schema = PipelineSpec.model_json_schema(by_alias=True)
    definitions: Json = schema["$defs"]
    stage: Json = definitions["StageSpec"]
    names = {name: group for group in (Group.STAGE, Group.TRAINER) for name in catalogue.names(group)}
    stage["properties"]["uses"] = {
        "description": "the stage plugin",
        "anyOf": [
            {"const": name, "description": catalogue.entry(group, name).registration.summary}
            for name, group in sorted(names.items())
        ],
    }
    stage["allOf"] = [_case(name, catalogue, definitions) for name in sorted(names)]
    schema["properties"]["stages"] = {
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"pattern": f"^{NAME}$"},
        "additionalProperties": {"$ref": "#/$defs/StageSpec"},
    }
    return {"$schema": DIALECT, **schema, "title": "posttrain pipeline"}


def _case(name: str, catalogue: Catalogue, definitions: Json) -> Json:
    """Return what holds for the stages that use the plugin `name`."""
    from posttrain.registry.components import config_schema

    condition = {"properties": {"uses": {"const": name}}, "required": ["uses"]}
    try:
        stage = catalogue.stage(name)
        options = _hoisted(config_schema(stage.config, catalogue), name, definitions)
    except PluginError as error:
        broken = {"description": f"this plugin cannot be used: {error.message}"}
        return {"if": condition, "then": {"properties": {"with": broken}}}
    options.pop("required", None)
    then: Json = {"properties": {"with": options, "inputs": _inputs(stage)}}
    if then["properties"]["inputs"]["required"]:
        then["required"] = ["inputs"]
    return {"if": condition, "then": then}


def _inputs(stage: Stage) -> Json:
    one: Json = {"type": "string"}
    several: Json = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}
    return {
        "type": "object",
        "properties": {
            port.name: {**several, "description": f"takes {', '.join(sorted(port.kinds))}"}
            for port in stage.inputs
        },
        "required": [port.name for port in stage.inputs if not port.optional],
        "additionalProperties": False,
    }


def _hoisted(schema: Mapping[str, Any], name: str, definitions: Json) -> Json:
    """Move the schema's own definitions to the top of the document, under names that cannot collide."""
    prefix = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    own = schema.get("$defs", {})
    renamed = {f"#/$defs/{key}": f"#/$defs/{prefix}:{key}" for key in own}
    definitions.update({f"{prefix}:{key}": _redirected(value, renamed) for key, value in own.items()})
    moved: Json = _redirected({key: value for key, value in schema.items() if key != "$defs"}, renamed)
    return moved


def _redirected(value: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_redirected(item, renamed) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: renamed.get(item, item)
        if key == "$ref" and isinstance(item, str)
        else _redirected(item, renamed)
        for key, item in value.items()
    }
