"""Components: plugins that a stage's options name.

A config field annotated `Annotated[Choice, Uses(Group.LOSS)]` accepts a bare name (`loss: sigmoid`) or a mapping
(`loss: {name: sigmoid, beta: 0.1}`). The registry validates the options with the component's own config model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from posttrain.contracts.registration import Group


class Config(BaseModel):
    """Base of every option model: strict, frozen, unknown keys refused.

    Class attributes:
        elsewhere: What takes the place of options that people bring from other tools, by their names there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    elsewhere: ClassVar[Mapping[str, str]] = {}


class NoOptions(Config):
    """The config of a component without options."""


@dataclass(frozen=True)
class Uses:
    """Marks a config field that names a component of `group`.

    `having` names attributes the component must have: a trainer says `(("family", Family.PREFERENCE),)`, and a
    loss of another family is refused when the pipeline is read.
    """

    group: Group
    having: tuple[tuple[str, Any], ...] = ()

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Leave the group in the JSON Schema, where the registry expands it."""
        return {**handler(schema), "x-posttrain-uses": self.group.value}


class Choice(BaseModel):
    """A component's name and its options, with defaults filled in once the registry has validated them."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The options without the name."""
        return dict(self.model_extra or {})


@dataclass(frozen=True)
class Component:
    """What a worker gets for a `Choice`: the loaded plugin object and its validated config."""

    name: str
    plugin: Any
    config: Any
