"""Options as people see them: name, type, default, description."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from posttrain.contracts.component import Config
from posttrain.contracts.stage import SecretMark, SourceMark, VolatileMark
from posttrain.registry.fields import type_name

_TRAITS = {SourceMark: "local file", SecretMark: "secret", VolatileMark: "not in the key"}


def describe(model: type[Config]) -> list[dict[str, Any]]:
    """Return the options of a model in JSON form, in the order in which they are declared."""
    return [_described(name, field) for name, field in model.model_fields.items()]


def _described(name: str, field: FieldInfo) -> dict[str, Any]:
    required = field.is_required()
    default = None if required else field.get_default(call_default_factory=True, validated_data={})
    return {
        "name": name,
        "type": type_name(field.annotation, tuple(field.metadata)),
        "required": required,
        "default": to_jsonable_python(default),
        "description": field.description,
        "traits": [
            label for mark in field.metadata for kind, label in _TRAITS.items() if isinstance(mark, kind)
        ],
    }
