"""The pipeline as its author wrote it: a strict schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from posttrain.keypath import KeyPath
from posttrain.planning.fields import axes, distinct, input_references, plain_data, unbroken, without_nul
from posttrain.planning.references import NAME, Ref

Scalar = str | int | float | bool | None
StageName = Annotated[str, Field(pattern=f"^{NAME}$")]
PluginName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?$")]
Options = Annotated[dict[str, Any], BeforeValidator(plain_data)]

_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


class Part(BaseModel):
    """One mapping of a pipeline file: no other keys, no other types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_by_alias=True,
        validate_by_name=True,
        hide_input_in_errors=True,
    )


class Resources(Part):
    """What a stage needs of the machine."""

    cpus: int | None = Field(default=None, ge=1, description="processor cores; all there are when left out")
    gpus: int = Field(default=0, ge=0, description="accelerators")
    memory: str | None = Field(
        default=None,
        pattern=r"^[1-9][0-9]{0,8} ?(B|KiB|MiB|GiB|TiB)$",
        description="main memory, such as 8GiB",
    )

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        match = re.fullmatch(r"([0-9]+) ?([A-Za-z]+)", self.memory or "")
        return int(match[1]) << _UNITS[match[2]] if match else None


class Runtime(Part):
    """The Python environment a stage runs in."""

    python: Annotated[str | None, BeforeValidator(unbroken)] = Field(
        default=None, min_length=1, description="the interpreter; the caller's when left out"
    )
    env: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str],
        BeforeValidator(without_nul),
        BeforeValidator(plain_data),
    ] = Field(default={}, description="environment variables; secrets by reference, as env:NAME")


class StageDefaults(Part):
    """What the stages that a glob on `uses` matches have in common."""

    with_: Options = Field(
        default={}, validation_alias="with", serialization_alias="with", description="options"
    )
    resources: Resources = Resources()
    runtime: Runtime = Runtime()


class StageSpec(Part):
    """One stage, before its matrix is expanded. In Python, `with` is spelt `with_`."""

    uses: PluginName = Field(description="the stage plugin")
    inputs: Annotated[dict[str, str | list[str]], BeforeValidator(input_references)] = Field(
        default={},
        description="for each input port: STAGE, STAGE.PORT, STAGE[*], STAGE[AXIS=VALUE], or a list of them",
    )
    with_: Options = Field(
        default={}, validation_alias="with", serialization_alias="with", description="the plugin's options"
    )
    needs: Annotated[list[StageName], BeforeValidator(distinct)] = Field(
        default=[], description="stages that must have passed before, without handing anything over"
    )
    matrix: Annotated[dict[str, list[Scalar]], BeforeValidator(axes)] = Field(
        default={},
        description="key paths in `with` and the values each takes; one node for every combination",
    )
    resources: Resources = Resources()
    runtime: Runtime = Runtime()

    def references(self) -> Iterator[tuple[KeyPath, Ref]]:
        """Yield every reference in `inputs` with its path below the stage."""
        for port, given in self.inputs.items():
            if isinstance(given, str):
                yield ("inputs", port), Ref.parse(given)
            else:
                yield from ((("inputs", port, index), Ref.parse(text)) for index, text in enumerate(given))


class PipelineSpec(Part):
    """A whole pipeline file."""

    name: str | None = Field(default=None, pattern=r"^[^\x00-\x1f\x7f]+$", description="what runs are called")
    plugins: Annotated[
        list[Annotated[str, Field(min_length=1), BeforeValidator(unbroken)]], BeforeValidator(distinct)
    ] = Field(default=[], description="local plugin files, relative to this file")
    defaults: dict[str, StageDefaults] = Field(
        default={}, description="globs on `uses`, such as train.*; later ones win"
    )
    stages: dict[StageName, StageSpec] = Field(min_length=1, description="the stages by name, in any order")
